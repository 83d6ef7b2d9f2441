"""Value analysis of one kernel: a sparse fixpoint over values that feed addresses.

Nodes (definitions, phis, stores into frames) that an address or its conditions depend on are evaluated from a
queue in reverse post-order. A loop phi with a constant increment becomes `start + step * counter`; other
changing phis become opaque and keep their bases. A kernel beyond its work limit restarts with `coarse`, which
keeps bases without offsets; if that fails too, it is immovable.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import gcd

from tessera_ptx.bits import halves, pack
from tessera_ptx.nodes import Node, Nodes, ParamHints
from tessera_ptx.poly import BOTTOM, Poly, Value, add, const, constant_of, multiply, sub, wrap
from tessera_ptx.scan import MemoryAccess
from tessera_ptx.syntax import Function, Mem, Module, Sym, Vec
from tessera_ptx.transfer import OpInfo
from tessera_ptx.values import IN_TIME, MAX_POLY, PER_THREAD, UNIFORM, Key, by_base

_MAX_VISITS = 8
# Alternatives examined. Compiled kernels stay below half, except debug builds of block-wide collectives.
_WORK_PER_NODE = 20
_WORK = 30_000
# Addends in a coarse run.
_MAX_COARSE = 8


class Flow(Nodes):
    def __init__(
        self, module: Module, entry: Function, given: ParamHints | None = None, coarse: bool = False
    ) -> None:
        super().__init__(module, entry, given or ParamHints())
        self.coarse, self.settled = coarse, True

    def run(self) -> None:
        self.build()
        self._order = sorted(self.nodes.values(), key=lambda n: n.pos)
        self._budget = _WORK_PER_NODE * len(self._order) + _WORK
        self._settle(self._order)
        # Values still missing depend on uninitialized memory or on themselves.
        for kind in ("def", "phi"):
            stuck = [n for n in self._order if n.kind == kind and not n.value and self._can_force(n)]
            for node in stuck:
                node.forced = True
            self._settle(stuck)

    def _can_force(self, node: Node) -> bool:
        """Loads with a known address, and nodes that wait only for themselves."""
        if node.kind == "phi":
            return True
        assert node.info is not None
        return node.info.is_load and all(a.value if type(a) is Node else a for a in node.args)

    def _settle(self, nodes: "list[Node]") -> None:
        numbers = {id(node): number for number, node in enumerate(self._order)}
        queue = [(node.pos, numbers[id(node)]) for node in nodes]
        heapify(queue)
        for node in nodes:
            node.queued = True
        while queue:
            node = self._order[heappop(queue)[1]]
            node.queued = False
            if self.atoms.work > self._budget:
                if self.settled:
                    self.stops.append((self.entry.line, "too complex to follow: its values do not settle"))
                self.settled = False
                return
            self.atoms.work += 1
            for woken in self._evaluate(node):
                if not woken.queued:
                    woken.queued = True
                    heappush(queue, (woken.pos, numbers[id(woken)]))

    def _evaluate(self, node: Node) -> "list[Node]":
        node.visits += 1
        if node.kind == "store":
            return self._store(node)
        new = self._phi(node) if node.kind == "phi" else self._definition(node)
        if node.forced and not new:
            new = self.loads.plain((node.key, "unset"), 8, frozenset({-1}), False)
        if self.coarse and any(map(self._is_too_fine, new)):
            new = self.atoms.blur((node.key, "coarse"), new)
        if new == node.value:
            return []
        node.value = new
        return node.users

    def _is_too_fine(self, poly: Poly) -> bool:
        """Offsets of pointers that leave the block, and long sums."""
        at = self.atoms
        return len(poly) > _MAX_COARSE or (
            len(poly) > 1 and any(at.kind(n) != "frame" for n in at.taint(poly))
        )

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
            # A source without a value yet, or an undefined register.
            value = BOTTOM if self._awaits(node) else self.atoms.opaque(key, *args)
        elif info.op.name == "mov":
            value = self._move(node, info, args)
        elif info.rule is not None and info.form is not None:
            value = info.rule(self.atoms, info.form, key, args)
            if info.op.name == "cvta":
                self._note_conversion(info, args[0])
        else:
            value = self.atoms.opaque(key, *args)
        if any(len(p) > MAX_POLY for p in value):
            value = self.atoms.opaque((key, "long"), value)
        if node.old is not None and node.old.value:
            value = self.atoms.join((key, "old"), value + node.old.value)
        return value if node.visits <= _MAX_VISITS else self._late(node, value)

    def _late(self, node: Node, value: Value) -> Value:
        """Ends a changing cycle: drops offsets first, then the choice of base."""
        if node.visits <= 3 * _MAX_VISITS:
            return self.atoms.blur(node.key, value + node.value)
        return self.atoms.opaque((node.key, "late"), value, node.value, joined=True)

    def _awaits(self, node: Node) -> bool:
        return any(type(a) is Node and not a.value for a in node.args) and node.visits <= _MAX_VISITS

    def _note_conversion(self, info: OpInfo, value: Value) -> None:
        if "global" in info.op.mods and len(value) == 1 and len(value[0]) == 1:
            mono, coeff = next(iter(value[0].items()))
            if coeff == 1 and len(mono) == 1 and self.atoms.atoms[mono[0]].item[0] == "param":
                self.converted.add(mono[0])

    def _move(self, node: Node, info: OpInfo, args: list[Value]) -> Value:
        """Also `mov.b64 d, {lo, hi}` and `mov.b64 {lo, hi}, s`."""
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
        exchanged = self._exchanged(node, address, width) if node.exchange else None
        return self.loads.load(node, space, address, width, info.signed) if exchanged is None else exchanged

    def _exchanged(self, node: Node, address: Value, width: int) -> Value | None:
        """None if the load may see other values."""
        places = self.exchanges.offsets(self.atoms, address[0]) if len(address) == 1 and width == 8 else None
        if places is None:
            return None
        self.atoms.work += len(node.exchange) * self.exchanges.threads // 256
        covered: set[int] = set()
        seen: list[Poly] = []
        for to, offset, size, values in node.exchange:
            target = to.value if isinstance(to, Node) else to
            stored = self.exchanges.offsets(self.atoms, target[0]) if len(target) == 1 else None
            if stored is None or stored[0] != places[0]:
                return None
            for part, item in enumerate(values):
                value: Value = item.value if isinstance(item, Node) else item
                if not value:
                    return BOTTOM
                covered |= {o + offset + part * size for o in stored[1]}
                seen += [self.atoms.others(p, UNIFORM, (node.key, "seen")) for p in value]
        if not covered.issuperset(places[1]):
            return None
        return self.atoms.join((node.key, "exchanged"), tuple(seen))

    def _store(self, node: Node) -> "list[Node]":
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
        """Copies and atomics leave unknown values in the frame."""
        if info.op.name in ("atom", "red"):
            left = self.atoms.opaque(node.key, *args[1:])
        else:
            found = frozenset(n for value in args[1:] for p in value for n in self.atoms.base_of(p))
            table = self.atoms.roots(found)
            left = self.loads.plain(node.key, 8, table or frozenset({-1}), False)
        anywhere = self.atoms.opaque((node.key, "place"))[0]
        address = tuple(add(p, anywhere) for p in args[0])
        return self.loads.store((node.key, 0), space, address, 8, left)

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
        return at.limited(node.key, tuple(at.whole(base, rest) for base, rest in by_base(current)))

    def _turn(
        self,
        node: Node,
        base: frozenset[int],
        rest: Poly,
        first: Poly | None,
        shown: Poly | None,
        now: Poly | None,
    ) -> Poly:
        """`first` is from outside the loop, `shown` the phi's last value, `now` its value so far."""
        at = self.atoms
        if first is None:
            # Value of an earlier iteration.
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
        """Variables of a loop with one back edge share a counter."""
        return ("loop", node.key[1]) if node.back.count(True) == 1 else node.key

    def _step(self, node: Node, base: frozenset[int], rest: Poly, shown: Poly) -> Poly | None:
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
        self._needs_frames = self._needs_frames or any(i.op.name == "call" for i in self.flat.body)

    def call_arguments(self) -> Iterator[tuple[int, Value]]:
        for instruction in self.flat.body:
            if instruction.op.name == "call":
                for operand in instruction.operands[0].items if instruction.operands else ():  # type: ignore[union-attr]
                    if isinstance(operand, Sym):
                        for value in self.loads.contents(operand.name):
                            yield instruction.line, value

    def address(self, access: MemoryAccess, base: "Node | Value") -> Value:
        value: Value = base.value if isinstance(base, Node) else base
        offset = const(access.operand.offset)
        return tuple(add(p, offset) for p in value)


__all__ = ["Flow", "Node"]
