"""Tables of devices and policies."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from report_factory import make_cluster, make_plan, make_timeline
from tessera.cli.plan import pictures
from tessera.ir import Baseline, Clock, Objective, Plan, verify
from tessera.report import PolicyLine, UsedDevice, compared, device_uses


def line_of(plan: Plan, word: str) -> PolicyLine:
    """The first policy with a word in its name."""
    return next(line for line in compared(plan) if word in line.policy)


def use_of(uses: tuple[UsedDevice, ...], name: str) -> UsedDevice:
    return next(use for use in uses if use.device == name)


def text_of(plan: Plan) -> str:
    """What a plain, wide terminal shows."""
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(*pictures(plan)[1:])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_factory_keeps_the_rules() -> None:
    """The records these tests are made of are valid."""
    plan = make_plan()
    timeline = make_timeline(plan)

    verify(plan)
    verify(timeline)

    assert {span.track for span in timeline.spans} >= set(plan.cluster.names)


def test_utilisation_is_of_the_run() -> None:
    """Busy time over the length of the run."""
    plan = make_plan()
    timeline = make_timeline(plan, clock=Clock.MEASURED)
    expected = timeline.busy_us()["emu:a100"] / timeline.makespan_us

    assert pytest.approx(expected) == use_of(device_uses(plan, timeline), "emu:a100").utilisation


def test_utilisation_without_a_run_is_modelled() -> None:
    """Without a timeline the rates and costs of the plan say how busy a device is."""
    assert "modelled" in text_of(make_plan())
    assert pytest.approx(1.0, abs=0.01) == use_of(device_uses(make_plan()), "emu:l40s").utilisation


def test_devices_count_launches_and_weights() -> None:
    """Launches are those of an average work unit; a weight that two steps or lanes read counts once."""
    slow, fast = (use_of(device_uses(make_plan()), name) for name in ("emu:l40s", "emu:a100"))

    assert (912, 42) == (round(slow.launches), round(100 * slow.share))
    assert (38_000_000, 66_000_000) == (slow.weight_bytes, fast.weight_bytes)


def test_comparison_is_marked_as_modelled_and_relative_to_the_best_baseline() -> None:
    """The plan's ratio is to the best baseline, whose own is one."""
    plan = make_plan()

    assert "modelled" in text_of(plan)
    assert pytest.approx(1.14, abs=0.005) == line_of(plan, "this plan").ratio_to_best_baseline
    assert pytest.approx(1.0) == line_of(plan, "best baseline)").ratio_to_best_baseline
    assert "data-parallel" in line_of(plan, "best baseline)").policy
    assert line_of(plan, "layer pipeline").requests_per_s is None


def test_comparison_of_a_latency_plan_is_by_latency() -> None:
    """For latency the best baseline is the quickest, and slower plans are below one."""
    plan = make_plan(objective=Objective.LATENCY)

    assert "best single GPU" in line_of(plan, "best baseline)").policy
    assert pytest.approx(0.88, abs=0.005) == line_of(plan, "this plan").ratio_to_best_baseline


def test_baselines_that_do_not_apply_are_none_the_best() -> None:
    absent = replace(make_plan(), baselines=(Baseline("layer pipeline", None, None),))

    assert not any("best baseline" in line.policy for line in compared(absent))


def test_comparison_is_between_simulated_figures() -> None:
    """The ratio is of two simulated rates; the rate by busy time stands apart and has none."""
    plan = make_plan(throughput_per_s=45.0)

    assert "simulated" in line_of(plan, "this plan").how
    assert pytest.approx(0.97, abs=0.005) == line_of(plan, "this plan").ratio_to_best_baseline
    assert line_of(plan, "the same").ratio_to_best_baseline is None


def test_names_are_not_markup() -> None:
    """A device named like console markup is shown as it is named."""
    plan = make_plan(cluster=make_cluster(("[red]a", "[/b]")), best_baseline="[bold]x")

    assert all(name in text_of(plan) for name in ("[red]a", "[/b]", "[bold]x"))
