"""`tessera profile` on devices of this machine, as a user runs it."""

import sys
from pathlib import Path

import pytest

from commands import answer, call
from measured_factory import FakeTimer
from tessera.cli import _main
from tessera.ir import Costs, Plan, Source, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small step, measured on the CPU."""
    path = tmp_path_factory.mktemp("measured")
    trace = str(path / "d.trace")
    assert 0 == _main(["capture", "tiny-llama", "--batch", "1", "--context", "16", "-o", trace])
    store = str(path / "store.jsonl")
    words = ["profile", trace, "--devices", "cpu,emu:a100", "--store", store, "-o", str(path / "d.costs")]
    assert 0 == _main(words)
    return path


def test_the_cpu_is_measured_and_the_emulated_gpu_modelled(folder: Path) -> None:
    """Each price says so."""
    costs = load(Costs, folder / "d.costs")

    assert {Source.MEASURED} == {row[0].source for row in costs.costs if row[0].us}
    assert Source.MEASURED not in {row[1].source for row in costs.costs}


def test_the_json_has_prices_totals_and_what_was_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every launch has us, source and rel_error on each device; sum, whole and scale stand beside them."""
    words = ("--devices", "cpu,emu:a100", "--store", folder / "store.jsonl", "-o", folder / "x.costs")
    found = answer("profile", folder / "d.trace", *words, capsys=capsys)
    keys = {"us", "source", "rel_error"}

    assert all(
        {"cpu", "emu:a100"} == row["costs"].keys() and all(keys <= c.keys() for c in row["costs"].values())
        for row in found["launches"]
    )
    assert {"cpu", "emu:a100"} == found["total_us"].keys()
    measured = found["measured"]["cpu"]
    assert 0 == measured["timed_now"], "all of it is in the store"
    assert measured["sum_us"] > 0
    assert measured["whole_us"] > 0
    assert found["total_us"]["cpu"] == pytest.approx(measured["sum_us"] * measured["scale"], rel=0.05)


def test_measured_costs_can_be_planned_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU beside an emulated GPU."""
    words = ("--costs", folder / "d.costs", "-o", folder / "d.plan")
    code, _, err = call("plan", folder / "d.trace", *words, capsys=capsys)

    assert 0 == code, err
    assert ("cpu", "emu:a100") == load(Plan, folder / "d.plan").cluster.names


def test_a_picture_compares_two_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A PNG of some size, named in the JSON."""
    pytest.importorskip("matplotlib")
    words = ("--devices", "emu:a100,emu:l40s", "--plot", folder / "r.png", "-o", folder / "r.costs")
    found = answer("profile", folder / "d.trace", *words, capsys=capsys)

    assert str(folder / "r.png") == found["plot"]
    assert b"\x89PNG" == (folder / "r.png").read_bytes()[:4]


@pytest.mark.parametrize(
    ("devices", "plot", "words"),
    [
        ("emu:a100", "r.png", "a plot compares two devices; 1 were named"),
        ("emu:a100,emu:l40s", "r.txt", "'r.txt' is no picture. End its name in .png"),
    ],
)
def test_what_cannot_be_drawn_gets_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], devices: str, plot: str, words: str
) -> None:
    """Too few devices, or no picture's name."""
    given = ("--devices", devices, "--plot", folder / plot, "-o", folder / "r.costs")
    code, _, err = call("profile", folder / "d.trace", *given, capsys=capsys)

    assert (2, True) == (code, words in err)


def test_without_matplotlib_the_line_that_installs_it_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ("--devices", "emu:a100,emu:l40s", "--plot", folder / "r.png", "-o", folder / "r.costs")
    code, _, err = call("profile", folder / "d.trace", *words, capsys=capsys)

    assert (2, True) == (code, 'pip install "tessera-gpu[report]"' in err)


def test_links_between_two_cpu_workers_are_measured_and_planned_with(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directions, kept where a plan finds them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tessera.cli.profile.SIZES", (4096, 1 << 18, 1 << 20))
    found = answer("profile", "--links", "--devices", "cpu,cpu", capsys=capsys)

    assert {("cpu", "cpu#1"), ("cpu#1", "cpu")} == {(x["src"], x["dst"]) for x in found["links"]}
    assert all(x["gbps"] > 0 and x["both_gbps"] > 0 and x["latency_us"] >= 0 for x in found["links"])
    costs = ("--devices", "cpu,cpu", "--store", folder / "store.jsonl", "-o", tmp_path / "d.costs")
    answer("profile", folder / "d.trace", *costs, capsys=capsys)
    words = ("--costs", tmp_path / "d.costs", "--link", "measured", "-o", tmp_path / "d.plan")
    code, _, err = call("plan", folder / "d.trace", *words, capsys=capsys)
    assert 0 == code, err
    assert {"measured"} == {x.name for x in load(Plan, tmp_path / "d.plan").cluster.links}


def test_an_emulated_gpu_has_no_link_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing joins what is not here."""
    code, _, err = call("profile", "--links", "--devices", "emu:a100,emu:l40s", capsys=capsys)

    assert (2, True) == (code, "stands for a GPU that is not here" in err)


def test_neither_trace_nor_links_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """There would be nothing to do."""
    code, _, err = call("profile", "--devices", "emu:a100", capsys=capsys)

    assert (2, True) == (code, "no trace was given" in err)


def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; a store that was asked for is missed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "d.trace" / "no"))
    monkeypatch.setattr("tessera.flow.make_timer", lambda *given: FakeTimer())
    words = ("profile", folder / "d.trace", "--devices", "cpu", "-o", folder / "y.costs")

    code, _, err = call(*words, capsys=capsys)
    assert 0 == code
    assert 1 == err.count("warning: ")
    assert "done without" in err
    code, _, err = call(*words, "--store", folder / "d.trace" / "s", capsys=capsys)
    assert 2 == code
    assert "cannot be" in err
