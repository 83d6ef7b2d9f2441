"""The kernel that fetches weights: proved by the analyzer, run by the interpreter."""

from typing import Any

import numpy as np
import pytest

from tessera.execute.driver import FETCH
from tessera_ptx import analyze
from tessera_ptx.interp import run


def test_the_analyzer_proves_that_it_reads_the_source_and_writes_the_target() -> None:
    (report,) = analyze(FETCH.ptx)

    assert report.movable
    assert {(0, True, False), (1, False, True)} == {(a.param, a.read, a.write) for a in report.accesses}


@pytest.mark.parametrize("num", [0, 1, 15, 16, 17, 2047, 2064, 6159, 6160, 8192, 8207, 16384, 24577, 40000])
def test_it_copies_every_byte_and_no_more(num: int) -> None:
    source = np.random.default_rng(num).integers(1, 256, 40_960, dtype=np.uint8)
    args: list[Any] = [source, np.zeros(40_960, np.uint8), np.uint64(num)]
    found: Any = run(FETCH.ptx, FETCH.name, 2, 128, args).arrays

    assert np.array_equal(source[:num], found[1][:num])
    assert not found[1][num:].any()
