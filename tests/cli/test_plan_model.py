"""`tessera plan MODEL`: what a load is planned for."""

import json
from pathlib import Path

import pytest

from commands import call
from tessera.cli.plan_model import how_sure, verdict
from tessera.ir import Plan, ServicePlan, load
from tessera.plan import Comparison, Option

LOAD = ("--devices", "emu:h20,emu:l40s", "--prompt-tokens", "16", "--output-tokens", "4")
QUICK = ("--effort", "quick")


def test_a_model_by_name_is_planned_as_the_service_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The promised keys; the plan is written, is below no policy and is played with its own figures."""
    path = tmp_path / "x.plan"
    code, out, err = call("plan", "tiny-llama", *LOAD, *QUICK, "--json", "-o", path, capsys=capsys)

    assert 0 == code, err
    found, written = json.loads(out), load(ServicePlan, path)
    assert found["service"]["groups"]
    assert {"role", "devices", "sequences", "tokens", "microbatches"} == set(found["service"]["groups"][0])
    assert found["service"]["expected"]["tokens_per_s"] == found["tokens_per_s"]
    assert written.expected is not None
    assert {"weights", "state", "temporaries", "capacity"} == set(found["memory"]["emu:h20"])
    assert {"tokens_per_s", "batch", "tpot_ms", "microbatches"} < set(found["baselines"]["data-parallel"])
    assert found["ratio_to_data_parallel"] >= 0.99
    assert found["throughput"] <= 1.05 * found["bound"]

    code, out, err = call("simulate", path, "--seed", "1", "--json", capsys=capsys)
    assert 0 == code, err
    played = json.loads(out)
    assert 0.97 < played["ratio_to_plan"] < 1.03
    code, out, err = call(
        "simulate", path, "--arrivals", "poisson:20", "--requests", "40", "--json", capsys=capsys
    )
    assert 0 == code, err
    assert json.loads(out)["tpot_ms"] <= 1.05 * found["tpot_ms"]


def test_decodes_alone_are_planned_at_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No answers, no service: one step at its best batch, or at the one that is given."""
    words = ("--batch", "8", "--microbatches", "2", "--json", "-o", tmp_path / "x.plan")
    code, out, err = call("plan", "tiny-llama", *LOAD[:4], "--output-tokens", "0", *words, capsys=capsys)

    assert 0 == code, err
    found = json.loads(out)
    assert {8} == set(found["batches"].values()) == {load(Plan, tmp_path / "x.plan").batch}
    assert found["service"] is None
    assert found["ratio_to_best_baseline"] > 0.95
    assert found["throughput"] <= found["bound"] * (1 + 1e-6)


def test_a_batch_of_your_own_keeps_compiled_launches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are kept at two batches, from which every other is computed."""
    words = ("--batch", "128", "--microbatches", "2", "--json", "-o", tmp_path / "x.plan")
    code, out, err = call("plan", "llama-3-8b", *LOAD[:2], "--output-tokens", "0", *words, capsys=capsys)

    assert 0 == code, err
    assert "compiled" == json.loads(out)["launches"]


@pytest.mark.parametrize(
    "kind",
    [
        ("--output-tokens", "0", "--batch", "192"),
        pytest.param(("--output-tokens", "64"), marks=pytest.mark.slow),
    ],
)
def test_plans_take_the_share_of_memory_that_they_are_given(
    kind: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps and services; the rest of the memory is left free."""
    words = ("--memory-share", "0.01", "--prompt-tokens", "1024", *kind, "-o", tmp_path / "x.plan", "--json")
    code, out, err = call("plan", "tiny-llama", *LOAD[:2], *words, capsys=capsys)

    assert 0 == code, err
    for device in json.loads(out)["memory"].values():
        assert device["weights"] + device["state"] <= 0.01 * device["capacity"]


def test_a_model_without_text_is_planned_by_the_row_at_prices_of_your_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = ("--devices", "emu:h20,emu:l40s", "--price", "h20=1.25", "--price", "l40s=0.5")
    sizes = ("--output-tokens", "0", "--batch", "8", "--microbatches", "2")
    words = (*sizes, *QUICK, "-o", tmp_path / "x.plan", "--json")
    code, out, err = call("plan", "layers_model:step", *devices, *words, capsys=capsys)

    assert 0 == code, err
    assert any("a row of the batch counts as one token" in note for note in json.loads(out)["notes"])
    assert [1.25, 0.5] == [d.usd_per_hour for d in load(Plan, tmp_path / "x.plan").cluster.devices]


