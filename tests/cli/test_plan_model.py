"""`tessera plan MODEL`: what a load is planned for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commands import call
from report_factory import make_plan
from tessera.cli.plan_load import how_sure, verdict
from tessera.ir import Plan, load
from tessera.plan import LoadPlan, Option

LOAD = ("--devices", "emu:h20,emu:l40s", "--prompt-tokens", "16", "--output-tokens", "4")


def test_a_model_by_name_is_planned_with_what_it_is_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The promised keys; the plan is written, and below no policy."""
    path = tmp_path / "x.plan"
    words = ("--batch", "8", "--microbatches", "2", "--json", "-o", path)
    code, out, err = call("plan", "tiny-llama", *LOAD, *words, capsys=capsys)

    assert 0 == code, err
    found = json.loads(out)
    assert (8, 8) == (found["batch"], load(Plan, path).batch)
    assert 0 < found["microbatches"] <= 2
    assert {"weights", "state", "temporaries", "capacity"} == set(found["memory"]["emu:h20"])
    assert {"tokens_per_s", "batch", "prefill_batch", "tpot_ms", "microbatches"} < set(
        found["baselines"]["data-parallel"]
    )
    best = max(x["tokens_per_s"] for x in found["baselines"].values())
    assert found["ratio_to_best_baseline"] == pytest.approx(found["tokens_per_s"] / best)
    assert found["ratio_to_best_baseline"] >= 1.0
    assert found["policy"] in {"throughput", *found["baselines"]}
    assert found["frontier"]


def test_a_model_is_planned_by_the_dollar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio is one of prices, and no policy is cheaper."""
    devices = ("--devices", "emu:a100,emu:l40s", *LOAD[2:])
    words = ("--batch", "8", "--microbatches", "2", "--objective", "cost", "-o", tmp_path / "x.plan")
    code, out, err = call("plan", "tiny-llama", *devices, *words, "--json", capsys=capsys)

    assert 0 == code, err
    found = json.loads(out)
    least = min(x["usd_per_million_tokens"] for x in found["baselines"].values())
    assert "cost" == found["objective"]
    assert found["ratio_to_best_baseline"] == pytest.approx(least / found["usd_per_million_tokens"])
    assert found["ratio_to_best_baseline"] >= 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny-llama", *LOAD, "--objective", "latency"), "--objective latency: needs traces"),
        (("tiny-llama", "--tpot-ms", "50"), "no devices were named"),
        (("tiny-llama", *LOAD, "--counts", "1,2"), "--counts: needs traces, not a model's name"),
        (("tiny-llama", *LOAD, "--tpot-ms", "nan"), "--tpot-ms: nan ms is no limit"),
        (("tiny-llama", *LOAD, "--ttft-ms", "-1"), "--ttft-ms: -1.0 ms is no limit"),
        (("tiny-llama", *LOAD, "--microbatches", "0"), "should be greater than or equal to 1"),
        (("tiny-llama", *LOAD, "--batch", "0"), "should be greater than or equal to 1"),
        (("no-such-model", *LOAD), "no-such-model"),
        (("missing.trace", "--devices", "emu:h20,emu:l40s"), "missing.trace"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 and no traceback."""
    code, _, err = call("plan", *words, capsys=capsys)

    assert 2 == code
    assert message in err
    assert "Traceback" not in err


def load_plan(policy: str) -> LoadPlan:
    """Twice the rate of data-parallel, and hardly more than that of a coarse split; or that split."""
    batch = {"emu:a100": 8, "emu:l40s": 8}
    rates = {"data-parallel": 100.0, "attention-ffn": 200.0, "plan": 201.0}
    listed = {name: Option(name, rate, 1.0, 1.0, batch, 2) for name, rate in rates.items()}
    baselines = (listed["data-parallel"], listed["attention-ffn"])
    chosen = listed[policy]
    plan = replace(make_plan(), policy="throughput" if policy == "plan" else policy)
    return LoadPlan(plan.policy, chosen, baselines, plan=plan, options=tuple(listed.values()))


def test_a_gain_within_the_error_of_the_costs_is_said_to_be() -> None:
    """Of each of the two that the plan is compared with."""
    said = how_sure(load_plan("plan"), 0.1)

    assert "2.01x data-parallel is beyond it" in said
    assert "attention-ffn is within it" in said


def test_a_coarse_policy_that_is_best_is_no_gain() -> None:
    """But it may be one over data-parallel."""
    found = load_plan("attention-ffn")

    assert verdict(found).startswith("No gain: attention-ffn is best here, 2.000x data-parallel")
    assert "attention-ffn" not in how_sure(found, 0.1)
