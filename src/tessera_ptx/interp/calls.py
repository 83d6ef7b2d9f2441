"""Calls of device functions: frames, arguments by value, results.

A frame belongs to a chain of call sites; lanes that came along the same chain share it, each lane with
its own registers and its own strip of local memory. Recursion makes a new frame at each depth.
"""

import numpy as np

from tessera_ptx.interp.control import Call
from tessera_ptx.interp.memory import FRAMES
from tessera_ptx.interp.state import Active, Code, Frame, Machine
from tessera_ptx.interp.types import U64, Array, narrow

Move = tuple[Frame, int, Array]
MAX_DEPTH = 64


def make_frame(machine: Machine, code: Code, parent: Frame | None, call_block: int) -> Frame:
    """A frame with zeroed registers and room for its variables."""
    regs = [np.zeros(machine.num_lanes, dtype) for dtype in code.dtypes]
    prefix = () if parent is None else (*parent.prefix, parent.code.blocks[call_block].rank)
    frame = Frame(machine, code, regs, parent, call_block, prefix, {})
    for name, (size, align) in code.sizes.items():
        if not (code.is_entry and name in code.params):
            frame.places[name] = machine.reserve(size, max(align, 8))
    return frame


def enter(
    frames: dict[tuple[int, int, str], Frame], caller: Frame, block: int, call: Call, mask: Array
) -> list[Move]:
    """Move lanes into the function they call; KeyError names one that has no body."""
    moves = []
    for name, lanes in _targets(caller, call, mask):
        code = caller.machine.codes.get(name)
        if code is None:
            raise KeyError(f"'{name}', whose body is not in this module")
        if len(caller.prefix) >= MAX_DEPTH:
            raise KeyError(f"'{name}' more than {MAX_DEPTH} calls deep")
        key = id(caller), block, name
        if key not in frames:
            frames[key] = make_frame(caller.machine, code, caller, block)
        _pass_arguments(caller, frames[key], call, lanes)
        moves.append((frames[key], 0, lanes))
    return moves


def _targets(caller: Frame, call: Call, mask: Array) -> list[tuple[str, Array]]:
    if call.address is None:
        return [(call.target, mask)]
    address = np.broadcast_to(call.address(caller), mask.shape)
    found = []
    for value in np.unique(address[mask]):
        name = caller.machine.functions.get(int(value))
        if name is None:
            raise KeyError(f"address {int(value):#x}, where no function is")
        found.append((name, mask & (address == value)))
    return found


def _pass_arguments(caller: Frame, callee: Frame, call: Call, mask: Array) -> None:
    if len(call.arguments) != len(callee.code.params):
        raise KeyError(f"'{callee.code.name}' with {len(call.arguments)} arguments")
    index = np.flatnonzero(mask)
    for given, formal in zip(call.arguments, callee.code.params, strict=True):
        size = callee.code.sizes[formal][0]
        if formal in callee.code.slots and not isinstance(given, str):
            slot, raw = callee.code.slots[formal]
            callee.regs[slot] = np.where(mask, given(caller).astype(raw), callee.regs[slot])
        elif isinstance(given, str):
            _copy(caller, caller.places[given], callee.places[formal], size, index)
        else:
            value = np.broadcast_to(given(caller), mask.shape)[index]
            at = np.full(index.shape, callee.places[formal], np.uint64)
            caller.machine.frames.store(index, at, value.astype(f"u{size}"), size)


def leave(frame: Frame, mask: Array) -> None:
    """Hand the results of a function back to its caller."""
    caller = frame.parent
    assert caller is not None
    call: Call = caller.code.blocks[frame.call_block].info
    index = np.flatnonzero(mask)
    for wanted, formal in zip(call.results, frame.code.returns, strict=False):
        size = frame.code.sizes[formal][0]
        if formal in frame.code.slots and not isinstance(wanted, str):
            wanted(caller, Active(mask), frame.regs[frame.code.slots[formal][0]].astype(np.uint64))
        elif isinstance(wanted, str):
            _copy(caller, frame.places[formal], caller.places[wanted], size, index)
        else:
            at = np.full(index.shape, frame.places[formal], np.uint64)
            value = np.zeros(mask.shape, np.uint64)
            value[index] = frame.machine.frames.load(index, at, size)
            wanted(caller, Active(mask), narrow(value, U64))


def _copy(frame: Frame, source: int, target: int, size: int, index: Array) -> None:
    rows = frame.machine.frames.data.reshape(frame.machine.num_lanes, -1)
    source, target = source - FRAMES, target - FRAMES
    rows[index, target : target + size] = rows[index, source : source + size]
