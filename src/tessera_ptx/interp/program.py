"""A function as basic blocks, decoded once and run many times.

Blocks end at branches, calls, barriers and before labels; a warp-collective instruction (shuffle, vote,
mma, ...) is a block of its own, because its lanes may have to wait for one another. Each block has a
rank: its position in a post-order walk of the post-dominator tree. A block's post-dominators all rank
behind it, so an engine that always runs the lowest-ranked block that has lanes reconverges at immediate
post-dominators.
"""

from tessera_ptx.interp.state import Block
from tessera_ptx.syntax import Function, Instruction, Sym

ENDS = frozenset({"bra", "brx", "ret", "exit", "trap", "call"})
_COLLECTIVE = frozenset({"mma", "ldmatrix", "stmatrix", "wmma", "wgmma", "movmatrix", "elect", "redux"})
_COLLECTIVE_SYNC = frozenset({"shfl", "vote", "match"})


def kind_of(ins: Instruction) -> str:
    """How an instruction ends or bounds a block; 'plain' when it does not."""
    name, mods = ins.op.name, ins.op.mods
    if name in ENDS:
        return name
    if name in ("bar", "barrier"):
        return "collective" if "warp" in mods else "barrier"
    if name in _COLLECTIVE or (name in _COLLECTIVE_SYNC and "sync" in mods):
        return "collective"
    return "plain"


def blocks_of(function: Function) -> list[Block]:
    """The basic blocks of a function, with successors and ranks."""
    starts = {0, *function.labels.values()}
    for index, ins in enumerate(function.body):
        kind = kind_of(ins)
        if kind != "plain":
            starts.add(index + 1)
            if kind == "collective":
                starts.add(index)
    ordered = sorted(s for s in starts if s < len(function.body)) or [0]
    blocks = []
    for here, there in zip(ordered, [*ordered[1:], len(function.body)], strict=True):
        blocks.append(_block(here, list(function.body[here:there])))
    where = {block.first: i for i, block in enumerate(blocks)}
    labels = {name: where.get(at, -1) for name, at in function.labels.items()}
    for i, block in enumerate(blocks):
        block.next = i + 1 if i + 1 < len(blocks) else -1
        block.targets = _targets(block, function, labels)
    _rank(blocks)
    return blocks


def _block(first: int, body: list[Instruction]) -> Block:
    kind = kind_of(body[-1]) if body else "plain"
    if kind in ("plain", "collective"):
        return Block(first, body, None, kind)
    return Block(first, body[:-1], body[-1], kind)


def _targets(block: Block, function: Function, labels: dict[str, int]) -> tuple[int, ...]:
    if block.end is None or block.kind not in ("bra", "brx"):
        return ()
    last = block.end.operands[-1]
    name = last.name if isinstance(last, Sym) else ""
    names = function.tables.get(name, ()) if block.kind == "brx" else (name,)
    return tuple(labels.get(n, -1) for n in names)


def successors(block: Block) -> list[int]:
    """Blocks that may run next within the function; -1 is the way out."""
    if block.kind in ("ret", "exit", "trap"):
        return [-1] if block.end is not None and block.end.guard is None else [-1, block.next]
    if block.kind in ("bra", "brx"):
        falls = block.end is not None and block.end.guard is not None
        return [*block.targets, block.next] if falls else list(block.targets)
    return [block.next]


def _rank(blocks: list[Block]) -> None:
    parent = post_dominators([successors(b) for b in blocks])
    children: dict[int, list[int]] = {}
    for block, above in enumerate(parent):
        children.setdefault(above, []).append(block)
    rank, stack = 0, [(-1, False)]
    while stack:
        node, done = stack.pop()
        if not done:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children.get(node, [])))
        elif node >= 0:
            blocks[node].rank = rank
            rank += 1


def post_dominators(edges: list[list[int]]) -> list[int]:
    """The immediate post-dominator of each block; -1 is the exit. Endless loops are given a way out."""
    count = len(edges)
    order = _reverse_order(edges, count)
    for block in range(count):
        if block not in order:
            edges[block] = [*edges[block], -1]
            order = _reverse_order(edges, count)
    parent: dict[int, int] = {-1: -1}
    changed = True
    while changed:
        changed = False
        for block in sorted(order, key=lambda b: -order[b]):
            if block == -1:
                continue
            known = [s for s in edges[block] if s in parent]
            new = known[0]
            for other in known[1:]:
                new = _meet(new, other, parent, order)
            if parent.get(block) != new:
                parent[block], changed = new, True
    return [parent[block] for block in range(count)]


def _meet(a: int, b: int, parent: dict[int, int], order: dict[int, int]) -> int:
    while a != b:
        while order[a] < order[b]:
            a = parent[a]
        while order[b] < order[a]:
            b = parent[b]
    return a


def _reverse_order(edges: list[list[int]], count: int) -> dict[int, int]:
    """Post-order numbers of a walk from the exit against the edges; the exit has the highest."""
    before: dict[int, list[int]] = {}
    for block in range(count):
        for after in edges[block]:
            before.setdefault(after, []).append(block)
    order: dict[int, int] = {}
    seen, stack = {-1}, [(-1, iter(before.get(-1, [])))]
    while stack:
        node, rest = stack[-1]
        for nearby in rest:
            if nearby not in seen:
                seen.add(nearby)
                stack.append((nearby, iter(before.get(nearby, []))))
                break
        else:
            stack.pop()
            order[node] = len(order)
    return order
