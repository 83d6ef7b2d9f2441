"""The heterogeneity picture: ratios by class, and what they are drawn from."""

from pathlib import Path

import pytest

from profile_factories import emulated, gemm_trace
from tessera.errors import TesseraError
from tessera.ir import Cost, Costs, Source
from tessera.report.ratios import draw_ratios, ratios, sources


def costs(*rows: tuple[float, float]) -> Costs:
    """Prices on two devices."""
    made = [(Cost(a, Source.MEASURED, 0.0), Cost(b, Source.TABLE, 0.0)) for a, b in rows]
    return Costs(gemm_trace(8, 8, 8).digest, emulated("a100", "l40s"), tuple(made))


def test_ratios_are_second_over_first_by_class() -> None:
    """Sorted within a class; the class with the lowest ratio comes first."""
    found = ratios(costs((1.0, 2.0), (4.0, 2.0), (1.0, 3.0)), ["norm", "gemm", "norm"])

    assert {"gemm": [(0.5, 4.0)], "norm": [(2.0, 1.0), (3.0, 1.0)]} == found
    assert ["gemm", "norm"] == list(found)


def test_launches_that_take_no_time_have_no_ratio() -> None:
    """Allocations are left out."""
    assert {} == ratios(costs((0.0, 0.0), (1.0, 0.0)), ["allocation", "copy"])


def test_the_picture_names_its_sources() -> None:
    """Per device, with how many launches each."""
    assert "emu:a100: measured 2; emu:l40s: table 2" == sources(costs((1.0, 2.0), (1.0, 2.0)))


def test_nothing_to_draw_gets_one_line(tmp_path: Path) -> None:
    """Instead of an empty picture."""
    pytest.importorskip("matplotlib")
    with pytest.raises(TesseraError, match="no launch takes time on both devices"):
        draw_ratios(gemm_trace(8, 8, 8), costs((0.0, 1.0)), ["gemm"], tmp_path / "r.png")


def test_a_picture_that_cannot_be_written_gets_one_line(tmp_path: Path) -> None:
    """With its place."""
    pytest.importorskip("matplotlib")
    with pytest.raises(TesseraError, match="cannot write"):
        draw_ratios(gemm_trace(8, 8, 8), costs((1.0, 2.0)), ["gemm"], tmp_path / "absent" / "r.png")
