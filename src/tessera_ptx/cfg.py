"""Control-flow graph of a flat kernel.

Blocks are in reverse post-order, without unreachable ones. Guarded branches, returns and exits also fall
through; `brx.idx` goes to every label of its list. Branches to unknown labels are stops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera_ptx.flatten import Flat
from tessera_ptx.syntax import Instruction, Sym

_ENDS = frozenset({"ret", "exit", "trap"})


@dataclass(slots=True)
class BasicBlock:
    """Instructions [start, stop); neighbours index `FlowGraph.blocks`."""

    start: int
    stop: int
    succs: tuple[int, ...]
    preds: tuple[int, ...] = ()


@dataclass(slots=True)
class FlowGraph:
    blocks: list[BasicBlock]
    # -1 if unreachable.
    block_of: list[int]
    stops: list[tuple[int, str]]


def targets_of(instruction: Instruction, flat: Flat) -> list[int] | None:
    names: list[str] = []
    if instruction.op.name == "bra":
        if instruction.operands and isinstance(instruction.operands[0], Sym):
            names = [instruction.operands[0].name]
    elif len(instruction.operands) > 1 and isinstance(instruction.operands[1], Sym):
        names = list(flat.tables.get(instruction.operands[1].name, ()))
    found = [flat.labels[n] for n in names if n in flat.labels]
    return found if found and len(found) == len(names) else None


def build_graph(flat: Flat) -> FlowGraph:
    body, size = flat.body, len(flat.body)
    stops: list[tuple[int, str]] = []
    leaders = {0, *(i for i in flat.labels.values() if i < size)}
    jumps: dict[int, list[int]] = {}
    for index, instruction in enumerate(body):
        name = instruction.op.name
        if name in ("bra", "brx"):
            targets = targets_of(instruction, flat)
            if targets is None:
                stops.append((instruction.line, "branches to an unknown target"))
                targets = sorted(flat.labels.values())
            jumps[index] = targets
            leaders.add(index + 1)
        elif name in _ENDS:
            jumps[index] = []
            leaders.add(index + 1)
    starts = sorted(i for i in leaders if i < size)
    return _order(starts, size, body, jumps, stops)


def _order(
    starts: list[int],
    size: int,
    body: list[Instruction],
    jumps: dict[int, list[int]],
    stops: list[tuple[int, str]],
) -> FlowGraph:
    number = {start: n for n, start in enumerate(starts)}
    ends = [*starts[1:], size]
    succs: list[list[int]] = []
    for end in ends:
        last = end - 1
        out = [number[t] for t in jumps.get(last, ()) if t in number]
        falls = last not in jumps or body[last].guard is not None
        if falls and end in number:
            out.append(number[end])
        succs.append(list(dict.fromkeys(out)))
    order = reverse_postorder(dict(enumerate(succs)), 0) if starts else []
    rank = {old: new for new, old in enumerate(order)}
    preds: list[list[int]] = [[] for _ in order]
    block_of = [-1] * size
    blocks = []
    for new, old in enumerate(order):
        for succ in succs[old]:
            preds[rank[succ]].append(new)
        block_of[starts[old] : ends[old]] = [new] * (ends[old] - starts[old])
        blocks.append(BasicBlock(starts[old], ends[old], tuple(rank[s] for s in succs[old])))
    for block, before in zip(blocks, preds, strict=True):
        block.preds = tuple(before)
    return FlowGraph(blocks, block_of, stops)


def reverse_postorder(succs: Mapping[int, Sequence[int]], root: int) -> list[int]:
    seen = {root}
    order: list[int] = []
    stack: list[tuple[int, int]] = [(root, 0)]
    while stack:
        node, at = stack.pop()
        if at < len(succs[node]):
            stack.append((node, at + 1))
            succ = succs[node][at]
            if succ not in seen:
                seen.add(succ)
                stack.append((succ, 0))
        else:
            order.append(node)
    order.reverse()
    return order


def dominators(preds: list[tuple[int, ...]]) -> list[int]:
    """Immediate ones of blocks in reverse post-order (Cooper, Harvey and Kennedy)."""
    idoms = [-1] * len(preds)
    if preds:
        idoms[0] = 0
    changed = True
    while changed:
        changed = False
        for block in range(1, len(preds)):
            new = -1
            for pred in preds[block]:
                if idoms[pred] >= 0:
                    new = pred if new < 0 else _meet(idoms, new, pred)
            if idoms[block] != new:
                idoms[block], changed = new, True
    return idoms


def _meet(idoms: list[int], a: int, b: int) -> int:
    while a != b:
        while a > b:
            a = idoms[a]
        while b > a:
            b = idoms[b]
    return a
