"""`tessera simulate --arrivals`: the contract of its JSON, and one line for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from online_factory import alone_plan, split_plan
from tessera.adapt.drift import Factors
from tessera.adapt.replan import Replanner
from tessera.cli import _main
from tessera.cli.online import with_other
from tessera.errors import PlanInfeasible
from tessera.flow import replan
from tessera.ir import Objective, save
from tessera.plan import QUICK

LOG = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
USUAL = ("--seqs", "2", "--lengths", "geometric:1,20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans for the same work, and a log that goes from quiet to busy and back."""
    path = tmp_path_factory.mktemp("online")
    save(alone_plan(), path / "latency.plan")
    save(split_plan(), path / "throughput.plan")
    gaps = [4000] * 100 + [300] * 1200 + [4000] * 100
    time, rows = 0, []
    for gap in gaps:
        time += gap
        rows.append(f"2023-11-16 18:15:{time // 1_000_000:02}.{time % 1_000_000:06},1,20\n")
    (path / "azure.csv").write_text(LOG + "".join(rows))
    (path / "holes.csv").write_text(LOG + "2023-11-16 18:15:46.5,,20\n")
    return path


def call(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = _main(["simulate", *(str(w) for w in words), "--effort", "quick"])
    out, err = capsys.readouterr()
    return code, out, err


def answer(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON document of a command that succeeds."""
    code, out, err = call(*words, "--json", capsys=capsys)
    assert 0 == code, err
    return json.loads(out)


@pytest.mark.slow
def test_a_monitor_switches_on_a_recorded_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quiet, busy, quiet: switches happen, and the result is as good as the better fixed policy's."""
    plans = (folder / "latency.plan", folder / "throughput.plan")
    found = answer(*plans, "--arrivals", folder / "azure.csv", "--seqs", "2", "--monitor", capsys=capsys)

    assert "simulated" == found["clock"]
    assert {"latency", "throughput"} == set(found["policies"])
    assert found["switches"] >= 2
    assert found["switches"] == found["decisions"]["switch"]
    assert found["ratio_to_better_fixed"] <= 1.05
    assert 1400 == found["adaptive"]["num_finished"]


def test_the_document_has_what_was_promised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Throughput, times, attainment, utilisation; and null where a price or a power is not known."""
    words = ("--arrivals", "poisson:1000", "--requests", "50", *USUAL, "--slo", "ttft=1ms,tpot=100us")
    found = answer(folder / "latency.plan", *words, capsys=capsys)["policies"]["latency"]

    assert {"mean", "p50", "p90", "p99"} == set(found["ttft_s"]) == set(found["normalised_s"])
    assert 0.0 <= found["slo_attainment"] <= 1.0
    assert {"d0", "d1", "d0 -> d1", "d1 -> d0"} == set(found["utilisation"])
    assert found["tokens_per_s"] > found["requests_per_s"] > 0.0
    assert found["usd_per_million_tokens"] is None
    assert found["joules_per_token"] is None


def test_the_same_seed_prints_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, and another seed does not."""
    words = (
        folder / "latency.plan",
        "--arrivals",
        "bursty:9000",
        "--requests",
        "80",
        *USUAL,
        "--jitter",
        "0.1",
    )
    first, second = (call(*words, "--json", "--seed", "4", capsys=capsys)[1] for _ in range(2))

    assert first == second
    assert first != call(*words, "--json", "--seed", "5", capsys=capsys)[1]


def test_people_get_a_table_and_the_reasons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated is said, and a load past saturation is called so."""
    words = ("--arrivals", "poisson:9000", "--requests", "300", *USUAL)
    code, out, _ = call(folder / "latency.plan", *words, capsys=capsys)

    assert 0 == code
    assert "(simulated)" in out
    assert "past saturation" in out


def test_a_device_can_be_lost_and_another_slow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fails without a monitor is counted; a slow device makes requests wait longer."""
    words = (folder / "throughput.plan", "--arrivals", "poisson:1000", "--requests", "100", *USUAL)
    usual, lost, slow = (
        answer(*words, *more, capsys=capsys)["policies"]["throughput"]
        for more in ((), ("--lose", "d1@0.05"), ("--slow", "d0@0.0x3"))
    )

    assert 100 == usual["num_finished"] == slow["num_finished"]
    assert lost["num_failed"] == 100 - lost["num_finished"] > 0
    assert slow["normalised_s"]["mean"] > 1.5 * usual["normalised_s"]["mean"]


def test_the_other_policy_is_made_where_one_plan_is_given() -> None:
    """A throughput plan gets a latency plan for the same work, costs and devices, or the other way round."""
    for given, other in ((split_plan(), Objective.LATENCY), (alone_plan(), Objective.THROUGHPUT)):
        first, (name, made) = with_other([(given.policy, given)], QUICK)

        assert given is first[1]
        assert (other.value, other) == (name, made.objective)
        assert (given.unit, given.costs, given.cluster) == (made.unit, made.costs, made.cluster)


def test_new_plans_have_corrected_costs_and_leave_out_what_is_lost() -> None:
    """Corrections of two replans add up, and a plan without d0 runs everything on d1."""
    kernel = split_plan().unit.graphs[0].trace.kernels[0].name
    planner = Replanner(replan, lambda old, new: 1.0, lambda plans: ())
    plans = planner.corrected((split_plan(),), Factors({("d1", kernel): 2.0}))
    plans = planner.corrected(plans, Factors({("d1", kernel): 1.5}))
    (made,) = planner.without(plans, {"d0"})

    assert "throughput" == made.policy
    assert ("d0", "d1") == made.cluster.names
    assert {1} == {device for lane in made.lanes for step in lane.placement.devices for device in step}
    assert [(10.0, 30.0)] * 4 == [tuple(cost.us for cost in row) for row in made.costs[0].costs]


def test_no_plan_can_do_without_all_devices() -> None:
    """A replan with nothing left to run on says so."""
    with pytest.raises(PlanInfeasible, match="no device is left"):
        Replanner(replan, lambda old, new: 1.0, lambda plans: ()).without((split_plan(),), {"d0", "d1"})


MISTAKES = [
    (["--arrivals", "{holes.csv}"], "holes.csv:2: a hole in the log: there is nothing under 'ContextTokens'"),
    (["--arrivals", "posson:3"], "unknown kind of arrivals 'posson'"),
    (["--arrivals", "poisson:5", "--slo", "ttft=1us"], "ttft of 0.001 ms cannot be met"),
    (["--arrivals", "poisson:5", "--slo", "ttft=soon"], "'soon' is not a time"),
    (["--arrivals", "poisson:5", "--slo", "speed=1s"], "unknown limit 'speed'"),
    (["--arrivals", "poisson:5", "--lose", "d9@1"], "the plan has no device 'd9'"),
    (["--arrivals", "poisson:5", "--lose", "d1"], "Write DEVICE@SECONDS"),
    (["--arrivals", "poisson:5", "--lose", "d1@9-3"], "Write DEVICE@SECONDS-SECONDS"),
    (["--arrivals", "poisson:5", "--slow", "d1@1"], "Write DEVICE@SECONDSxFACTOR"),
    (["--arrivals", "poisson:5", "--noise", "7"], "should be less than or equal to 0.99"),
    (["--arrivals", "poisson:5", "--seqs", "0"], "should be greater than or equal to 1"),
    (["--arrivals", "poisson:5", "--trace", "x.json"], "--trace: makes no timeline with --arrivals"),
    (["--monitor"], "--monitor: needs --arrivals"),
    (["--requests", "0", "--arrivals", "poisson:5"], "should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Place, what is wrong, and mostly what to do; exit code 2."""
    given = [str(folder / w[1:-1]) if w.startswith("{") else w for w in words]
    code, _, err = call(folder / "latency.plan", *given, capsys=capsys)

    assert 2 == code
    assert message in err
    assert 1 == err.strip().count("\n") + 1
