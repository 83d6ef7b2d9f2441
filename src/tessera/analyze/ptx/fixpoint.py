"""The value analysis of one kernel: a sparse fixpoint over the values that feed addresses.

Nodes are definitions, phis and stores into frames. Only what an address (or a condition on the way to
it) depends on becomes a node. Nodes are evaluated in reverse post-order from a queue; a change wakes the
users. A phi at a loop header that grows by the same amount each time becomes `start + step * counter`;
one that changes otherwise becomes opaque, which keeps its bases. So every node settles after a few visits.

    flow = Flow(module, entry); flow.run(); flow.address(access) -> Value
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import gcd
from typing import Any

from tessera.analyze.ptx.cfg import build_graph
from tessera.analyze.ptx.defs import Definitions
from tessera.analyze.ptx.flatten import flatten
from tessera.analyze.ptx.forms import OpInfo
from tessera.analyze.ptx.frames import Frame, constant_offset
from tessera.analyze.ptx.loads import LoadRules
from tessera.analyze.ptx.scan import Access, scan
from tessera.analyze.ptx.syntax import (
    Function,
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
from tessera.analyze.ptx.transfer import halves, pack
from tessera.analyze.ptx.values import (
    BOTTOM,
    IN_TIME,
    PER_THREAD,
    Atoms,
    Key,
    Poly,
    Value,
    add,
    const,
    constant_of,
    multiply,
    sub,
    wrap,
)

_MAX_VISITS = 12
# How many operands carry the value, where others only steer it.
_SOURCES = {"selp": 2, "slct": 2, "shfl": 1}


class Node:
    """One value to compute: a definition, a phi or a store."""

    __slots__ = ("args", "back", "index", "info", "key", "kind", "old", "part", "pos", "queued", "steps",
                 "users", "value", "visits")  # fmt: skip

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
        self.visits = 0
        self.steps: dict[frozenset[int], Poly] = {}


class Flow:
    """Builds the nodes of a kernel and runs them to a fixpoint."""

    def __init__(self, module: Module, entry: Function) -> None:
        self.module, self.entry = module, entry
        self.flat = flatten(module, entry)
        self.graph = build_graph(self.flat)
        self.scan = scan(self.flat, self.graph)
        self.defs = Definitions(self.graph, self.scan.defs)
        self.stops = self.scan.stops
        self.atoms = Atoms(_limits(entry))
        self.atoms.narrow_params = {i for i, p in enumerate(entry.params) if p.size < 8}
        self.loads = LoadRules(module, entry, self.flat, self.atoms)
        self.nodes: dict[Any, Node] = {}
        self._todo: list[Node] = []
        self._needs_frames = False
        self._has_stores = False
        # Parameters that a `cvta` turns into an address as they stand: certainly pointers.
        self.converted: set[int] = set()

    # Building -----------------------------------------------------------------------------------------

    def want(self, index: int, operand: Operand) -> "Node | Value":
        """The value of an operand as read by instruction `index`; makes the nodes it needs."""
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
        """The value of an address operand without its constant offset."""
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
        """Connects the wanted nodes to what they depend on, until nothing new is wanted."""
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
        if instruction.guard is not None and not isinstance(node.key, str):
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
        if space in ("shared", "local", "") or (space == "param" and self.loads.is_local_param(operand)):
            self._needs_frames = self._needs_frames or self.loads.has_frames or space == "param"

    def _add_stores(self) -> None:
        """Every instruction that may write a frame becomes a node, with its address and values wanted."""
        for access in self.scan.accesses:
            instruction = self.flat.body[access.at]
            if access.effect == "r" or access.space not in ("shared", "local", "param", ""):
                continue
            info = self.scan.infos[access.at]
            assert info is not None
            if info.op.mods[-1:] in (("f32",), ("f16",), ("bf16",)) or info.op.name == "mbarrier":
                continue
            self._add_store(access, instruction, info)
        for index in self.scan.tensors:
            node = self._store_node(index, 0)
            node.info = self.scan.infos[index]
            node.args.append(self.atoms.value(("frame", "shared", "?")))

    def _store_node(self, index: int, operand: int) -> Node:
        rank = self.graph.block_of[index]
        node = Node("store", ("store", index, operand), (rank << 32) + index + 1, index)
        self.nodes[node.key] = node
        return node

    def _add_store(self, access: Access, instruction: Instruction, info: OpInfo) -> None:
        operand = instruction.operands.index(access.operand)
        node = self._store_node(access.at, operand)
        node.info, node.part = info, operand
        self._depend(node, self.want_address(access.at, access.operand))
        if info.op.name == "st" and info.op.mods[:1] != ("bulk",):
            stored = instruction.operands[1] if len(instruction.operands) > 1 else Imm(0)
            for item in stored.items if isinstance(stored, Vec) else (stored,):
                self._depend(node, self.want(access.at, item))
        else:
            # Copies and atomics: what they leave behind is known by where it may come from.
            for source in instruction.operands[operand + 1 :]:
                if isinstance(source, Mem):
                    self._depend(node, self.want_address(access.at, source))
                elif info.op.name in ("atom", "red"):
                    self._depend(node, self.want(access.at, source))

    # Running ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Evaluates to the fixpoint."""
        self.build()
        order = sorted(self.nodes.values(), key=lambda n: n.pos)
        queue = [(node.pos, number) for number, node in enumerate(order)]
        heapify(queue)
        numbers = {id(node): number for number, node in enumerate(order)}
        budget = 60 * len(order) + 20_000
        while queue:
            node = order[heappop(queue)[1]]
            node.queued = False
            budget -= 1
            if budget < 0:
                self.stops.append((self.entry.line, "the analysis did not settle"))
                return
            for woken in self._evaluate(node):
                if not woken.queued:
                    woken.queued = True
                    heappush(queue, (woken.pos, numbers[id(woken)]))

    def _evaluate(self, node: Node) -> "list[Node]":
        node.visits += 1
        if node.kind == "store":
            return self._store(node)
        new = self._phi(node) if node.kind == "phi" else self._definition(node)
        if new == node.value:
            return []
        node.value = new
        return node.users

    def _definition(self, node: Node) -> Value:
        info = node.info
        assert info is not None
        args: list[Value] = [a.value if type(a) is Node else a for a in node.args]  # type: ignore[misc]
        key = node.key
        if info.is_load:
            value = self._load(node, info, args)
        elif not args:
            value = self.atoms.opaque(key)
        elif any(not a for a in args):
            # A source that no value reaches yet, or an undefined register.
            value = BOTTOM if self._awaits(node) else self.atoms.opaque(key, *args)
        elif info.op.name == "mov":
            value = self._move(node, info, args)
        elif info.rule is not None and info.form is not None:
            value = info.rule(self.atoms, info.form, key, args)
            if info.op.name == "cvta":
                self._note_conversion(info, args[0])
        else:
            value = self.atoms.opaque(key, *args)
        if node.old is not None and node.old.value:
            value = self.atoms.join((key, "old"), value + node.old.value)
        return value if node.visits <= _MAX_VISITS else self._late(node, value)

    def _late(self, node: Node, value: Value) -> Value:
        """Ends a cycle that keeps changing: first the offsets are given up, then which base it is."""
        if node.visits <= 3 * _MAX_VISITS:
            return self.atoms.blur(node.key, value + node.value)
        return self.atoms.opaque((node.key, "late"), value, node.value, joined=True)

    def _awaits(self, node: Node) -> bool:
        return any(type(a) is Node and not a.value for a in node.args) and node.visits <= _MAX_VISITS

    def _note_conversion(self, info: OpInfo, value: Value) -> None:
        """Remembers `cvta.to.global` of a parameter as it stands."""
        if "global" in info.op.mods and len(value) == 1 and len(value[0]) == 1:
            mono, coeff = next(iter(value[0].items()))
            if coeff == 1 and len(mono) == 1 and self.atoms.atoms[mono[0]].item[0] == "param":
                self.converted.add(mono[0])

    def _move(self, node: Node, info: OpInfo, args: list[Value]) -> Value:
        """Plain moves, `mov.b64 d, {lo, hi}` and `mov.b64 {lo, hi}, s`."""
        instruction = self.flat.body[node.index]
        target, source = instruction.operands[0], instruction.operands[1]
        if isinstance(source, Vec):
            if len(args) == 2 and info.width == 8:
                return pack(self.atoms, node.key, args[0], args[1])
            return self.atoms.opaque(node.key, *args)
        if isinstance(target, Vec):
            if info.width == 8 and len(target.items) == 2:
                return self.atoms.join(node.key, halves(self.atoms, args[0], node.part == 1))
            return self.atoms.opaque(node.key, *args)
        return args[0]

    def _load(self, node: Node, info: OpInfo, args: list[Value]) -> Value:
        instruction = self.flat.body[node.index]
        width = info.width or 4
        if not args:
            return self.loads.plain(node.key, width, frozenset(), info.signed)
        operand = instruction.operands[1]
        assert isinstance(operand, Mem)
        offset = const(operand.offset + node.part * width)
        address = tuple(add(p, offset) for p in args[0])
        space = info.uses[0][1]
        return self.loads.load(node, space, address, width, info.signed)

    def _store(self, node: Node) -> "list[Node]":
        """Writes the values into the frames the address may point at."""
        info = node.info
        assert info is not None
        operands = self.flat.body[node.index].operands
        args: list[Value] = [a.value if type(a) is Node else a for a in node.args]  # type: ignore[misc]
        operand = operands[node.part]
        place = operand.offset if isinstance(operand, Mem) and info.uses else 0
        space = next((s for u, s in info.uses if u.operand == node.part), "shared")
        if info.op.name != "st":
            return self._fill(node, info, space, args)
        width = info.width or 4
        woken: list[Node] = []
        for part, value in enumerate(args[1:]):
            offset = const(place + part * width)
            address = tuple(add(p, offset) for p in args[0])
            woken += self.loads.store((node.key, part), space, address, width, value)
        return woken

    def _fill(self, node: Node, info: OpInfo, space: str, args: list[Value]) -> "list[Node]":
        """A copy or an atomic leaves something unknown somewhere in the frame."""
        if info.op.name in ("atom", "red"):
            left = self.atoms.opaque(node.key, *args[1:])
        else:
            found = frozenset(n for value in args[1:] for p in value for n in self.atoms.base_of(p))
            table = self.atoms.roots(found)
            left = self.loads.plain(node.key, 8, table or frozenset({-1}), False)
        anywhere = self.atoms.opaque((node.key, "place"))[0]
        address = tuple(add(p, anywhere) for p in args[0])
        return self.loads.store((node.key, 0), space, address, 8, left)

    # Phis ---------------------------------------------------------------------------------------------

    def _phi(self, node: Node) -> Value:
        inputs: list[Value] = [a.value if type(a) is Node else a for a in node.args]  # type: ignore[misc]
        start = self.atoms.join(
            node.key, tuple(p for v, b in zip(inputs, node.back, strict=True) if not b for p in v)
        )
        back = [p for v, b in zip(inputs, node.back, strict=True) if b for p in v]
        if not back:
            return start
        if node.visits > 2 * _MAX_VISITS:
            return self._late(node, start + tuple(back))
        at = self.atoms
        current = {at.base_of(p): at.split(p)[1] for p in start}
        first = dict(current)
        shown = {at.base_of(p): at.split(p)[1] for p in node.value}
        for poly in back:
            base, rest = at.split(poly)
            current[base] = self._turn(node, base, rest, first.get(base), shown.get(base), current.get(base))
        return tuple(at._whole(base, rest) for base, rest in current.items())

    def _turn(
        self,
        node: Node,
        base: frozenset[int],
        rest: Poly,
        first: Poly | None,
        shown: Poly | None,
        now: Poly | None,
    ) -> Poly:
        """The offset of one base after a back edge brought `rest`.

        `first` came from outside the loop, `shown` is what the phi said last, `now` what it says so far.
        """
        at = self.atoms
        if first is None:
            # Only comes around the loop: as an earlier iteration saw it.
            old = at.others(rest, PER_THREAD, node.key)
            return (
                old
                if now is None or now == old
                else at.opaque((node.key, "mix", base), (old, now), joined=True)[0]
            )
        if rest == first and (now is None or now == first):
            return first
        step = self._step(node, base, rest, shown if shown is not None else first)
        if step is None or node.visits > _MAX_VISITS:
            node.steps[base] = {}
            return at.opaque((node.key, "loop", base), (rest, first), joined=True)[0]
        node.steps[base] = step
        moved = multiply(at.poly(("counter", self._counter(node))), step, 64)
        return (
            at.opaque((node.key, "loop", base), (rest, first), joined=True)[0]
            if moved is None
            else add(first, moved)
        )

    def _counter(self, node: Node) -> Key:
        """All variables of a loop with one back edge count the same iterations."""
        return ("loop", node.key[1]) if node.back.count(True) == 1 else node.key

    def _step(self, node: Node, base: frozenset[int], rest: Poly, shown: Poly) -> Poly | None:
        """By how much one turn of the loop moves the offset; None when that is not one amount."""
        known = node.steps.get(base)
        if known is not None and not known:
            return None
        step = wrap(sub(rest, shown), 64)
        if self.atoms.level(step) == IN_TIME or self.atoms.taint(step):
            return None
        if known is None or step == known:
            return step or None if known is None else known
        if not step:
            return known
        one, other = constant_of(step), constant_of(known)
        if one is None or other is None or (one > 0) != (other > 0):
            return None
        return const(gcd(one, other) if one > 0 else -gcd(one, other))

    def want_calls(self) -> None:
        """Asks for what is handed to functions that cannot be followed."""
        self._needs_frames = self._needs_frames or any(i.op.name == "call" for i in self.flat.body)

    def call_arguments(self) -> Iterator[tuple[int, Value]]:
        """(line, value) of everything handed to a function that is not followed, after the run."""
        for instruction in self.flat.body:
            if instruction.op.name == "call":
                for operand in instruction.operands[0].items if instruction.operands else ():  # type: ignore[union-attr]
                    if isinstance(operand, Sym):
                        for value in self.loads.contents(operand.name):
                            yield instruction.line, value

    # Answers ------------------------------------------------------------------------------------------

    def address(self, access: Access, base: "Node | Value") -> Value:
        """The address of an access after the run."""
        value: Value = base.value if isinstance(base, Node) else base
        offset = const(access.operand.offset)
        return tuple(add(p, offset) for p in value)


def _part(target: Operand, name: str) -> int:
    """Which element of a destination vector a register is."""
    if isinstance(target, Vec):
        for number, item in enumerate(target.items):
            if isinstance(item, Reg) and item.name == name:
                return number
    if isinstance(target, Pair) and isinstance(target.second, Reg) and target.second.name == name:
        return 1
    return 0


def _limits(entry: Function) -> dict[str, int]:
    """Bounds of thread indices from the kernel's directives."""
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


__all__ = ["Flow", "Frame", "Node", "constant_offset"]
