"""tessera plan --batch-choices with lanes of unlike batches, then simulate, run and report."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import call
from tessera.capture import build as build_workload
from tessera.capture import record
from tessera.cli import _main
from tessera.flow import make_unit, price
from tessera.ir import Cluster, Plan, Step, Trace, load, save
from tessera.plan.problem import build
from tessera.profile import parse_devices, wire

# One request of the large batch takes more than two of the small one.
MICROBATCHES, BATCHES = 3, (2, 8)
SMALL, LARGE = BATCHES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decode of the tiny Llama at two batches, priced for two devices; the second holds the small one."""
    place = tmp_path_factory.mktemp("batches")
    base = wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"], [])
    traces = {batch: record(build_workload(Step("tiny-llama", "decode", batch, 20))) for batch in BATCHES}
    devices = (base.devices[0], replace(base.devices[1], memory_bytes=_needed(traces[SMALL], base)))
    for batch, trace in traces.items():
        unit = make_unit([trace])
        save(trace, place / f"{batch}.trace")
        save(price(unit, Cluster(devices, base.links))[0], place / f"{batch}.costs")
    return place


def _needed(trace: Trace, cluster: Cluster) -> int:
    """Bytes that the whole model and two microbatches of a batch take, and a few more."""
    unit = make_unit([trace])
    problem = build(unit, price(unit, cluster), cluster)
    weights, microbatch = problem.footprint([problem.column(np.zeros(problem.num_nodes, dtype=np.int64))])
    return int(weights[0] + 2.2 * microbatch[0])


def planned(folder: Path, word: str) -> str:
    """What `tessera plan` prints about data-parallel with batches to choose from."""
    files = [folder / f"{batch}.trace" for batch in BATCHES]
    costs = [word for batch in BATCHES for word in ("--costs", folder / f"{batch}.costs")]
    options = ("--batch-choices", "--policy", "data-parallel", "--microbatches", MICROBATCHES)
    words = ("plan", *files, *costs, *options, "-o", folder / "x.plan", word)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert 0 == _main([str(x) for x in words])
    return out.getvalue()


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    """The JSON document of the plan."""
    found: dict[str, Any] = json.loads(planned(folder, "--json"))
    return found


def test_document_shows_every_lane_s_batch(folder: Path, document: dict[str, Any]) -> None:
    """The large batch on the large device, the small one on the small, and more rows than with one batch."""
    lanes = {lane["batch"]: lane for lane in document["lanes"]}
    plan = load(Plan, folder / "x.plan")

    assert set(BATCHES) == set(lanes)
    assert 0 == lanes[LARGE]["launches"]["emu:l40s"] == lanes[SMALL]["launches"]["emu:a100"]
    assert sum(lane["share"] for lane in lanes.values()) == pytest.approx(1.0)
    assert document["gain_over_one_batch"] > 1.2
    assert document["rows_per_s"] == pytest.approx(document["batch"] * document["simulated"])
    assert document["rows_per_s"] > max(line["rows_per_s"] for line in document["by_batch"])
    assert set(BATCHES) == {plan.batch_of(lane) for lane in plan.lanes}


def test_tables_name_the_batches(folder: Path) -> None:
    """With the gain over one batch, and with --explain the rest."""
    flat = " ".join(planned(folder, "--explain").split())

    for part in ("Lanes (modelled)", "Each batch alone (simulated)", "gain over one batch", "Memory"):
        assert part in flat


def test_the_plan_is_simulated(
    folder: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same work units, with a page that names the batches."""
    options = ("--requests", 200, "--page", folder / "x.html", "-o", folder / "x.timeline", "--json")
    code, out, err = call("simulate", folder / "x.plan", *options, capsys=capsys)

    assert 0 == code, err
    assert json.loads(out)["throughput"] == pytest.approx(document["simulated"], rel=0.03)
    assert "batch 2" in (folder / "x.html").read_text()


def test_the_plan_is_run(folder: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """On worker processes, every request bit for bit as the model itself at its lane's batch."""
    code, out, err = call("run", folder / "x.plan", "--requests", 6, "--verify", "--json", capsys=capsys)

    assert 0 == code, err
    found = json.loads(out)
    assert found["verified"] is True
    assert all(num > 0 for num in found["lanes"])
    assert [lane["batch"] for lane in document["lanes"]] == found["batches"]


def test_arrivals_are_refused(
    folder: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the remedy."""
    code, _, err = call("simulate", folder / "x.plan", "--arrivals", "poisson:5", capsys=capsys)

    assert 0 != code
    assert "a simulation of arrivals takes one batch" in " ".join(err.split())


def test_unlike_contexts_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same kinds of step are not the same steps."""
    save(record(build_workload(Step("tiny-llama", "decode", 3, 24))), folder / "other.trace")
    words = ("--devices", "emu:a100", "--batch-choices")
    code, _, err = call("plan", folder / "2.trace", folder / "other.trace", *words, capsys=capsys)

    assert 0 != code
    assert "context 20" in " ".join(err.split())
    assert "context 24" in " ".join(err.split())
