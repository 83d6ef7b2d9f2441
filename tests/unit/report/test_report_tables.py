"""Tables for the terminal."""

from rich.console import Console, RenderableType

from report_factory import make_cluster, make_plan, make_timeline
from tessera.ir import Clock, Objective, verify
from tessera.report import comparison_table, devices_table


def text_of(shown: RenderableType) -> str:
    """What a plain, wide terminal shows."""
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def line_of(shown: RenderableType, word: str) -> str:
    """The first line with a word."""
    return next(line for line in text_of(shown).splitlines() if word in line)


def test_the_factory_keeps_the_rules() -> None:
    """The records these tests are made of are valid."""
    plan = make_plan()
    timeline = make_timeline(plan)

    verify(plan)
    verify(timeline)

    assert {span.track for span in timeline.spans} >= set(plan.cluster.names)


def test_devices_table_shows_utilisation_of_the_run() -> None:
    """Utilisation is busy time over the length of the run, and the title says whose clock it is."""
    plan = make_plan()
    timeline = make_timeline(plan, clock=Clock.MEASURED)
    expected = f"{100 * timeline.busy_us()['emu:a100'] / timeline.makespan_us:.0f} %"

    assert expected in line_of(devices_table(plan, timeline), "emu:a100")
    assert "measured" in text_of(devices_table(plan, timeline))


def test_devices_table_without_a_run_is_modelled() -> None:
    """Without a timeline the rates and costs of the plan say how busy a device is."""
    table = devices_table(make_plan())

    assert "modelled" in text_of(table)
    assert "100 %" in line_of(table, "emu:l40s")


def test_devices_table_counts_launches_and_weights() -> None:
    """Launches are those of an average work unit; a weight that two steps or lanes read counts once."""
    assert "912 (42 %)" in line_of(devices_table(make_plan()), "emu:l40s")
    assert "38.0 MB" in line_of(devices_table(make_plan()), "emu:l40s")
    assert "66.0 MB" in line_of(devices_table(make_plan()), "emu:a100")


def test_comparison_is_marked_as_modelled_and_relative_to_the_best_baseline() -> None:
    """The plan's ratio is to the best baseline, whose own is one."""
    table = comparison_table(make_plan())

    assert "modelled" in text_of(table)
    assert "1.14x" in line_of(table, "this plan")
    assert "1.00x" in line_of(table, "best baseline)")
    assert "data-parallel" in line_of(table, "best baseline)")
    assert "n/a" in line_of(table, "layer pipeline")


def test_comparison_of_a_latency_plan_is_by_latency() -> None:
    """For latency the best baseline is the quickest, and slower plans are below one."""
    table = comparison_table(make_plan(objective=Objective.LATENCY))

    assert "best single GPU" in line_of(table, "best baseline)")
    assert "0.88x" in line_of(table, "this plan")


def test_comparison_is_between_simulated_figures() -> None:
    """The ratio is of two simulated rates; the rate by busy time stands apart and has none."""
    table = comparison_table(make_plan(throughput_per_s=45.0))

    assert "simulated" in text_of(table)
    assert "0.97x" in line_of(table, "this plan")
    assert "x" not in line_of(table, "by busy time").replace("by busy time", "")


def test_names_are_not_markup() -> None:
    """A device named like console markup is shown as it is named."""
    plan = make_plan(cluster=make_cluster(("[red]a", "[/b]")), best_baseline="[bold]x")

    assert all(name in text_of(devices_table(plan)) for name in ("[red]a", "[/b]"))
    assert "[bold]x" in text_of(comparison_table(plan))