@pytest.mark.slow
def test_a_model_is_planned_by_the_dollar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No policy is cheaper."""
    devices = ("--devices", "emu:a100,emu:l40s", *LOAD[2:])
    words = ("--objective", "cost", *QUICK, "-o", tmp_path / "x.plan")
    code, out, err = call("plan", "tiny-llama", *devices, *words, "--json", capsys=capsys)

    assert 0 == code, err
    found = json.loads(out)
    least = min(x["usd_per_million_tokens"] for x in found["baselines"].values())
    assert "cost" == found["objective"]
    assert found["usd_per_million_tokens"] <= 1.01 * least


@pytest.mark.slow
def test_a_device_that_is_not_worth_its_rent_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One card at full load is cheapest by the token."""
    words = ("--objective", "cost", *QUICK, "-o", tmp_path / "x.plan", "--json", *LOAD[2:])
    code, out, err = call("plan", "tiny-llama", "--devices", "emu:h100,emu:l4", *words, capsys=capsys)
    assert 0 == code, err
    assert 1 == len(json.loads(out)["batches"])


def test_experts_are_divided_between_a_gpu_and_its_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a configuration only, larger than the card."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    often = {"model.layers.0.mlp.experts": [1, 1, 1, 1, 1, 1, 30, 30]}
    (tmp_path / "often.json").write_text(json.dumps(often))
    devices = ("--devices", "emu:rtx-4090,emu:cpu-xeon-8480", "--memory", "emu:rtx-4090=5.5MB")
    words = ("--random-weights", "--launches", "eager", *LOAD[2:], *QUICK, "--tpot-ms", "20")
    frequencies = ("--expert-frequencies", tmp_path / "often.json", "-o", tmp_path / "x.plan", "--json")
    code, out, err = call("plan", tmp_path, *devices, *words, *frequencies, capsys=capsys)

    assert 0 == code, err
    found = json.loads(out)
    assert found["baselines"]["fetch all that does not fit"]["tokens_per_s"] > 0
    experts = [numbers for scopes in found["experts"].values() for numbers in scopes.values()]
    assert set(range(8)) == {number for numbers in experts for number in numbers}
    for memory in found["memory"].values():
        used = memory["weights"] + memory["state"] + memory["temporaries"]
        assert used <= memory["capacity"]


def test_dense_weights_that_do_not_fit_are_fetched_where_that_is_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none if all fit."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 512, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    devices = ("--devices", "emu:rtx-4090,emu:cpu-xeon-8480", "--link", "pcie5")
    words = ("--random-weights", "--launches", "eager", *LOAD[2:], *QUICK)
    fetched, rates = [], []
    for memory in (("--memory", "emu:rtx-4090=5MB"), ()):
        given = (*devices, *memory, *words, "-o", tmp_path / "x.plan", "--json")
        code, out, err = call("plan", tmp_path, *given, capsys=capsys)
        assert 0 == code, err
        found = json.loads(out)
        fetched.append(found["fetched"])
        rates.append((found["tokens_per_s"], found["baselines"].get("fetch all that does not fit")))
        for used in found["memory"].values():
            assert used["weights"] + used["state"] + used["temporaries"] <= used["capacity"]
    assert len(fetched[0]["emu:rtx-4090"]) > 1
    assert {} == fetched[1]
    assert rates[0][0] >= rates[0][1]["tokens_per_s"] > 0
    assert rates[1][1] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny-llama", *LOAD, "--objective", "latency"), "--objective latency: needs traces"),
        (("tiny-llama", "--tpot-ms", "50"), "no devices were named"),
        (("tiny-llama", *LOAD, "--counts", "1,2"), "--counts: needs traces, not a model's name"),
        (("tiny-llama", *LOAD, "--tpot-ms", "nan"), "--tpot-ms: must be a finite number, got nan"),
        (("tiny-llama", *LOAD, "--ttft-ms", "-1"), "--ttft-ms: must be above 0, got -1"),
        (("tiny-llama", *LOAD, "--microbatches", "0"), "should be greater than or equal to 1"),
        (("tiny-llama", *LOAD, "--batch", "0"), "should be greater than or equal to 1"),
        (
            ("tiny-llama", *LOAD, "--batch", "8"),
            "--batch: sequences and microbatches of a service are chosen",
        ),
        (("tiny-llama", *LOAD, "--tpot-ms", "0.0001"), "no service keeps to the limits: the nearest takes"),
        (("tiny-llama", *LOAD, "--output-tokens", "5000"), "are beyond the 4096 positions of tiny-llama"),
        (("tiny-llama", *LOAD, "--price", "h20=free"), "--price: 'h20=free' is no price of a card"),
        (("tiny-llama", *LOAD, "--price", "h21=1"), "unknown GPU 'h21'"),
        (("layers_model:Layers", *LOAD), "layers_model:Layers: cannot be called with a step"),
        (("no-such-model", *LOAD), "unknown model 'no-such-model'"),
        (("/no/such/folder", *LOAD), "/no/such/folder: there is no such folder"),
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


