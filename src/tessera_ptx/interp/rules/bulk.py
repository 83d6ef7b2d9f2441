"""Bulk and tensor copies, mbarriers, and shared memory of a cluster.

Copies complete when issued and count their bytes at the barrier. An mbarrier is one 64-bit word in shared
memory; PTX leaves the layout open, here:

    bit 0 phase | 20 bits arrivals expected per phase | 20 bits arrivals pending | 22 bits bytes pending

Pending bytes are biased by 2**21: a copy may arrive before it is expected. A tensor map is opaque in PTX;
here its 128 bytes are

    0 address | 8 five sizes | 32 four strides in bytes | 64 five box sizes | 84 five element strides
    104 rank - 1 | 108 element type | 112 interleave | 116 swizzle | 120 fill mode

Sizes start with the innermost dimension. Elements outside the tensor read as zeros and are not written.
Swizzles exchange 16-byte pieces within 128-byte rows; tiles are aligned to 1,024 bytes. Not handled:
interleaved layouts, element strides other than 1, im2col, non-zero fills.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera_ptx.interp.decode import Decoder, Get, Unknown, only, rule
from tessera_ptx.interp.memory import SHARED, BadAccess
from tessera_ptx.interp.rules.arith import lift
from tessera_ptx.interp.rules.atomic import UPDATES
from tessera_ptx.interp.state import RANK_SHIFT, Active, Frame, Step, load, pick, spaces_of, store
from tessera_ptx.interp.types import PRED, TYPES, U32, U64, Array, types_of
from tessera_ptx.syntax import Imm, Instruction, Mem, Op, Reg, Vec

_BIAS, _COUNT = 1 << 21, (1 << 20) - 1


class Word:
    """An mbarrier."""

    def __init__(self, word: int) -> None:
        self.phase, self.expected = word & 1, word >> 1 & _COUNT
        self.pending, self.bytes = word >> 21 & _COUNT, (word >> 41) - _BIAS

    def packed(self) -> int:
        """Ends the phase if nothing is pending."""
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.expected
        return self.phase | self.expected << 1 | self.pending << 21 | (self.bytes + _BIAS) << 41


def change(frame: Frame, lane: int, address: int, edit: Callable[[Word], None]) -> int:
    one, at = np.array([lane]), np.array([address & (SHARED - 1)], np.uint64)
    before = int(load(frame, "shared", one, at, 8)[0])
    word = Word(before)
    edit(word)
    store(frame, "shared", one, at, np.array([word.packed()], np.uint64), 8)
    return before


def count_bytes(frame: Frame, lane: int, address: int, size: int) -> None:
    def edit(word: Word) -> None:
        word.bytes -= size

    change(frame, lane, address, edit)


def scalar(get: Get, frame: Frame, lane: int) -> int:
    return int(pick(np.asarray(get(frame)), np.array([lane]))[0])


@rule("mbarrier")
def mbarrier(ins: Instruction, decoder: Decoder) -> Step:
    kind = ins.op.mods[0]
    if kind == "init":
        return _init(ins, decoder)
    if kind in ("inval",):
        return lambda frame, act: None
    if kind in ("try_wait", "test_wait"):
        return _wait(ins, decoder)
    if kind in ("arrive", "expect_tx", "complete_tx"):
        return _arrive(ins, decoder, kind)
    raise Unknown(f"mbarrier.{kind}")


def _init(ins: Instruction, decoder: Decoder) -> Step:
    address, count = decoder.address(ins.operands[0]), decoder.get(ins.operands[1], U32)

    def step(frame: Frame, act: Active) -> None:
        where = pick(address(frame), act.index) & np.uint64(SHARED - 1)
        n = pick(np.asarray(count(frame)), act.index).astype(np.uint64)
        word = n << np.uint64(1) | n << np.uint64(21) | np.uint64(_BIAS << 41)
        store(frame, "shared", act.index, where, word, 8)

    return step


def _arrive(ins: Instruction, decoder: Decoder, kind: str) -> Step:
    state = None
    operands = ins.operands
    if not isinstance(operands[0], Mem):
        state = None if operands[0] == Reg("_") else decoder.put(operands[0], U64)
        operands = operands[1:]
    address = decoder.address(operands[0])
    number = decoder.get(operands[1], U32) if len(operands) > 1 else None
    expects = "expect_tx" in ins.op.mods
    arrives = kind == "arrive"

    def step(frame: Frame, act: Active) -> None:
        tokens = np.zeros(frame.machine.num_lanes, np.uint64)
        for lane in act.index:
            given = scalar(number, frame, lane) if number is not None else 1

            def edit(word: Word, given: int = given) -> None:
                word.bytes += given if expects else -given if kind == "complete_tx" else 0
                word.pending -= (1 if expects else given) if arrives else 0

            tokens[lane] = change(frame, lane, scalar(address, frame, lane), edit)
        if state is not None:
            state(frame, act, tokens)

    return step


def _wait(ins: Instruction, decoder: Decoder) -> Step:
    put, address = decoder.put(ins.operands[0], PRED), decoder.address(ins.operands[1])
    phase = decoder.get(ins.operands[2], U32 if "parity" in ins.op.mods else U64)

    def step(frame: Frame, act: Active) -> None:
        where = pick(address(frame), act.index) & np.uint64(SHARED - 1)
        word = load(frame, "shared", act.index, where, 8)
        wanted = pick(np.asarray(phase(frame)), act.index).astype(np.uint64)
        done = np.zeros(frame.machine.num_lanes, bool)
        done[act.index] = (word & np.uint64(1)) != (wanted & np.uint64(1))
        put(frame, act, done)

    return step


def bulk_copy(ins: Instruction, decoder: Decoder) -> Step:
    found = spaces_of(ins.op.mods)
    reduces = ins.op.mods[0] == "reduce"
    if sorted(found[:2]) != ["global", "shared"]:
        raise Unknown("a bulk copy between these spaces")
    target, source = (decoder.address(o) for o in ins.operands[:2])
    size = decoder.get(ins.operands[2], U32)
    counted = any(m.startswith("mbarrier::complete_tx") for m in ins.op.mods)
    barrier = decoder.address(ins.operands[3]) if counted else None
    combine = combiner(ins) if reduces else None

    def step(frame: Frame, act: Active) -> None:
        for lane in act.index:
            into, out_of = (np.uint64(scalar(get, frame, lane)) for get in (target, source))
            count = scalar(size, frame, lane)
            unit = 8 if combine is None else combine[1]
            steps = np.arange(0, count, unit, dtype=np.uint64)
            many = np.full(steps.size, lane)
            value = load(frame, found[1], many, out_of + steps, unit)
            if combine is None:
                store(frame, found[0], many, into + steps, value, unit)
            else:
                update(frame, many, into + steps, value, combine)
            if barrier is not None:
                count_bytes(frame, lane, scalar(barrier, frame, lane), count)

    return step


Combiner = tuple[Callable[[Array, Array], Array], int]


def combiner(ins: Instruction) -> Combiner:
    name = next((m for m in ins.op.mods if m in UPDATES), "")
    kind = only(types_of(ins.op.mods), ins)
    if name not in ("add", "min", "max", "and", "or", "xor"):
        raise Unknown(f"a reduction by '{name}'")
    joined = lift(UPDATES[name], kind)

    def combine(old: Array, new: Array) -> Array:
        result: Array = np.asarray(joined(old.view(kind.dtype), new.view(kind.dtype))).astype(kind.dtype)
        return result.view(kind.raw)

    return combine, kind.bits // 8


def update(frame: Frame, lanes: Array, address: Array, value: Array, combine: Combiner) -> None:
    """Addresses are distinct."""
    join, size = combine
    old = load(frame, "global", lanes, address, size, "a")
    store(frame, "global", lanes, address, join(old, value), size, "a")


@rule("mapa")
def map_address(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    put, a, rank = decoder.put(ins.operands[0], kind), decoder.get(ins.operands[1], U64), ins.operands[2]
    to = decoder.get(rank, U32)
    low = np.uint64((1 << RANK_SHIFT) - 1)

    def step(frame: Frame, act: Active) -> None:
        address = a(frame)
        base = (address >> np.uint64(44)) << np.uint64(44)
        above = (to(frame).astype(np.uint64) + np.uint64(1)) << np.uint64(RANK_SHIFT)
        put(frame, act, (base | above | (address & low)).astype(kind.dtype))

    return step


@rule("getctarank")
def rank_of_address(ins: Instruction, decoder: Decoder) -> Step:
    put, a = decoder.put(ins.operands[0], U32), decoder.get(ins.operands[1], U64)

    def step(frame: Frame, act: Active) -> None:
        rank = (a(frame) & np.uint64(SHARED - 1)) >> np.uint64(RANK_SHIFT)
        own = frame.machine.special["%cluster_ctarank"]
        put(frame, act, np.where(rank > 0, rank - np.uint64(1), own).astype(np.uint32))

    return step


TENSOR_MAP_BYTES = 128
# Field -> (offset, entry bytes).
FIELDS = {
    "global_address": (0, 8), "global_dim": (8, 4), "global_stride": (32, 8), "box_dim": (64, 4),
    "element_stride": (84, 4), "rank": (104, 4), "elemtype": (108, 4), "interleave_layout": (112, 4),
    "swizzle_mode": (116, 4), "fill_mode": (120, 4),
}  # fmt: skip
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16", "tf32")


@dataclass(frozen=True, slots=True)
class Map:
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; innermost: element size
    box: tuple[int, ...]
    element: str
    swizzle: int

    @staticmethod
    def of(raw: Array) -> "Map":
        word = raw.view(np.uint32)
        rank = int(word[26]) + 1
        if not 1 <= rank <= 5 or int(word[27]) >= len(ELEMENTS) or word[28] or word[30] or int(word[29]) > 3:
            raise BadAccess("a tensor map of a form that the interpreter does not know", 0)
        if any(int(word[21 + k]) != 1 for k in range(rank)):
            raise BadAccess("a tensor map with element strides", 0)
        element = ELEMENTS[int(word[27])]
        wide = raw[32:64].view(np.uint64)
        strides = (TYPES[element].bits // 8, *(int(wide[k]) for k in range(rank - 1)))
        sizes, box = (tuple(int(word[first + k]) for k in range(rank)) for first in (2, 16))
        return Map(int(raw[:8].view(np.uint64)[0]), sizes, strides, box, element, int(word[29]))

    @property
    def element_bytes(self) -> int:
        return self.strides[0]

    def places(self, corner: tuple[int, ...]) -> tuple[Array, Array]:
        """Innermost first; whether inside the tensor."""
        address = np.full((1,) * len(self.box), self.address, np.int64)
        inside: Array = np.ones((1,) * len(self.box), bool)
        for axis, (first, count, size, stride) in enumerate(
            zip(corner, self.box, self.sizes, self.strides, strict=True)
        ):
            along = (first + np.arange(count)).reshape((-1,) + (1,) * axis)
            address = address + along * stride
            inside = inside & (along >= 0) & (along < size)
        shape = self.box[::-1]
        return (
            np.broadcast_to(address, shape).ravel().astype(np.uint64),
            np.broadcast_to(inside, shape).ravel(),
        )


def swizzled(address: Array, mode: int) -> Array:
    """Mode 1, 2, 3 within 32, 64, 128 bytes."""
    if mode == 0:
        return address
    bits = np.uint64((1 << mode) - 1)
    moved: Array = address ^ (((address >> np.uint64(7)) & bits) << np.uint64(4))
    return moved


@rule("tensormap")
def edit(ins: Instruction, decoder: Decoder) -> Step:
    if ins.op.mods[0] == "replace":
        return _replace(ins, decoder)
    if ins.op.mods[0] == "cp_fenceproxy":
        found = spaces_of(ins.op.mods)
        into, out_of = (decoder.address(o) for o in ins.operands[:2])

        def step(frame: Frame, act: Active) -> None:
            # Issued by a whole warp, executed once per warp.
            for lane in act.index[np.unique(act.index // 32, return_index=True)[1]]:
                pieces = np.arange(0, TENSOR_MAP_BYTES, 8, dtype=np.uint64)
                lanes = np.full(pieces.size, lane)
                source = _bare(scalar(out_of, frame, lane), found[1])
                value = load(frame, found[1], lanes, source + pieces, 8)
                target = np.uint64(scalar(into, frame, lane))
                store(frame, found[0], lanes, target + pieces, value, 8)

        return step
    raise Unknown("this form of tensormap")


def _bare(address: int, space: str) -> np.uint64:
    return np.uint64(address & (SHARED - 1) if space == "shared" else address)


def _replace(ins: Instruction, decoder: Decoder) -> Step:
    name = next((m for m in ins.op.mods if m in FIELDS), "")
    if not name:
        raise Unknown("this field")
    offset, size = FIELDS[name]
    space = (spaces_of(ins.op.mods) or [""])[0]
    address = decoder.address(ins.operands[0])
    value = decoder.get(ins.operands[-1], U64)
    entry = 0
    if len(ins.operands) == 3:
        if not isinstance(ins.operands[1], Imm):
            raise Unknown("an entry chosen at run time")
        entry = ins.operands[1].value

    def step(frame: Frame, act: Active) -> None:
        for lane in act.index:
            at = _bare(scalar(address, frame, lane), space) + np.uint64(offset + entry * size)
            given = scalar(value, frame, lane) & ((1 << 8 * size) - 1)
            one = np.array([lane])
            store(frame, space, one, np.array([at]), np.array([given], f"u{size}"), size)

    return step


def tensor_copy(ins: Instruction, decoder: Decoder) -> Step:
    found = spaces_of(ins.op.mods)
    if found[:2] not in (["shared", "global"], ["global", "shared"]) or "im2col" in ins.op.mods:
        raise Unknown("a tensor copy of this form")
    if any("multicast" in m for m in ins.op.mods):
        raise Unknown("multicast")
    loads = found[0] == "shared"
    map_operand, tile_operand = (ins.operands[1], ins.operands[0]) if loads else ins.operands[:2]
    if not isinstance(map_operand, Mem) or len(map_operand.coords) != 1:
        raise Unknown("a tensor copy without coordinates")
    where = decoder.address(Mem(map_operand.base, map_operand.offset))
    coords = map_operand.coords[0]
    gets = [decoder.get(item, U32) for item in (coords.items if isinstance(coords, Vec) else (coords,))]
    tile = decoder.address(tile_operand)
    barrier = decoder.address(ins.operands[2]) if loads else None
    name = next((m for m in ins.op.mods if m in UPDATES), "") if ins.op.mods[0] == "reduce" else ""

    def step(frame: Frame, act: Active) -> None:
        for lane in map(int, act.index):
            described = read_map(frame, lane, where)
            corner = tuple(int(np.int32(np.uint32(scalar(get, frame, lane)))) for get in gets)
            start = scalar(tile, frame, lane) & (SHARED - 1)
            if loads:
                _load(frame, lane, described, corner, start)
                size = int(np.prod(described.box)) * described.element_bytes
                assert barrier is not None
                count_bytes(frame, lane, scalar(barrier, frame, lane), size)
            else:
                _store(frame, lane, described, corner, start, name)

    return step


def read_map(frame: Frame, lane: int, where: Get) -> Map:
    pieces = np.arange(0, TENSOR_MAP_BYTES, 8, dtype=np.uint64)
    address = np.uint64(scalar(where, frame, lane))
    return Map.of(load(frame, "", np.full(pieces.size, lane), address + pieces, 8).view(np.uint8))


def _tile(described: Map, start: int) -> Array:
    count = int(np.prod(described.box))
    dense = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(described.element_bytes)
    return swizzled(dense, described.swizzle)


def _load(frame: Frame, lane: int, described: Map, corner: tuple[int, ...], start: int) -> None:
    address, inside = described.places(corner)
    size = described.element_bytes
    value = np.zeros(address.size, f"u{size}")
    lanes = np.full(address.size, lane)
    value[inside] = load(frame, "global", lanes[inside], address[inside], size)
    store(frame, "shared", lanes, _tile(described, start), value, size)


def _store(frame: Frame, lane: int, described: Map, corner: tuple[int, ...], start: int, name: str) -> None:
    address, inside = described.places(corner)
    size = described.element_bytes
    lanes = np.full(address.size, lane)
    value = load(frame, "shared", lanes, _tile(described, start), size)
    if not name:
        store(frame, "global", lanes[inside], address[inside], value[inside], size)
        return
    # The copy has the operation, the map the type.
    op = Op(f"red.{name}.{described.element}", "red", (name, described.element))
    like = Instruction(op, None, (), 0, 0)
    update(frame, lanes[inside], address[inside], value[inside], combiner(like))
