"""Inlines device functions into one flat instruction list.

Each call is replaced by the body with names suffixed `@n`, so calls are analyzed separately; its parameters
are the caller's variables, without copies. Stops, with name and line: recursion, external targets, calls
through registers, call trees above `MAX_INSTRUCTIONS` or `MAX_COPIES`. `__assertfail` is dropped: it only
ends the program.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tessera_ptx.syntax import (
    Args,
    Function,
    Guard,
    Instruction,
    Mem,
    Module,
    Not,
    Op,
    Operand,
    Pair,
    Reg,
    Sym,
    Variable,
    Vec,
)

MAX_INSTRUCTIONS = 400_000
MAX_COPIES = 20_000
_MAX_DEPTH = 60
_BRA = Op("bra", "bra", ())
_MOVE = Op("mov.b64", "mov", ("b64",))
_HARMLESS = frozenset({"__assertfail", "__assert_fail", "abort"})


@dataclass(slots=True)
class Flat:
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    stops: list[tuple[int, str]] = field(default_factory=list)
    num_copies: int = 0


def flatten(module: Module, entry: Function) -> Flat:
    flat = Flat()
    flat.variables.update({v.name: v for v in entry.variables})
    if not any(i.op.name == "call" for i in entry.body):
        flat.body = list(entry.body)
        flat.labels.update(entry.labels)
        flat.tables.update(entry.tables)
        return flat
    functions = {f.name: f for f in module.functions}
    for alias, target in module.aliases.items():
        if target in functions:
            functions.setdefault(alias, functions[target])
            if not functions[alias].defined:
                functions[alias] = functions[target]
    _Inliner(functions, flat).body(entry, "", {}, (entry.name,), "")
    return flat


class _Inliner:
    def __init__(self, functions: dict[str, Function], flat: Flat) -> None:
        self.functions, self.flat = functions, flat

    def body(
        self, function: Function, suffix: str, bound: dict[str, str], path: tuple[str, ...], end: str
    ) -> None:
        """`bound` maps parameters to the caller's variables; ret jumps to `end`."""
        flat = self.flat
        rename = _renamer(function, suffix, bound)
        by_index: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            by_index.setdefault(index, []).append(label + suffix)
        for label, targets in function.tables.items():
            flat.tables[label + suffix] = tuple(t + suffix for t in targets)
        for index, instruction in enumerate(function.body):
            for label in by_index.get(index, ()):
                flat.labels[label] = len(flat.body)
            self._one(function, instruction, rename, path, end)
        for label in by_index.get(len(function.body), ()):
            flat.labels[label] = len(flat.body)

    def _one(
        self,
        function: Function,
        instruction: Instruction,
        rename: Callable[[Operand], Operand],
        path: tuple[str, ...],
        end: str,
    ) -> None:
        op, guard, operands, line, column = instruction
        if guard is not None:
            renamed = rename(guard.reg)
            guard = Guard(renamed, guard.negated) if isinstance(renamed, Reg) else guard
        if op.name == "call":
            self._call(function, instruction, guard, rename, path)
        elif op.name == "ret" and end:
            self.flat.body.append(Instruction(_BRA, guard, (Sym(end),), line, column))
        else:
            operands = tuple(rename(o) for o in operands)
            self.flat.body.append(Instruction(op, guard, operands, line, column))

    def _call(
        self,
        function: Function,
        instruction: Instruction,
        guard: Guard | None,
        rename: Callable[[Operand], Operand],
        path: tuple[str, ...],
    ) -> None:
        target = _call_parts(instruction)[1]
        last = instruction.operands[-1] if instruction.operands else target
        listed = function.tables.get(last.name) if isinstance(last, Sym) else None
        if not isinstance(target, Sym) and listed:
            self._listed(listed, instruction, rename, path)
        else:
            name = target.name if isinstance(target, Sym) else ""
            self._direct(name, instruction, guard, rename, path)

    def _listed(
        self,
        names: tuple[str, ...],
        instruction: Instruction,
        rename: Callable[[Operand], Operand],
        path: tuple[str, ...],
    ) -> None:
        """A register call with `.calltargets`: any of them."""
        flat, line, column = self.flat, instruction.line, instruction.column
        flat.num_copies += 1
        mark = f"$choice@{flat.num_copies}"
        for number, name in enumerate(names):
            flat.labels[f"{mark}.{number}"] = len(flat.body)
            if number + 1 < len(names):
                unknown = Guard(Reg(mark), False)
                flat.body.append(Instruction(_BRA, unknown, (Sym(f"{mark}.{number + 1}"),), line, column))
            self._direct(name, instruction, None, rename, path)
            flat.body.append(Instruction(_BRA, None, (Sym(mark),), line, column))
        flat.labels[mark] = len(flat.body)

    def _direct(
        self,
        name: str,
        instruction: Instruction,
        guard: Guard | None,
        rename: Callable[[Operand], Operand],
        path: tuple[str, ...],
    ) -> None:
        flat, line = self.flat, instruction.line
        results, _, args = _call_parts(instruction)
        if name in _HARMLESS:
            return
        callee = self.functions.get(name)
        if reason := self._refusal(name, callee, path):
            flat.stops.append((line, reason))
            operands = tuple(rename(o) for o in (*results, *args))
            flat.body.append(Instruction(instruction.op, guard, (Args(operands),), line, instruction.column))
            return
        assert callee is not None
        flat.num_copies += 1
        suffix = f"@{flat.num_copies}"
        end = f"$end{suffix}"
        if guard is not None:
            skip = Guard(guard.reg, not guard.negated)
            flat.body.append(Instruction(_BRA, skip, (Sym(end),), line, instruction.column))
        bound: dict[str, str] = {}
        for params, passed in ((callee.params, args), (callee.returns, results)):
            if len(params) != len(passed):
                flat.stops.append((line, f"call of '{name}' with {len(passed)} arguments for {len(params)}"))
            for param, operand in zip(params, passed, strict=False):
                self._bind(param.name, rename(operand), suffix, instruction, bound)
        flat.variables.update({v.name + suffix: v for v in callee.variables})
        self.body(callee, suffix, bound, (*path, callee.name), end)
        flat.labels[end] = len(flat.body)
        self._unbind(callee, results, rename, suffix, instruction)

    def _refusal(self, name: str, callee: Function | None, path: tuple[str, ...]) -> str:
        if not name:
            return "calls through a register"
        if callee is None or not callee.defined:
            return f"calls '{name}', which is not in this module"
        if name in path or callee.name in path:
            return f"calls '{name}' recursively"
        size = len(self.flat.body) + len(callee.body)
        if size > MAX_INSTRUCTIONS or self.flat.num_copies >= MAX_COPIES or len(path) > _MAX_DEPTH:
            return f"calls '{name}': the call tree is too large"
        return ""

    def _bind(
        self, name: str, passed: Operand, suffix: str, call: Instruction, bound: dict[str, str]
    ) -> None:
        if isinstance(passed, Sym) and not passed.offset:
            bound[name] = passed.name
        else:
            # Register and constant arguments of the old calling convention.
            move = Instruction(_MOVE, None, (Reg(name + suffix), passed), call.line, call.column)
            self.flat.body.append(move)

    def _unbind(
        self,
        callee: Function,
        results: tuple[Operand, ...],
        rename: Callable[[Operand], Operand],
        suffix: str,
        call: Instruction,
    ) -> None:
        for param, operand in zip(callee.returns, results, strict=False):
            target = rename(operand)
            if isinstance(target, Reg):
                source = Reg(param.name + suffix)
                self.flat.body.append(Instruction(_MOVE, None, (target, source), call.line, call.column))


