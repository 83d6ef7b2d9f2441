"""`tessera simulate --arrivals`: the contract of its JSON, and one line for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

import steps_factory as factory
from online_factory import alone_plan
from tessera.capture.models import positions_of
from tessera.cli import _main
from tessera.ir import Cluster, ServicePlan, load, save

LOG = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
NUM = 40
USUAL = ("--arrivals", "poisson:300", "--requests", str(NUM), "--lengths", "geometric:12,8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Service plans of two policies, one of steps, and logs."""
    path = tmp_path_factory.mktemp("online")
    planner = factory.prepared().planner
    assert planner is not None
    for policy in ("single", "data-parallel"):
        save(planner.best(policy), path / f"{policy}.plan")
    save(alone_plan(), path / "steps.plan")
    rows = (f"2023-11-16 18:15:{n // 20:02}.{n % 20 * 50_000:06},12,8\n" for n in range(NUM))
    (path / "azure.csv").write_text(LOG + "".join(rows))
    (path / "holes.csv").write_text(LOG + "2023-11-16 18:15:46.5,,20\n")
    return path


def cluster() -> Cluster:
    planner = factory.prepared().planner
    assert planner is not None
    return planner.cluster


def call(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = _main(["simulate", *(str(w) for w in words)])
    out, err = capsys.readouterr()
    return code, out, err


def answer(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON document of a command that succeeds."""
    code, out, err = call(*words, "--json", capsys=capsys)
    assert 0 == code, err
    return json.loads(out)


def test_a_monitor_chooses_on_a_recorded_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = (folder / "single.plan", folder / "data-parallel.plan")
    found = answer(*plans, "--arrivals", folder / "azure.csv", "--monitor", capsys=capsys)

    assert "simulated" == found["clock"]
    assert "single, data-parallel" == found["policy"]
    assert 0 == found["num_failed"]


def test_the_same_seed_prints_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, and another seed does not; noise is drawn from it too."""
    words = (folder / "single.plan", *USUAL, "--noise", "0.1", "--json")
    first, second = (call(*words, "--seed", "4", capsys=capsys)[1] for _ in range(2))

    assert first == second
    assert first != call(*words, "--seed", "5", capsys=capsys)[1]


def test_a_device_can_be_lost_and_another_slow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy on each of two devices: requests of a lost one restart on the other; a slow one takes longer."""
    plan, device = folder / "data-parallel.plan", cluster().names[1]
    usual = answer(plan, *USUAL, capsys=capsys)
    lost = answer(plan, *USUAL, "--lose", f"{device}@0.05", capsys=capsys)
    slow = answer(plan, *USUAL, "--slow", f"{device}@0.0x9", capsys=capsys)

    assert (0, 0) == (usual["num_failed"], usual["num_restarted"])
    assert 0 == lost["num_failed"]
    assert lost["num_restarted"] > 0
    assert usual["tpot_ms"] < slow["tpot_ms"]


def test_requests_that_nothing_can_serve_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device has the model and is lost; back again, it serves them."""
    plan = folder / "single.plan"
    (device,) = (cluster().names[d] for d in load(ServicePlan, plan).groups[0].plan.used)
    lost = answer(plan, *USUAL, "--lose", f"{device}@0.05", capsys=capsys)
    back = answer(plan, *USUAL, "--lose", f"{device}@0.05-0.2", capsys=capsys)

    assert 0 < lost["num_failed"] < NUM
    assert 0 == back["num_failed"]
    assert back["num_restarted"] > 0


MISTAKES = [
    (["--arrivals", "{holes.csv}"], "holes.csv:2: a hole in the log: there is nothing under 'ContextTokens'"),
    (["--arrivals", "posson:3"], "unknown kind of arrivals 'posson'"),
    (["--arrivals", "poisson:5", "--lose", "d9@1"], "unknown device 'd9'; known: "),
    (["--arrivals", "poisson:5", "--lose", "d1"], "Write DEVICE@SECONDS"),
    (["--arrivals", "poisson:5", "--lose", "d1@9-3"], "Write DEVICE@SECONDS-SECONDS"),
    (["--arrivals", "poisson:5", "--slow", "d1@1"], "Write DEVICE@SECONDSxFACTOR"),
    (["--arrivals", "poisson:5", "--slow", "d1@1x0"], "must be above zero"),
    (["--arrivals", "poisson:5", "--noise", "7"], "0.99"),
    (["--arrivals", "poisson:5", "--trace", "x.json"], "--trace: a service plan makes no timeline"),
    (["-o", "x.timeline"], "--output: a service plan makes no timeline"),
    (["--arrivals", "poisson:5", "--monitor"], "a monitor chooses between two service plans"),
    (["--monitor"], "--monitor: needs --arrivals"),
    (["--requests", "0", "--arrivals", "poisson:5"], "should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Place, what is wrong, and mostly what to do; exit code 2."""
    given = [str(folder / w[1:-1]) if w.startswith("{") else w for w in words]
    code, _, err = call(folder / "single.plan", *given, capsys=capsys)

    assert 2 == code
    assert message in err
    assert 1 == err.strip().count("\n") + 1


@pytest.mark.parametrize(("rate", "is_reached"), [("1", True), ("1e6", False)])
def test_a_rate_that_is_not_reached_is_said(
    folder: Path, rate: str, is_reached: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    err = call(
        folder / "single.plan", "--arrivals", f"poisson:{rate}", "--requests", str(NUM), capsys=capsys
    )[2]

    assert is_reached != ("tokens/s are asked for and the plan gives" in err)


def test_a_plan_of_steps_has_no_arrivals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(folder / "steps.plan", *USUAL, capsys=capsys)

    assert (2, True) == (code, "--arrivals: requests over time need a service plan" in err)
    assert "no.plan: cannot read" in call(folder / "no.plan", *USUAL, capsys=capsys)[2]


@pytest.mark.parametrize("per_place", [2, 6])
def test_a_rate_without_filling_and_emptying_is_the_plans(
    folder: Path, per_place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few requests per place the rate to the last end is below it."""
    plan = folder / "data-parallel.plan"
    full = answer(plan, capsys=capsys)
    num = per_place * full["requests_at_once"]
    found = answer(plan, "--arrivals", f"batch:{num}", capsys=capsys)

    assert full["steady_tokens_per_s"] is None
    assert found["tokens_per_s"] < found["steady_tokens_per_s"]
    assert found["steady_tokens_per_s"] == pytest.approx(full["tokens_per_s"], rel=0.15)


def test_one_request_has_no_steady_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        answer(folder / "single.plan", "--arrivals", "batch:1", capsys=capsys)["steady_tokens_per_s"] is None
    )


@pytest.mark.parametrize("is_beyond", [False, True])
def test_requests_beyond_the_positions_of_the_model_are_told(
    folder: Path, is_beyond: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    most = positions_of(load(ServicePlan, folder / "single.plan").model)
    assert most is not None
    words = ("--arrivals", "batch:2", "--lengths", f"fixed:{most - 2 + is_beyond},2")
    err = call(folder / "single.plan", *words, capsys=capsys)[2]

    assert is_beyond == (f"2 requests are beyond the {most:,} positions of the model" in err)


@pytest.mark.parametrize(("prompt", "is_cut"), [(16, False), (1_000_000, True)])
def test_requests_longer_than_their_pages_are_said_to_be_cut(
    folder: Path, prompt: int, is_cut: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--lengths", f"fixed:{prompt},2")
    err = call(folder / "single.plan", "--arrivals", "poisson:1", "--requests", "2", *lengths, capsys=capsys)[
        2
    ]

    assert is_cut == ("2 requests are cut to the" in err)
