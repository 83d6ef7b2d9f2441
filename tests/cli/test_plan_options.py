"""What `tessera plan` can be asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import call
from sampling import one_of_each
from tessera.cli import main
from tessera.ir import Plan, load

COARSE = {
    "single",
    "data-parallel",
    "prefill-decode",
    "prefill-decode-fractional",
    "attention-ffn",
    "layer-pipeline",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefill and decode of a tiny model at two batches."""
    place = tmp_path_factory.mktemp("plan")
    for batch in ("1", "2"):
        sizes = ["--batch", batch, "--device", "fake"]
        prefill = ["--step", "prefill", "--context", "16", "--reserve", "4", *sizes]
        decode = ["--step", "decode", "--context", "20", *sizes]
        for name, words in (("prefill", prefill), ("decode", decode)):
            with pytest.raises(SystemExit):
                main(["capture", "tiny-llama", *words, "-o", str(place / f"{name}{batch}.trace")])
    return place


def planned(folder: Path, *words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON document of a plan of the tiny model."""
    traces = [folder / "prefill1.trace", folder / "decode1.trace"]
    devices = ["--devices", "emu:a100,emu:l40s"] if "--devices" not in words else []
    code, out, err = call("plan", *traces, *devices, *words, "--json", "-o", folder / "x.plan", capsys=capsys)
    assert 0 == code, err
    found: dict[str, Any] = json.loads(out)
    return found


LINKS = one_of_each(["pcie4", "pcie5", "nvlink", "ib100", "ib200", "ib400"], lambda link: link[:2])


@pytest.mark.parametrize("link", LINKS)
def test_contract_of_the_document(folder: Path, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The promised keys, and a throughput that no baseline exceeds, on every link."""
    found = planned(folder, "--link", link, "--objective", "throughput", capsys=capsys)

    assert {
        "throughput",
        "bound",
        "gap",
        "simulated",
        "microbatches",
        "lanes",
        "seconds",
        "baselines",
    } <= set(found)
    assert COARSE == set(found["baselines"])
    assert found["bound"] >= found["throughput"] >= found["simulated"]
    assert all(found["simulated"] >= x for x in found["baselines"].values() if x is not None)


def test_document_says_what_else_is_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Microbatches, lane table, range, rent and energy."""
    found = planned(folder, capsys=capsys)

    assert {"1", "2", "4", "8", "16", str(found["microbatches"])} == set(found["by_microbatches"])
    assert set(found["lane_table"]) == set(range(len(found["lanes"])))
    assert 0 <= found["rounding_loss"] < 0.2
    assert {"num_samples", "p10_per_s", "p50_per_s", "p90_per_s", "regret"} == set(found["robust"])
    assert found["usd_per_1k_units"] > 0
    assert found["joules_per_unit"] > 0
    assert found["max_microbatches"] > 4


def test_a_latency_plan_says_how_near_its_bound_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bound is no more than the plan's own latency, and the gap is the distance between them."""
    found = planned(folder, "--objective", "latency", capsys=capsys)
    near = found["latency_bound_us"] / found["latency_us"]

    assert 0.0 < near <= 1 + 1e-9
    assert found["latency_gap"] == pytest.approx(max(0.0, 1 - near))


def test_pins_and_prohibitions_are_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the plan that is written, not only in its figures."""
    words = ("--pin", "attention=emu:l40s", "--forbid", "lm_head=emu:l40s")
    found = planned(folder, *words, capsys=capsys)
    plan = load(Plan, folder / "x.plan")
    trace = plan.unit.graphs[1].trace
    placed = {
        (x.scope.split(".")[-1], lane.placement.devices[1][n])
        for lane in plan.lanes
        for n, x in enumerate(trace.launches)
    }

    assert ["--pin attention=emu:l40s", "--forbid lm_head=emu:l40s"] == found["constraints"]
    assert {1} == {d for name, d in placed if name == "self_attn"}
    assert {0} == {d for name, d in placed if name == "lm_head"}


def test_cost_objective_leaves_out_what_does_not_pay(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No coarse policy does the same work for less."""
    devices = ("--devices", "emu:a100,emu:l40s,emu:l4")
    found = planned(folder, "--objective", "cost", *devices, capsys=capsys)
    others = [x for x in found["baseline_usd_per_1k_units"].values() if x is not None]

    assert set(found["used"]) <= set(found["devices"])
    assert found["usd_per_1k_units"] <= min(others) * (1 + 1e-9)


def test_explanation_has_reasons_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory, what a move would cost, how far the bound is, what the costs' errors leave."""
    traces = [folder / "prefill1.trace", folder / "decode1.trace"]
    words = ("--devices", "emu:a100,emu:l40s", "--explain", "-o", folder / "y.plan")
    code, out, _ = call("plan", *traces, *words, capsys=capsys)
    flat = " ".join(out.split())

    assert 0 == code
    for part in ("bottleneck", "Memory (modelled", "it would take", "below the bound", "in 8 of 10"):
        assert part in flat


def test_explanation_is_for_machines_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the same reasons are a part of the document."""
    found = planned(folder, "--explain", capsys=capsys)["explain"]

    assert found["bottleneck"] in {u["name"] for u in (*found["devices"], *found["links"])}
    assert any("it would take" in note for note in found["notes"])
    assert {"emu:a100", "emu:l40s"} == {room["device"] for room in found["memory"]}


BAD: list[tuple[list[str], str]] = [
    (["--pin", "attention"], "'attention' is not PATTERN=DEVICE"),
    (["--pin", "nothing=emu:a100"], "no launch matches 'nothing'"),
    (["--pin", "mm=emu:h100"], "unknown device 'emu:h100'"),
    (["--pin", "mm=emu:a100", "--pin", "mlp=emu:l40s"], "contradicts --pin mm=emu:a100"),
    (["--link", "emu:a100-emu:h100=nvlink"], "is not a pair of devices"),
    (["--link", "emu:a100-emu:l40s=ib100", "--link", "emu:l40s>emu:a100=ib200"], "emu:a100' is given twice"),
    (["--memory", "emu:a100=1GB", "--memory", "emu:a100=2GB"], "--memory: 'emu:a100' is given twice. Leave"),
    (["--price", "a100=1", "--price", "a100=2"], "--price: 'a100' is given twice. Leave one of them."),
    (["--bus", "emu:a100"], "at least two devices"),
    (["--objective", "joy"], "--objective"),
    (["--random-weights"], "--random-weights: needs a model's name, not traces"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_mistakes_get_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the place and the remedy."""
    trace = folder / "decode1.trace"
    code, _, err = call("plan", trace, "--devices", "emu:a100,emu:l40s", *words, capsys=capsys)

    assert 2 == code
    assert message in err
    assert 1 == len(err.strip().splitlines())