def _call_parts(call: Instruction) -> tuple[tuple[Operand, ...], Operand, tuple[Operand, ...]]:
    """`call (r), f, (a, b), prototype` -> r, f, (a, b)."""
    operands = list(call.operands)
    results: tuple[Operand, ...] = ()
    if operands and isinstance(operands[0], Args) and len(operands) > 1:
        results = operands.pop(0).items  # type: ignore[union-attr]
    target: Operand = operands[0] if operands else Sym("")
    args = operands[1].items if len(operands) > 1 and isinstance(operands[1], Args) else ()
    return results, target, args


def _renamer(function: Function, suffix: str, bound: dict[str, str]) -> Callable[[Operand], Operand]:
    local = {v.name for v in function.variables} | {p.name for p in (*function.params, *function.returns)}
    local |= set(function.labels) | set(function.tables)
    cache: dict[Operand, Operand] = {}

    def rename(operand: Operand) -> Operand:
        known = cache.get(operand)
        if known is None:
            known = cache[operand] = fresh(operand)
        return known

    def fresh(operand: Operand) -> Operand:
        if isinstance(operand, Reg):
            return Reg(operand.name + suffix)
        if isinstance(operand, Sym):
            name = bound.get(operand.name)
            if name is not None:
                return Sym(name, operand.offset)
            if not function.is_entry and operand.name in registers:
                return Reg(operand.name + suffix)
            return Sym(operand.name + suffix, operand.offset) if operand.name in local else operand
        if isinstance(operand, Mem):
            base = rename(operand.base)
            offset = operand.offset
            if isinstance(base, Sym):
                base, offset = Sym(base.name), offset + base.offset
            coords = tuple(rename(c) for c in operand.coords)
            return Mem(base, offset, coords) if isinstance(base, Reg | Sym) else operand
        if isinstance(operand, Vec):
            return Vec(tuple(rename(i) for i in operand.items))
        if isinstance(operand, Args):
            return Args(tuple(rename(i) for i in operand.items))
        if isinstance(operand, Pair):
            return Pair(rename(operand.first), rename(operand.second))
        return Not(rename(operand.item), operand.sign) if isinstance(operand, Not) else operand

    registers = {p.name for p in (*function.params, *function.returns)} - set(bound)
    if not suffix:
        return lambda operand: operand
    return rename
