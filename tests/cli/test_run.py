"""`tessera run`: what it prints, the trace it writes, and how it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import _main
from tessera.cli.run import overlap
from tessera.ir import Clock, Plan, Span, Timeline, load, save

DEVICES = "emu:a100,emu:l40s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One plan that divides every layer and one that does not."""
    path = tmp_path_factory.mktemp("run")
    trace = str(path / "x.trace")
    assert 0 == _main(["capture", "tiny-llama", "--batch", "1", "--context", "16", "-o", trace])
    for policy in ("attention-ffn", "data-parallel"):
        words = ["plan", trace, "--devices", DEVICES, "--policy", policy, "-o", str(path / f"{policy}.plan")]
        assert 0 == _main(words)
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    """The JSON document of a run that succeeds."""
    capsys.readouterr()
    assert 0 == _main(["run", *(str(w) for w in words), "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_run_reports_every_request_and_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verified, none lost, the share of hidden transfers, and each device with its memory and share."""
    trace = folder / "both.json"
    found = answer(capsys, folder / "attention-ffn.plan", "--verify", "--requests", "6", "--trace", trace)
    rows = found["per_device"]

    assert (True, 6, 0, 0) == (found["verified"], found["requests"], found["lost"], found["restarted"])
    assert 0 <= found["overlap"] <= 1
    assert ["emu:a100", "emu:l40s"] == [row["device"] for row in rows]
    assert all(row["peak_bytes"] > 0 for row in rows)
    assert 1 == pytest.approx(sum(row["share"] for row in rows))
    assert 1 == pytest.approx(sum(row["predicted_share"] for row in rows))
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"devices (measured)", "links (measured)", "devices (simulated)", "links (simulated)"} <= names
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown = {processes[e["pid"]] for e in events if e["ph"] == "X"}
    assert {"devices (measured)", "devices (simulated)"} <= shown


def test_several_plans_are_policies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests are spread over the plans by switching, and all are right."""
    plans = (folder / "attention-ffn.plan", folder / "data-parallel.plan")
    found = answer(capsys, *plans, "--verify", "--requests", "12", "--switch-every", "3", "--plain")

    assert found["verified"] is True
    assert 12 == sum(found["policies"].values())
    assert all(found["policies"].values())


def test_a_device_that_is_too_small_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the device, the excess and what to lower."""
    plan = load(Plan, folder / "attention-ffn.plan")
    devices = tuple(dataclasses.replace(d, memory_bytes=1 << 20) for d in plan.cluster.devices)
    small = dataclasses.replace(
        plan,
        cluster=dataclasses.replace(plan.cluster, devices=devices),
        costs=tuple(dataclasses.replace(c, devices=devices) for c in plan.costs),
    )
    save(small, folder / "small.plan")
    capsys.readouterr()

    assert 2 == _main(["run", str(folder / "small.plan")])
    assert "device emu:a100:" in (said := capsys.readouterr().err)
    assert "more than its 1.05 MB" in said


def span(track: str, start: float, stop: float, is_transfer: bool = False) -> Span:
    """A span of request 0."""
    return Span(track, "x", 0, 0, start, stop, is_transfer)


def test_a_transfer_is_hidden_while_its_destination_computes() -> None:
    """Half of the transfer lies under a launch of the receiver; launches of the sender do not count."""
    spans = (span("a", 0, 100), span("b", 0, 20), span("a -> b", 10, 30, True), span("b", 15, 18))

    assert 0.5 == overlap(Timeline(Clock.MEASURED, spans, ()))


def test_without_transfers_nothing_is_left_unhidden() -> None:
    """The figure of a plan that keeps every request on one device."""
    assert 1.0 == overlap(Timeline(Clock.MEASURED, (span("a", 0, 1),), ()))
