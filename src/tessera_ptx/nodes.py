"""Graph of values that addresses depend on.

A node is a definition, a phi or a store into a frame. Registers with several definitions get SSA versions on
demand: `Definitions.reaching` finds the last definition in the block or walks up to a join, which becomes a
phi.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from tessera_ptx.cfg import FlowGraph, build_graph
from tessera_ptx.exchange import Exchanges
from tessera_ptx.flatten import flatten
from tessera_ptx.loads import LoadRules
from tessera_ptx.poly import BOTTOM, Poly, Value, const
from tessera_ptx.scan import MemoryAccess, scan
from tessera_ptx.syntax import (
    Function,
    Guard,
    Imm,
    Instruction,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Special,
    Sym,
    Vec,
)
from tessera_ptx.transfer import OpInfo
from tessera_ptx.values import Atoms, Key


@dataclass(frozen=True, slots=True)
class ParamHints:
    pointers: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()


class Definitions:
    """Keys: the register's name (one definition), ("def", name, index) or ("phi", block, name); None if
    undefined.
    """

    def __init__(self, graph: FlowGraph, defs: dict[str, list[int]]) -> None:
        self.graph, self.defs = graph, defs
        self._at_entry: dict[tuple[int, str], Key] = {}
        self._trivial: dict[Key, Key] = {}

    def reaching(self, index: int, name: str) -> Key:
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
            # A loop header at the entry has an outside predecessor too.
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
        """(key, is back edge)"""
        preds = self.graph.blocks[block].preds
        return [(self.at_end(p, name), p >= block) for p in preds]


# The other operands only select.
_SOURCES = {"selp": 2, "slct": 2, "shfl": 1}

_FLOATS = (("f32",), ("f16",), ("bf16",))


class Node:
    __slots__ = (
        "args", "back", "exchange", "forced", "index", "info", "key", "kind", "old", "part", "pos", "queued",
        "steps", "users", "value", "visits",
    )  # fmt: skip

    def __init__(self, kind: str, key: Key, pos: int, index: int) -> None:
        self.kind, self.key, self.pos, self.index = kind, key, pos, index
        self.info: OpInfo | None = None
        self.args: list[Node | Value] = []
        self.old: Node | None = None
        self.part = 0
        self.back: list[bool] = []
        self.value: Value = BOTTOM
        self.users: list[Node] = []
        self.queued = True
        # No value arrived: treated as anything.
        self.forced = False
        self.visits = 0
        self.steps: dict[frozenset[int], Poly] = {}
        # (address, constant part, width, values) of stores.
        self.exchange: list[tuple[Node | Value, int, int, list[Node | Value]]] = []


class Nodes:
    def __init__(self, module: Module, entry: Function, given: ParamHints) -> None:
        self.module, self.entry, self.given = module, entry, given
        self.flat = flatten(module, entry)
        self.graph = build_graph(self.flat)
        self.scan = scan(self.flat, self.graph)
        self.defs = Definitions(self.graph, self.scan.defs)
        self.stops = self.scan.stops
        self.exchanges = Exchanges(self.flat, self.graph, self.scan, entry.attributes.get("reqntid") or ())
        self.atoms = Atoms(_limits(entry), given.numbers)
        self.atoms.narrow_params = {i for i, p in enumerate(entry.params) if p.size < 8}
        self.loads = LoadRules(module, entry, self.flat, self.atoms)
        self.nodes: dict[Any, Node] = {}
        self._todo: list[Node] = []
        self._needs_frames = False
        self._has_stores = False
        # Converted by `cvta` unmodified: certainly pointers.
        self.converted: set[int] = set()

    def want(self, index: int, operand: Operand) -> "Node | Value":
        kind = type(operand)
        if kind is Reg:
            key = self.defs.reaching(index, operand.name)  # type: ignore[union-attr]
            return BOTTOM if key is None else self._node(key)
        if isinstance(operand, Imm):
            return (const(operand.value if operand.value < 1 << 63 else operand.value - (1 << 64)),)
        if isinstance(operand, Special):
            return self.loads.special(operand.name)
        if isinstance(operand, Sym):
            return self.loads.symbol(operand)
        if isinstance(operand, Not) and operand.sign == "-":
            return self.atoms.opaque(("neg", index))
        return self.atoms.opaque(("operand", index))

    def want_address(self, index: int, operand: Mem) -> "Node | Value":
        return self.want(index, operand.base)

    def _node(self, key: Key) -> Node:
        node = self.nodes.get(key)
        if node is None:
            node = self._make(key)
            self.nodes[key] = node
            self._todo.append(node)
        return node

    def _make(self, key: Key) -> Node:
        rank = self.graph.block_of
        if isinstance(key, str):
            index = self.scan.defs[key][0]
            return Node("def", key, (rank[index] << 32) + index + 1, index)
        if key[0] == "def":
            index = key[2]
            return Node("def", key, (rank[index] << 32) + index + 1, index)
        return Node("phi", key, key[1] << 32, -1)

    def build(self) -> None:
        while True:
            while self._todo:
                node = self._todo.pop()
                if node.kind == "phi":
                    self._connect_phi(node)
                elif node.kind == "def":
                    self._connect_def(node)
            if not self._needs_frames or self._has_stores:
                return
            self._has_stores = True
            self._add_stores()

    def _depend(self, node: Node, arg: "Node | Value") -> None:
        node.args.append(arg)
        if type(arg) is Node:
            arg.users.append(node)

    def _connect_phi(self, node: Node) -> None:
        _, block, name = node.key
        for key, back in self.defs.phi_inputs(block, name):
            if key is not None:
                self._depend(node, self._node(key))
                node.back.append(back)

    def _connect_def(self, node: Node) -> None:
        index = node.index
        instruction = self.flat.body[index]
        info = node.info = self.scan.infos[index]
        assert info is not None
        name = node.key if isinstance(node.key, str) else node.key[1]
        if not isinstance(node.key, str) and not self._is_certain(index, instruction.guard):
            old = self.defs.reaching(index, name)
            if old is not None:
                node.old = self._node(old)
                node.old.users.append(node)
        target = instruction.operands[info.writes[0]]
        node.part = _part(target, name)
        if info.is_load:
            self._connect_load(node, instruction, info)
        elif not info.scalar and (info.rule is not None or info.form is not None):
            self._connect_sources(node, instruction)

    def _is_certain(self, index: int, guard: Guard | None) -> bool:
        """No guard, or one that was set to true."""
        key = None if guard is None or guard.negated else self.defs.reaching(index, guard.reg.name)
        if key is None or (isinstance(key, tuple) and key[0] != "def"):
            return guard is None
        setting = self.flat.body[key[2] if isinstance(key, tuple) else self.scan.defs[key][0]]
        return setting.guard is None and setting.op.name == "mov" and setting.operands[1] == Imm(-1)

    def _connect_sources(self, node: Node, instruction: Instruction) -> None:
        for operand in instruction.operands[1 : 1 + _SOURCES.get(instruction.op.name, 8)]:
            if isinstance(operand, Vec):
                for item in operand.items:
                    self._depend(node, self.want(node.index, item))
            elif not (isinstance(operand, Reg) and operand.name == "_"):
                self._depend(node, self.want(node.index, operand))

    def _connect_load(self, node: Node, instruction: Instruction, info: OpInfo) -> None:
        operand = instruction.operands[1] if len(instruction.operands) > 1 else None
        if not isinstance(operand, Mem):
            return
        space = info.uses[0][1]
        if space == "shared" and info.width < 8:
            return
        self._depend(node, self.want_address(node.index, operand))
        if space == "shared":
            self._connect_exchange(node)
        if space in ("shared", "local", "") or (space == "param" and self.loads.is_local_param(operand)):
            self._needs_frames = self._needs_frames or self.loads.has_frames or space == "param"

    def _connect_exchange(self, node: Node) -> None:
        for index in self.exchanges.stores_before(node.index):
            target, stored = self.flat.body[index].operands[:2]
            assert isinstance(target, Mem)
            address = self.want_address(index, target)
            items = stored.items if isinstance(stored, Vec) else (stored,)
            values = [self.want(index, item) for item in items]
            node.exchange.append((address, target.offset, 8, values))
            for read in (address, *values):
                if type(read) is Node:
                    read.users.append(node)

    def _add_stores(self) -> None:
        for access in self.scan.accesses:
            instruction = self.flat.body[access.at]
            if access.effect == "r" or access.space not in ("shared", "local", "param", ""):
                continue
            info = self.scan.infos[access.at]
            assert info is not None
            if info.op.name == "mbarrier" or (info.op.mods[-1:] in _FLOATS and not self._moved(instruction)):
                continue
            self._add_store(access, instruction, info)
        for index in self.scan.tensors:
            node = self._store_node(index, 0)
            node.info = self.scan.infos[index]
            node.args.append(self.atoms.value(("frame", "shared", "?")))

    def _moved(self, instruction: Instruction) -> bool:
        """A moved float may be half of a pointer."""
        for operand in instruction.operands[1:2]:
            for item in operand.items if isinstance(operand, Vec) else (operand,):
                for index in self.scan.defs.get(item.name, ()) if isinstance(item, Reg) else ():
                    made = self.flat.body[index]
                    if made.op.name == "mov" and not isinstance(made.operands[-1], Imm):
                        return True
        return False

    def _store_node(self, index: int, operand: int) -> Node:
        rank = self.graph.block_of[index]
        node = Node("store", ("store", index, operand), (rank << 32) + index + 1, index)
        self.nodes[node.key] = node
        return node

    def _add_store(self, access: MemoryAccess, instruction: Instruction, info: OpInfo) -> None:
        operand = instruction.operands.index(access.operand)
        node = self._store_node(access.at, operand)
        node.info, node.part = info, operand
        self._depend(node, self.want_address(access.at, access.operand))
        if info.op.name == "st" and info.op.mods[:1] != ("bulk",):
            stored = instruction.operands[1] if len(instruction.operands) > 1 else Imm(0)
            for item in stored.items if isinstance(stored, Vec) else (stored,):
                self._depend(node, self.want(access.at, item))
        else:
            # Contents of copies and atomics are known by origin.
            for source in instruction.operands[operand + 1 :]:
                if isinstance(source, Mem):
                    self._depend(node, self.want_address(access.at, source))
                elif info.op.name in ("atom", "red"):
                    self._depend(node, self.want(access.at, source))


def _part(target: Operand, name: str) -> int:
    if isinstance(target, Vec):
        for number, item in enumerate(target.items):
            if isinstance(item, Reg) and item.name == name:
                return number
    if isinstance(target, Pair) and isinstance(target.second, Reg) and target.second.name == name:
        return 1
    return 0


def _limits(entry: Function) -> dict[str, int]:
    limits: dict[str, int] = {}
    for directive in ("maxntid", "reqntid"):
        sizes = entry.attributes.get(directive)
        if sizes:
            padded = (*sizes, 1, 1)[:3]
            total = padded[0] * padded[1] * padded[2]
            for axis, size in zip("xyz", padded, strict=True):
                # .maxntid bounds the product of the three, not each.
                limits[f"%tid.{axis}"] = min(size if directive == "reqntid" else total, 1024) or 1
                limits[f"%ntid.{axis}"] = limits[f"%tid.{axis}"]
    return limits
