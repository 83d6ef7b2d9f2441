"""Addresses of module symbols: global and constant variables, shared variables, functions; and their initial
values.

Shared variables of all functions get places side by side in a block's strip; unsized (extern) arrays all
begin behind them, where the launch's dynamic shared memory lies.
"""

import re
import struct
from dataclasses import dataclass, field

import numpy as np

from tessera_ptx.errors import BadLaunch
from tessera_ptx.interp.memory import ARENA, CODE, SHARED, Arena
from tessera_ptx.interp.types import TYPES, Array
from tessera_ptx.syntax import Module, Variable

_TOKEN = re.compile(
    r"generic\s*\(\s*([\w$%.]+)\s*\)|mask\s*\([^)]*\)|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|[\w$%.+-]+"
)


@dataclass(slots=True)
class Layout:
    """Where symbols live."""

    symbols: dict[str, int] = field(default_factory=dict)
    spaces: dict[str, str] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    shared_bytes: int = 0
    dynamic_bytes: int = 0
    variables: list[Variable] = field(default_factory=list)

    def initialise(self, arena: Arena) -> None:
        """Write initial values; the arena is sealed by now."""
        for variable in self.variables:
            if variable.initial:
                start = self.symbols[variable.name] - ARENA
                content = initial_bytes(variable, self)
                arena.data[start : start + content.size] = content


def place_symbols(module: Module, arena: Arena, dynamic_bytes: int) -> Layout:
    """Give every symbol of the module an address."""
    layout = Layout(dynamic_bytes=0)
    shared = [v for v in module.variables if v.space == "shared"]
    for number, function in enumerate(module.functions):
        layout.symbols[function.name] = CODE + 16 * number
        layout.functions[CODE + 16 * number] = function.name
        shared += [v for v in function.variables if v.space == "shared"]
        layout.variables += [v for v in function.variables if v.space in ("global", "const")]
    layout.variables += [v for v in module.variables if v.space in ("global", "const")]
    for variable in layout.variables:
        layout.symbols[variable.name] = arena.add(f":{variable.name}", np.zeros(variable.size, np.uint8))
        layout.spaces[variable.name] = variable.space
    _place_shared(layout, shared, dynamic_bytes)
    return layout


def _place_shared(layout: Layout, shared: list[Variable], dynamic_bytes: int) -> None:
    top = 0
    for variable in shared:
        if variable.size:
            top = -(-top // max(variable.align, 1)) * max(variable.align, 1)
            layout.symbols[variable.name] = top
            layout.spaces[variable.name] = "shared"
            top += variable.size
    unsized = [v for v in shared if not v.size]
    if unsized:
        align = max(1024, *(v.align for v in unsized))  # swizzled tiles rely on it
        top = -(-top // align) * align
        for variable in unsized:
            layout.symbols[variable.name] = top
            layout.spaces[variable.name] = "shared"
        layout.dynamic_bytes = dynamic_bytes
        top += dynamic_bytes
    layout.shared_bytes = top


def initial_bytes(variable: Variable, layout: Layout) -> Array:
    """The bytes of a variable's initial value; shorter than the variable when the rest is zero."""
    kind = TYPES[variable.type]
    out = bytearray()
    for match in _TOKEN.finditer(variable.initial):
        out += _element(match, kind.bits // 8, kind.kind, variable, layout)
    return np.frombuffer(bytes(out[: variable.size]), np.uint8)


def _element(match: re.Match[str], size: int, kind: str, variable: Variable, layout: Layout) -> bytes:
    text = match[0]
    if match[1] is not None:
        base = SHARED if layout.spaces.get(match[1]) == "shared" else 0
        return (layout.symbols[match[1]] + base).to_bytes(8, "little")
    if text[:2] in ("0f", "0F") and len(text) == 10 and kind == "f":
        return struct.pack("<I", int(text[2:], 16))
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return struct.pack("<Q", int(text[2:], 16))
    name, _, plus = text.partition("+")
    if name in layout.symbols:
        return (layout.symbols[name] + int(plus or "0", 0)).to_bytes(size, "little")
    if kind == "f":
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], float(text))
    try:
        return (int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    except ValueError:
        raise BadLaunch(
            f"the initial value of '{variable.name}' holds '{text}'", place=str(variable.line)
        ) from None
