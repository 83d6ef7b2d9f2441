"""Tensor maps and the copies that use them.

A tensor map is opaque in PTX; here its 128 bytes have a layout of our own, which `tensor_map` writes
for arguments and `tensormap.replace` edits field by field:

    0 address | 8 five sizes | 32 four strides in bytes | 64 five box sizes | 84 five element strides
    104 rank - 1 | 108 element type | 112 interleave | 116 swizzle | 120 fill mode

Sizes run from the innermost dimension outwards. Elements outside the tensor read as zeros and are not
written. Swizzles exchange 16-byte pieces within rows of 128 bytes by the row's number; the tile must
lie on 1,024 bytes. Not handled: interleaved layouts, element strides other than 1, im2col, fills other
than zeros.
"""

from dataclasses import dataclass

import numpy as np

from tessera_ptx.interp import rules_bulk
from tessera_ptx.interp.access import load, spaces_of, store
from tessera_ptx.interp.decode import Decoder, Get, Unknown, rule
from tessera_ptx.interp.memory import SHARED, BadAccess
from tessera_ptx.interp.rules_atomic import UPDATES
from tessera_ptx.interp.state import Active, Frame, Step
from tessera_ptx.interp.types import TYPES, U32, U64, Array
from tessera_ptx.syntax import Imm, Instruction, Mem, Op, Vec

SIZE = 128
# Field -> (offset, bytes of one entry).
FIELDS = {
    "global_address": (0, 8), "global_dim": (8, 4), "global_stride": (32, 8), "box_dim": (64, 4),
    "element_stride": (84, 4), "rank": (104, 4), "elemtype": (108, 4), "interleave_layout": (112, 4),
    "swizzle_mode": (116, 4), "fill_mode": (120, 4),
}  # fmt: skip
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16", "tf32")


@dataclass(frozen=True, slots=True)
class Map:
    """A tensor map, read."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; of the innermost dimension the element's size
    box: tuple[int, ...]
    element: str
    swizzle: int

    @staticmethod
    def of(raw: Array) -> "Map":
        """From its bytes; refuses what is not handled."""
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
        """Bytes of one element."""
        return self.strides[0]

    def places(self, corner: tuple[int, ...]) -> tuple[Array, Array]:
        """Global addresses of a box's elements, innermost first, and which of them lie inside the tensor."""
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
    """Shared addresses with 16-byte pieces exchanged: mode 1, 2, 3 within 32, 64, 128 bytes."""
    if mode == 0:
        return address
    bits = np.uint64((1 << mode) - 1)
    moved: Array = address ^ (((address >> np.uint64(7)) & bits) << np.uint64(4))
    return moved


@rule("tensormap")
def edit(ins: Instruction, decoder: Decoder) -> Step:
    """`tensormap.replace` and `tensormap.cp_fenceproxy`."""
    if ins.op.mods[0] == "replace":
        return _replace(ins, decoder)
    if ins.op.mods[0] == "cp_fenceproxy":
        found = spaces_of(ins.op.mods)
        into, out_of = (decoder.address(o) for o in ins.operands[:2])

        def step(frame: Frame, act: Active) -> None:
            # Issued by a whole warp, done once for each.
            for lane in act.index[np.unique(act.index // 32, return_index=True)[1]]:
                pieces = np.arange(0, SIZE, 8, dtype=np.uint64)
                lanes = np.full(pieces.size, lane)
                source = _bare(rules_bulk.scalar(out_of, frame, lane), found[1])
                value = load(frame, found[1], lanes, source + pieces, 8)
                target = np.uint64(rules_bulk.scalar(into, frame, lane))
                store(frame, found[0], lanes, target + pieces, value, 8)

        return step
    raise Unknown("this form of tensormap")


def _bare(address: int, space: str) -> np.uint64:
    """A shared address without the generic window."""
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
            at = _bare(rules_bulk.scalar(address, frame, lane), space) + np.uint64(offset + entry * size)
            given = rules_bulk.scalar(value, frame, lane) & ((1 << 8 * size) - 1)
            one = np.array([lane])
            store(frame, space, one, np.array([at]), np.array([given], f"u{size}"), size)

    return step


def copy(ins: Instruction, decoder: Decoder) -> Step:
    """`cp.async.bulk.tensor` in both directions and `cp.reduce.async.bulk.tensor`."""
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
            corner = tuple(int(np.int32(np.uint32(rules_bulk.scalar(get, frame, lane)))) for get in gets)
            start = rules_bulk.scalar(tile, frame, lane) & (SHARED - 1)
            if loads:
                _load(frame, lane, described, corner, start)
                size = int(np.prod(described.box)) * described.element_bytes
                assert barrier is not None
                rules_bulk.count_bytes(frame, lane, rules_bulk.scalar(barrier, frame, lane), size)
            else:
                _store(frame, lane, described, corner, start, name)

    return step


def read_map(frame: Frame, lane: int, where: Get) -> Map:
    """The map at an address that is generic, or lies in parameter space."""
    pieces = np.arange(0, SIZE, 8, dtype=np.uint64)
    address = np.uint64(rules_bulk.scalar(where, frame, lane))
    return Map.of(load(frame, "", np.full(pieces.size, lane), address + pieces, 8).view(np.uint8))


def _tile(described: Map, start: int) -> Array:
    """Shared addresses of a box's elements, in the order of `places`."""
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
    # The copy names the operation, the map names the type.
    op = Op(f"red.{name}.{described.element}", "red", (name, described.element))
    like = Instruction(op, None, (), 0, 0)
    rules_bulk.update(frame, lanes[inside], address[inside], value[inside], rules_bulk.combiner(like))
