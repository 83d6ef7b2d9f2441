"""Which definition of a register reaches a use, found on demand.

Registers written once have one definition and cost nothing. Others get the versions of static single
assignment, but only where someone asks: `reaching` finds the last definition in the block, or walks up
to the nearest join, which becomes a phi. So a kernel with ten thousand accumulators makes no phis for
them, and the work stays linear in what feeds an address.

Keys: the register's name (one definition), ("def", name, index) or ("phi", block, name); None when the
register is not defined on any way.
"""

from bisect import bisect_left

from tessera_ptx.cfg import Graph
from tessera_ptx.values import Key


class Definitions:
    """The definitions of a kernel's registers."""

    def __init__(self, graph: Graph, defs: dict[str, list[int]]) -> None:
        self.graph, self.defs = graph, defs
        self._at_entry: dict[tuple[int, str], Key] = {}
        self._trivial: dict[Key, Key] = {}

    def reaching(self, index: int, name: str) -> Key:
        """The key of the value that `name` holds just before instruction `index`."""
        found = self.defs.get(name)
        if found is None:
            return None
        if len(found) == 1:
            return name
        block = self.graph.block_of[index]
        at = bisect_left(found, index) - 1
        if at >= 0 and found[at] >= self.graph.blocks[block].start:
            return ("def", name, found[at])
        return self._entry(block, name, found)

    def at_end(self, block: int, name: str) -> Key:
        """The key of the value that `name` holds when the block ends."""
        found = self.defs[name]
        node = self.graph.blocks[block]
        at = bisect_left(found, node.stop) - 1
        if at >= 0 and found[at] >= node.start:
            return ("def", name, found[at])
        return self._entry(block, name, found)

    def _entry(self, block: int, name: str, found: list[int]) -> Key:
        path = []
        blocks, memo = self.graph.blocks, self._at_entry
        while True:
            key = memo.get((block, name), "")
            if key != "":
                break
            path.append(block)
            node = blocks[block]
            # The entry block can be a loop header: then there is also the way in from outside.
            if len(node.preds) != 1 or block == 0:
                key = ("phi", block, name) if node.preds else None
                break
            block = node.preds[0]
            before = blocks[block]
            at = bisect_left(found, before.stop) - 1
            if at >= 0 and found[at] >= before.start:
                key = ("def", name, found[at])
                break
        for passed in path:
            memo[(passed, name)] = key
        return key

    def phi_inputs(self, block: int, name: str) -> list[tuple[Key, bool]]:
        """(key, comes over a back edge) for each predecessor."""
        preds = self.graph.blocks[block].preds
        return [(self.at_end(p, name), p >= block) for p in preds]