def comparison(policy: str) -> Comparison:
    """Twice the rate of data-parallel, and hardly more than that of a coarse split; or that split."""
    batch = {"emu:a100": 8, "emu:l40s": 8}
    rates = {"data-parallel": 100.0, "attention-ffn": 200.0, "kernel-level": 201.0}
    listed = {name: Option(name, rate, 1.0, 1.0, batch, 2) for name, rate in rates.items()}
    return Comparison(policy, listed[policy], (listed["data-parallel"], listed["attention-ffn"]))


def test_a_gain_within_the_error_of_the_costs_is_said_to_be() -> None:
    """Each of the two that the plan is compared with."""
    said = how_sure(comparison("kernel-level"), 0.1)

    assert "2.01x data-parallel is beyond it" in said
    assert "attention-ffn is within it" in said


def test_a_policy_that_beats_a_finer_one_is_named() -> None:
    """Its rivals may be finer than the plan."""
    found = comparison("attention-ffn")
    (parallel, _) = found.baselines
    rivals = (parallel, Option("kernel-level", 199.0, 1.0, 1.0, parallel.batch, 2))

    said = verdict(Comparison("attention-ffn", found.chosen, rivals))
    assert said.startswith("attention-ffn is best here: 1.005x kernel-level, 2.000x data-parallel")


@pytest.mark.parametrize(
    ("planned", "best", "said"),
    [
        (
            "layer-pipeline",
            "data-parallel",
            "No gain: use data-parallel. layer-pipeline, which is planned, has 0.950x",
        ),
        ("data-parallel", "attention-ffn", "No gain: data-parallel is planned: 0.950x attention-ffn"),
        ("layer-pipeline", "kernel-level", "layer-pipeline is planned: 0.950x kernel-level"),
    ],
)
def test_a_plan_behind_another_policy_says_what_to_use(planned: str, best: str, said: str) -> None:
    """Unequal batches are not one plan; a division within the costs' error is not worth it."""
    batch = {"emu:a100": 8, "emu:l40s": 4}
    own, other = (Option(name, rate, 1.0, 1.0, batch, 2) for name, rate in ((planned, 95.0), (best, 100.0)))

    assert verdict(Comparison(planned, own, (other,))).startswith(said)


def test_data_parallel_is_not_compared_with_itself() -> None:
    """It is among the policies of every service, also of one that it is."""
    batch = {"emu:a100": 8, "emu:l40s": 4}
    rates = (("data-parallel", 99.0), ("layer-pipeline", 100.0))
    own, other = (Option(name, rate, 1.0, 1.0, batch, 2) for name, rate in rates)
    found = Comparison("data-parallel", own, (own, other))

    assert "No gain: data-parallel is planned: 0.990x layer-pipeline, each" in verdict(found)


def test_a_coarse_policy_that_is_best_is_no_gain() -> None:
    """But it may be one over data-parallel."""
    found = comparison("attention-ffn")

    assert verdict(found).startswith("No gain: attention-ffn is best here, 2.000x data-parallel")
    assert "attention-ffn" not in how_sure(found, 0.1)
