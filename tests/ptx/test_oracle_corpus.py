"""The interpreter runs the corpus, and agrees with NumPy, with the golden sentences and with the analysis."""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from sampling import examples, one_of_each

CORPUS = Path(__file__).resolve().parents[2] / "corpus"
sys.path.insert(0, str(CORPUS))
checks: Any = importlib.import_module("checks")
golden: Any = importlib.import_module("golden")

ROWS = checks.rows()
RUNNABLE = [row for row in ROWS if checks.is_runnable(row)]
# A kernel is much the same on every architecture.
SAMPLE = one_of_each(RUNNABLE, lambda row: (row["part"], row["theme"], row["kernel"]))
NAMES = [checks.name_of(row) for row in SAMPLE]
# What the interpreter must run on sm_80.
REQUIRED = {
    "add", "row_sum", "softmax", "rmsnorm", "rope", "matmul_f16", "matmul_bf16", "matmul_tf32",
    "flash_forward", "flash_forward_causal", "moe_gather_gemm", "ssm_scan", "histogram", "scatter_add",
    "atomic_kinds",
}  # fmt: skip
# An aliased argument: both pointers lead to one buffer, and marks belong to the buffer.
ALIASED = {("end_pointer", "end"), ("ptr_difference", "b")}


@functools.cache
def launches_of(number: int) -> list[tuple[Any, Any]]:
    """Random launches of a row of the sample, and what they left behind."""
    return [checks.run_row(SAMPLE[number], seed) for seed in range(1, 1 + examples(4, 1))]


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=NAMES)
def test_kernel_agrees_with_numpy(number: int) -> None:
    """Random launches leave what the NumPy reference says."""
    for made, result in launches_of(number):
        assert [] == checks.differences(made, result)


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=NAMES)
def test_kernel_touches_only_what_the_sentence_says(number: int) -> None:
    """No launch reads, writes or updates a buffer that the golden sentence does not name for it."""
    row = SAMPLE[number]
    told = {p["name"]: (p["read"], p["write"], p["atomic"]) for p in row["pointers"]}
    told |= {":" + s["name"]: (s["read"], s["write"], s["atomic"]) for s in row["symbols"]}
    for _, result in launches_of(number):
        for name, flags in checks.dynamic_flags(row, result).items():
            if (row["kernel"], name) not in ALIASED:
                said = told.get(name, (False,) * 3)
                extra = [seen and not may for seen, may in zip(flags, said, strict=True)]
                assert not any(extra), f"{name}: read, write, atomic = {flags}"


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=NAMES)
def test_static_covers_dynamic(number: int) -> None:
    """Every byte that a launch reads, writes or updates is announced, and extents called exact are."""
    row = SAMPLE[number]
    for made, result in launches_of(number):
        assert [] == checks.uncovered(row, made, result)
        assert [] == checks.falsely_exact(row, made, result)


def test_required_kernels_run() -> None:
    """Every Triton kernel that the interpreter is required to run on sm_80 is among those it runs."""
    runnable = {row["kernel"] for row in RUNNABLE if row["part"] == "triton" and row["arch"] == "sm_80"}

    assert set() == REQUIRED - runnable


def test_truth_is_made_from_the_sentences() -> None:
    """truth.json says what the golden files say."""
    assert golden.truth() == ROWS


def test_every_kernel_has_a_sentence() -> None:
    """No kernel of the corpus is without golden truth."""
    told = {(row["ptx"], row["entry"]) for row in ROWS}
    files = [*CORPUS.glob("ptx/*/*.ptx"), *CORPUS.glob("hand/*.ptx")]
    there = set()
    for file in files:
        name = file.relative_to(CORPUS).as_posix()
        there |= {(name, entry.name) for entry in checks.module_of(name).entries}

    assert there == told


def test_sentences_place_pointers_inside_parameters() -> None:
    """Every pointer of a sentence is a parameter of the kernel, or lies inside one."""
    for row in ROWS:
        entry = next(e for e in checks.module_of(row["ptx"]).entries if e.name == row["entry"])
        for pointer in row["pointers"]:
            size = entry.params[pointer["param"]].size
            assert pointer["offset"] + 8 <= size, f"{checks.name_of(row)}: {pointer['name']}"


def test_checked_in_ptx_has_no_paths() -> None:
    """PTX in the repository names no folder of the machine that made it."""
    for file in CORPUS.glob("ptx/*/*.ptx"):
        for line in file.read_text().splitlines():
            assert not (line.lstrip().startswith(".file") and "/" in line), f"{file.name}: {line}"


def test_corpus_is_small() -> None:
    """The checked-in PTX stays below 6 MB."""
    assert sum(file.stat().st_size for file in CORPUS.glob("**/*.ptx")) < 6_000_000
