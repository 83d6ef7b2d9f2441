"""`tessera plan MODEL`: what a load is planned for."""

import json
from pathlib import Path

import pytest

from commands import call
from tessera.ir import Plan, load

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
    assert {"tokens_per_s", "batch", "prefill_batch", "tpot_ms", "microbatches"} == set(
        found["baselines"]["data-parallel"]
    )
    best = max(x["tokens_per_s"] for x in found["baselines"].values())
    assert found["ratio_to_best_baseline"] == pytest.approx(found["tokens_per_s"] / best)
    assert found["ratio_to_best_baseline"] >= 1.0
    assert found["policy"] in {"throughput", *found["baselines"]}
    assert found["frontier"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny-llama", "--tpot-ms", "50"), "no devices were named"),
        (("tiny-llama", *LOAD, "--counts", "1,2"), "--counts needs traces, not a model's name"),
        (("tiny-llama", *LOAD, "--tpot-ms", "nan"), "--tpot-ms: nan ms is no limit"),
        (("tiny-llama", *LOAD, "--ttft-ms", "-1"), "--ttft-ms: -1.0 ms is no limit"),
        (("tiny-llama", *LOAD, "--slots", "0"), "--slots: 0 is too few"),
        (("tiny-llama", *LOAD, "--batch", "0"), "--batch: 0 is too few"),
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
