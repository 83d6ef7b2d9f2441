"""Triton launches: what a compiled Triton kernel is, and how each of its launches is seen.

    with inductor_launches(see):   kernels of Inductor's code  (hook: CachingAutotuner.run)

`see` is called once for every launch, after it was issued, with a `TritonLaunch`. `from_jit` makes the same
of a launch that the program makes itself (see `tessera.capture.own`). Arguments are those of
the PTX entry, in its order: what was compiled in (constexpr, or specialised to a constant) is left out and
listed in the kernel's constants.

Not seen: launches of an autotuner that tries configurations (they are no part of the program), and
kernels under Inductor's static launcher, which drops the PTX: switch it off (`compile.CONFIG`).
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.errors import CaptureError
from tessera.ir import Kernel, Origin

Grid = tuple[int, int, int]
# (grid, arguments of the PTX entry) -> launches on the current stream.
Relaunch = Callable[[Grid, Sequence[Any]], None]

_REQNTID = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TritonLaunch:
    """One launch of a compiled Triton kernel."""

    kernel: Kernel
    # Tensors and numbers for the parameters of the PTX entry.
    args: tuple[Any, ...]
    grid: Grid
    block: Grid
    # Places in `args` that the compiler declares as written; empty where it declares nothing.
    mutated: frozenset[int]
    relaunch: Relaunch


See = Callable[[TritonLaunch], None]


@contextlib.contextmanager
def inductor_launches(see: See) -> Iterator[None]:
    """While active, `see` gets every launch of an Inductor-made kernel."""
    heuristics = _heuristics()
    original = heuristics.CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not kwargs.get("benchmark_run", False):
            see(_from_autotuner(self, args))
        return result

    heuristics.CachingAutotuner.run = run
    try:
        yield
    finally:
        heuristics.CachingAutotuner.run = original


def _heuristics() -> Any:
    from torch._inductor.runtime import triton_heuristics

    return triton_heuristics


# Inductor -------------------------------------------------------------------------------------------------


def _from_autotuner(tuner: Any, args: tuple[Any, ...]) -> TritonLaunch:
    (launcher,) = tuner.launchers
    compiled = launcher.__globals__.get("bin")
    result = next((r for r in tuner.compile_results if r.kernel is compiled), None)
    if result is None:
        raise CaptureError(
            f"Inductor keeps no compiled kernel of {tuner.fn.__name__} to take the PTX from",
            "Switch its static launcher off (use_static_triton_launcher=False).",
        )
    code = launcher.__code__
    names = [n for n in code.co_varnames[: code.co_argcount] if n != "stream"]
    given = dict(zip(names, args, strict=True))
    _, grid = tuner._interpret_args_grid(args, launcher.config)
    meta = result.compile_meta
    signature = {n: meta["signature"].get(n, "constexpr") for n in tuner.fn.arg_names}
    constants = {n: meta["constants"].get(n) for n, kind in signature.items() if kind == "constexpr"}
    return _launch(compiled, tuner.fn, signature, constants, given, grid, frozenset(tuner.mutated_arg_names))


# The program's own ----------------------------------------------------------------------------------------


def from_jit(
    function: Any, compiled: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], grid: Any
) -> TritonLaunch:
    """A launch of a kernel by the program, from Triton's function and what it was compiled to."""
    names = function.arg_names
    mine = {k: v for k, v in kwargs.items() if k in names}
    bound = inspect.signature(function.fn).bind(*args, **mine)
    bound.apply_defaults()
    given = dict(bound.arguments)
    sizes = grid({**kwargs, **given}) if callable(grid) else grid
    sizes = (*sizes, 1, 1)[:3] if isinstance(sizes, tuple | list) else (sizes, 1, 1)
    signature = {n: compiled.src.signature.get(n, "constexpr") for n in names}
    # Keys are argument paths, (place,) for a plain argument.
    inside = {path[0]: v for path, v in compiled.src.constants.items() if len(path) == 1}
    constants = {
        n: inside.get(place, given.get(n)) for place, n in enumerate(names) if signature[n] == "constexpr"
    }
    return _launch(compiled, function, signature, constants, given, sizes, frozenset())


# Both -----------------------------------------------------------------------------------------------------


def _launch(
    compiled: Any,
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    given: Mapping[str, Any],
    grid: Sequence[int],
    mutated: frozenset[str],
) -> TritonLaunch:
    params = [n for n, kind in signature.items() if kind != "constexpr"]
    kernel = _kernel(compiled, function, signature, constants)
    return TritonLaunch(
        kernel,
        tuple(given[n] for n in params),
        (int(grid[0]), int(grid[1]), int(grid[2])),
        block_of(kernel),
        frozenset(i for i, n in enumerate(params) if n in mutated),
        _relaunch(compiled, tuple(signature), dict(constants)),
    )


def _kernel(
    compiled: Any, function: Any, signature: Mapping[str, str], constants: Mapping[str, Any]
) -> Kernel:
    metadata = compiled.metadata
    ptx = getattr(compiled, "asm", {}).get("ptx")
    if not ptx:
        raise CaptureError(
            f"Triton kernel {metadata.name} has no PTX",
            "Switch Inductor's static launcher off and empty its cache.",
        )
    return Kernel(
        metadata.name,
        Origin.TRITON,
        ptx=ptx,
        source=_source(function),
        signature=tuple((n, str(kind)) for n, kind in signature.items()),
        constants=tuple((n, v if isinstance(v, _PLAIN) else str(v)) for n, v in constants.items()),
        num_warps=int(metadata.num_warps),
        num_stages=int(getattr(metadata, "num_stages", 0)),
        shared_bytes=int(metadata.shared),
    )


def _source(function: Any) -> str:
    """The kernel's own text, without decorators."""
    return str(getattr(function, "src", None) or "")


def block_of(kernel: Kernel) -> Grid:
    """Threads of a block: what the PTX requires, else the number of warps."""
    found = _REQNTID.search(kernel.ptx)
    if found is None:
        return 32 * kernel.num_warps, 1, 1
    x, y, z = (int(n or 1) for n in found.groups())
    return x, y, z


def _relaunch(compiled: Any, names: tuple[str, ...], constants: dict[str, Any]) -> Relaunch:
    def relaunch(grid: Grid, args: Sequence[Any]) -> None:
        given = iter(args)
        compiled[grid](*(constants[n] if n in constants else next(given) for n in names))

    return relaunch
