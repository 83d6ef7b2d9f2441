"""What tests and the table ask of the corpus: rows of truth, launches of a row, comparisons."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import launches
import numpy as np

from tessera.analyze.ptx.interp import Result, run
from tessera.analyze.ptx.parser import parse
from tessera.analyze.ptx.syntax import Module

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
