"""What tests and the table ask of the corpus: rows of truth, launches of a row, comparisons."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import launches
import numpy as np

from tessera_ptx import KernelReport, LaunchConfig, Module, analyze_module, parse
from tessera_ptx.interp import Packed, Result, run

HERE = Path(__file__).resolve().parent


@lru_cache(maxsize=1)
def rows() -> list[dict[str, Any]]:
    """The truth of every kernel and architecture."""
    return list(json.loads((HERE / "truth.json").read_text()))


def name_of(row: dict[str, Any]) -> str:
    """A row's name in a test report."""
    return f"{row['part']}-{row['theme']}-{row['kernel']}-{row['arch']}"


@lru_cache(maxsize=256)
def text_of(file: str) -> str:
    """The PTX of a row's file."""
    return (HERE / file).read_text()


@lru_cache(maxsize=256)
def module_of(file: str) -> Module:
    """The parsed PTX of a row's file."""
    return parse(text_of(file), file)


def is_runnable(row: dict[str, Any]) -> bool:
    """Whether the corpus has a launch for the row; the interpreter runs all of them."""
    return launches.maker_of(row) is not None


def made(row: dict[str, Any], seed: int) -> launches.Launch:
    """One launch of a row."""
    maker = launches.maker_of(row)
    assert maker is not None
    return maker(np.random.default_rng(seed))


def run_row(row: dict[str, Any], seed: int) -> tuple[launches.Launch, Result]:
    """One launch of a row, run by the interpreter."""
    launch = made(row, seed)
    module = module_of(row["ptx"])
    result = run(
        module,
        row["entry"],
        launch.grid,
        launch.block,
        launch.args,
        shared_bytes=launch.shared_bytes,
        cluster=launch.cluster,
    )
    return launch, result


def differences(made: launches.Launch, result: Result) -> list[str]:
    """Where the result is not what the launch expects, in words."""
    found = []
    for name, expected in made.expect.items():
        got = buffer_of(result, name)
        want = np.asarray(expected).astype(np.float64)
        error = np.abs(got.reshape(want.shape).astype(np.float64) - want) / np.maximum(1.0, np.abs(want))
        if error.size and not error.max() <= made.tolerance:
            found.append(f"buffer {name} is off by {error.max():.3g}, {made.tolerance:.3g} is allowed")
    return found


def buffer_of(result: Result, name: int | str) -> Any:
    """A buffer by argument number or name; `bf16:3` is argument 3 read as bf16."""
    if isinstance(name, int):
        return result.arrays[name]
    if name.startswith("bf16:"):
        return launches.from_bf16(result.arrays[int(name[5:])])
    return result.buffers[name]


def dynamic_flags(row: dict[str, Any], result: Result) -> dict[str, tuple[bool, bool, bool]]:
    """Read, write and atomic flags that a launch showed, by pointer name; `:name` is a module variable."""
    found = {}
    for pointer in row["pointers"]:
        home = result.pointers.get((pointer["param"], pointer["offset"]))
        if home is not None:
            found[pointer["name"]] = result.masks[home[0]].any()
    return found | {name: mask.any() for name, mask in result.masks.items() if name.startswith(":")}


# ---- the static analysis against the interpreter -------------------------------------------------------


@lru_cache(maxsize=256)
def reports_of(file: str) -> dict[str, KernelReport]:
    """What the analysis says of each kernel of a file."""
    return {report.name: report for report in analyze_module(module_of(file))}


def report_of(row: dict[str, Any]) -> KernelReport:
    """What the analysis says of a row's kernel."""
    return reports_of(row["ptx"])[row["entry"]]


def scalars_of(args: list[Any]) -> dict[int | tuple[int, int], int]:
    """The whole numbers among a launch's arguments, also those inside structs, as the analysis wants them."""
    found: dict[int | tuple[int, int], int] = {}
    for number, arg in enumerate(args):
        if isinstance(arg, Packed):
            fields = {at: v for at, v in arg.fields.items() if isinstance(v, np.integer)}
            found |= {(number, at): int(value) for at, value in fields.items()}
        elif isinstance(arg, int | np.integer):
            found[number] = int(arg)
    return found


def static_launch(launch: launches.Launch) -> LaunchConfig:
    """A launch as the analysis wants it."""
    dims = [(*((d,) if isinstance(d, int) else d), 1, 1)[:3] for d in (launch.grid, launch.block)]
    return LaunchConfig(dims[0], dims[1], scalars_of(launch.args))


def static_masks(report: KernelReport, launch: launches.Launch, result: Result) -> dict[str, Any]:
    """Bytes that the analysis says a launch may read, write or update: buffer -> three masks."""
    numbers = static_launch(launch)
    masks = {name: np.zeros((3, data.nbytes), bool) for name, data in result.buffers.items()}
    for access in report.accesses:
        home = result.pointers.get((access.param, access.offset))
        if home is None:
            continue
        buffer, start = home
        kinds = access.read or access.atomic, access.write or access.atomic, access.atomic
        if access.is_tensor_map:
            spans: Any = ((None, None),)
        else:
            spans = access.extent.resolve(numbers).spans
        for low, high in spans:
            first = 0 if low is None else max(start + low, 0)
            last = masks[buffer].shape[1] if high is None else max(start + high, 0)
            for k, kind in enumerate(kinds):
                masks[buffer][k, first:last] |= kind
    for symbol in report.symbols:
        kinds = symbol.read or symbol.atomic, symbol.write or symbol.atomic, symbol.atomic
        masks[f":{symbol.name}"] |= np.array(kinds)[:, None]
    return masks


def uncovered(row: dict[str, Any], launch: launches.Launch, result: Result) -> list[str]:
    """Accesses of a launch that the analysis did not announce, in words; empty means sound."""
    report = report_of(row)
    if not report.movable:
        return []
    found = []
    masks = static_masks(report, launch, result)
    for name, seen in result.masks.items():
        for k, (kind, dynamic) in enumerate(
            (("read", seen.read), ("write", seen.write), ("update", seen.atomic))
        ):
            lost = np.flatnonzero(dynamic & ~masks[name][k])
            if lost.size:
                found.append(f"{kind} of byte {lost[0]} of {name} ({lost.size} bytes) is not announced")
    return found


def falsely_exact(row: dict[str, Any], launch: launches.Launch, result: Result) -> list[str]:
    """Extents that claim every byte is touched though the launch left some alone."""
    found = []
    numbers = static_launch(launch)
    for access in report_of(row).accesses:
        home = result.pointers.get((access.param, access.offset))
        if home is None or access.is_tensor_map:
            continue
        bytes_ = access.extent.resolve(numbers)
        if bytes_.exact:
            seen = result.masks[home[0]]
            touched = seen.read | seen.write | seen.atomic
            for low, high in bytes_.spans:
                if low is None or high is None or not touched[home[1] + low : home[1] + high].all():
                    found.append(f"argument {access.param}+{access.offset}: [{low}, {high}) is called exact")
    return found
