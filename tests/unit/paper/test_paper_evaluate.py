"""The evaluation at a tiny scale: every figure has a document and a plot, and the plan is never beaten."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.paper import QUICK, Library, Scale, chosen, evaluate
from benchmarks.paper.figures import kept
from benchmarks.paper.records import Case, Effort, Load, Shape, Wire
from benchmarks.paper.scale import LOADS
from benchmarks.paper.summary import summary

from sampling import some_of
from tessera.flow import LoadSteps, at_anchors, choose_launches

TINY = Load("tiny-llama", 32, 8)
PAIR = ("a100", "l40s")
SMALL = Effort((8, 32), "quick")
CASE = Case(TINY, PAIR, Wire.preset("pcie4"), SMALL)
# Steps alone, of which single placements are worked out.
DECODES = replace(
    CASE,
    load=replace(TINY, phase="decode"),
    effort=Effort((8, 128, 2048), "quick", has_single=True, has_latency=True),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Empty at first."""
    return Library(tmp_path_factory.mktemp("library"))


def tiny() -> Scale:
    """The quick scale with next to nothing in every grid."""
    return replace(
        QUICK, cases=(CASE, DECODES), shapes=(Shape(TINY, 16),), first_load=TINY, effort=SMALL,
        served=Shape(TINY, 16), loads=(0.3, 0.9), seeds=2, num_requests=60, windows=(1.0,),
        thresholds=(1.0,), sizes=(2, 4), gbps=(25.0,),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(library: Library) -> dict[str, Any]:
    """All figures; what policies can do is found with few requests, since nothing here depends on it.

    Steps this small take less than a host's time for a step, which would be the limit of every service.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.serve.rehearse.HOST_US", 0.0)
        patch.setattr("benchmarks.row_service.metrics.LEAST", 50)
        patch.setattr("benchmarks.row_service.metrics.REFINED", 0)
        return evaluate(chosen(()), tiny(), library)


@pytest.mark.slow
def test_the_plan_is_never_below_a_baseline(found: dict[str, Any]) -> None:
    """Within half a percent, against every policy of the row."""
    requests, decodes = found["throughput"]

    assert {"single", "data-parallel", "prefill-decode", "kernel-level"} < set(requests["policies"])
    assert {"single", "data-parallel", "single-placement", "latency"} < set(decodes["policies"])
    for row in (requests, decodes):
        policies = row["policies"]
        assert policies["throughput"] >= 0.995 * max(rate for rate in policies.values() if rate)
        assert all(reached["batch"] for reached in row["reached"].values())


@pytest.mark.slow
def test_every_number_says_where_it_comes_from(found: dict[str, Any]) -> None:
    """Rows name their source; costs without hardware are modelled or from tables."""
    rows = [*found["throughput"], *found["cost"], *found["scaling"], *found["links"]]

    assert all(row["source"].startswith("simulated on ") for row in rows)
    assert "measured" not in found["heterogeneity"][0]["source"]


@pytest.mark.slow
def test_serving_compares_a_monitor_with_both_policies(found: dict[str, Any]) -> None:
    """Each load has three latencies and their ratio."""
    for row in found["online"]["rates"]:
        assert {"latency", "throughput", "adaptive"} == set(row["normalised_ms"])
        better = min(row["normalised_ms"][name] for name in ("latency", "throughput"))
        assert row["ratio_to_better_fixed"] == pytest.approx(row["normalised_ms"]["adaptive"] / better)


@pytest.mark.slow
def test_more_gpus_do_more(found: dict[str, Any]) -> None:
    """Four do more than two, and not more than twice as much but for rounding."""
    two, four = (row["policies"]["throughput"] for row in found["scaling"])

    assert 1.98 * two < four < 2.05 * two


@pytest.mark.slow
def test_ratios_are_those_of_the_costs(found: dict[str, Any]) -> None:
    """Percentiles ascend, and kernels carry the ratio of their times."""
    for step in found["heterogeneity"][0]["steps"]:
        assert step["all"]["p5"] <= step["all"]["p50"] <= step["all"]["p95"]
        for kernel in step["kernels"]:
            assert kernel["ratio"] == pytest.approx(kernel["second_us"] / kernel["first_us"])


@pytest.mark.slow
def test_every_figure_is_drawn(found: dict[str, Any], tmp_path: Path) -> None:
    """One picture each."""
    pytest.importorskip("matplotlib")
    from benchmarks.paper.plots import draw_all

    files = draw_all(chosen(()), found, tmp_path)

    assert [f"{figure.name}.png" for figure in chosen(())] == [path.name for path in files]
    assert all(path.stat().st_size > 1000 for path in files)


@pytest.mark.slow
def test_every_figure_is_on_one_page_beside_what_was_published(found: dict[str, Any]) -> None:
    """With the rows of the throughput figure."""
    page = summary(found)

    assert all(f"## {figure.title}" in page for figure in chosen(()))
    assert len(chosen(())) == page.count("Why ours differs")
    assert found["throughput"][0]["workload"] in page


@pytest.mark.slow
def test_a_case_is_worked_out_once(library: Library, found: dict[str, Any]) -> None:
    """What came out of it is kept, and a run that has no time left has it in its document."""
    assert kept(library, CASE).own == found["throughput"][0]["policies"]["throughput"]

    again = evaluate(chosen(["throughput"]), tiny(), library, limit_s=0.0)

    assert (found["throughput"], 0) == (again["throughput"], again["num_missing"])


@pytest.mark.slow
def test_a_run_without_time_says_what_is_missing(library: Library, found: dict[str, Any]) -> None:
    """A case that nobody worked out is counted, and its figure is not there."""
    other = replace(tiny(), cases=(replace(CASE, gpus=("h100", "l40s")),))

    again = evaluate(chosen(["throughput"]), other, library, limit_s=0.0)

    assert 1 == again["num_missing"]
    assert "throughput" not in again


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.model)
def test_outlines_of_all_families_come_with_the_package(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes that are alike, for every step of a request."""
    monkeypatch.setattr("tessera.flow.record_compiled", lambda step: pytest.fail(f"{step} is not known"))

    assert (True, "") == choose_launches(at_anchors(load.steps), "")


@pytest.mark.parametrize("load", some_of(LOADS, LOADS[:1]), ids=lambda load: load.model)
def test_all_families_are_evaluated_on_compiled_launches(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes between those of the package."""
    monkeypatch.setattr("tessera.flow.record_compiled", lambda step: pytest.fail(f"{step} is not known"))

    steps = LoadSteps(load.steps, load.counts, is_compiled=True)

    assert all(graph.trace.step.batch == 128 for graph in steps.at(128).graphs)
