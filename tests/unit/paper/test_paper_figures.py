"""Figures from outcomes: ratios, verdicts and what is worked out once."""

from dataclasses import replace

import pytest
from benchmarks.paper import FULL, QUICK, chosen, merged, narrowed
from benchmarks.paper import throughput as throughput_figure
from benchmarks.paper.evaluate import ordered
from benchmarks.paper.heterogeneity import kernel_class
from benchmarks.paper.published import PUBLISHED
from benchmarks.paper.records import Case, Effort, Load, Outcome, Reached, Wire, costs_in_words
from benchmarks.paper.regimes import verdict

from tessera.errors import TesseraError, UnknownName
from tessera.ir import Kernel, Origin

TINY = Load("tiny-llama", 64, 16)
PAIR = Case(TINY, ("a100", "l40s"), Wire.preset("pcie4"))


def outcome(**policies: float) -> Outcome:
    """Policies at given rates; `_` stands for `-` in a name."""
    named = {
        name.replace("_", "-"): Reached(rate, 10.0, {"emu:a100": 8}, 2) for name, rate in policies.items()
    }
    return Outcome(named, 20.0, "throughput", "", None, 1, 3.6, {"fitted": 1.0}, "eager", 0.1)


def test_the_best_baseline_is_not_the_plan_itself() -> None:
    """The ratio is to the best of the others."""
    found = outcome(throughput=12.0, data_parallel=8.0, single_placement=10.0, single=4.5)

    row = throughput_figure.row_of(PAIR, found)

    assert ("single-placement", 1.2) == (row["best_baseline"], row["ratio_to_best_baseline"])
    assert {"2x a100": {"policy": "data-parallel", "value": 9.0}} == row["elsewhere"]


def test_a_million_tokens_have_a_price() -> None:
    """A pair for 3.6 dollars an hour: answers of 16 tokens, ten a second."""
    row = throughput_figure.row_of(PAIR, outcome(throughput=10.0))

    assert row["usd_per_million_tokens"]["throughput"] == pytest.approx(1000 / 160)


def test_coarse_policies_exclude_the_single_placement() -> None:
    """The map compares with what is not kernel-level."""
    found = outcome(throughput=12.0, data_parallel=8.0, single_placement=10.0)

    assert ("data-parallel", 8.0) == found.best_coarse


def test_a_case_without_a_plan_has_a_row_that_says_so() -> None:
    """Nothing fits: no ratio, and the reason."""
    found = replace(outcome(), why="too large")

    row = throughput_figure.row_of(PAIR, found)

    assert (None, None, "too large") == (
        row["best_baseline"], row["ratio_to_best_baseline"], row["why_none"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("over_best", "over_parallel", "best", "word"),
    [
        (1.2, 1.3, "layer-pipeline", "kernel-level"),
        (1.0, 1.0, "data-parallel", "data-parallel"),
        (1.01, 1.3, "layer-pipeline", "layer-pipeline"),
        (1.0, None, "attention-ffn", "attention-ffn"),
        (None, None, None, "does not fit"),
    ],
)
def test_a_verdict_names_who_is_best(
    over_best: float | None, over_parallel: float | None, best: str | None, word: str
) -> None:
    """A gain within the noise is no gain, and data-parallel is named before other coarse policies."""
    assert word == verdict(over_best, over_parallel, best)


def test_a_case_that_two_figures_want_is_worked_out_once_with_the_larger_effort() -> None:
    """The figure that wants more decides."""
    more = replace(PAIR, effort=Effort((8,), "quick", True, True))

    (task,) = ordered([PAIR, more, PAIR])

    assert isinstance(task, Case)
    assert replace(PAIR.effort, has_single=True, has_latency=True) == task.effort


def test_costs_from_several_sources_are_named_with_their_shares() -> None:
    """One source is named alone."""
    assert "modelled" == costs_in_words({"fitted": 0.6, "class": 0.4})
    assert "tables 30% / modelled 70%" == costs_in_words({"table": 0.3, "fitted": 0.7})


def test_the_full_grid_has_a_hundred_rows_of_every_kind() -> None:
    """Families, phases, pairs, links, devices and limits; in any first half too."""
    assert len(FULL.cases) >= 100
    for cases in (FULL.cases, FULL.cases[: len(FULL.cases) // 2]):
        assert 5 == len({case.load.model for case in cases})
        assert {"request", "decode", "prefill"} == {case.load.phase for case in cases}
        assert 10 == len({tuple(sorted(set(case.gpus))) for case in cases})
        assert 3 == len({case.wire for case in cases})
        assert (2, 16) == (min(sizes := [len(case.gpus) for case in cases]), max(sizes))
        assert 0.4 < sum(case.load.limit_ms is not None for case in cases) / len(cases) < 0.6
    assert len({case.load.model for case in QUICK.cases}) == 5


def test_every_figure_says_what_was_published_and_why_it_differs() -> None:
    """No figure stands alone."""
    for figure in chosen(()):
        assert PUBLISHED[figure.name].reports
        assert PUBLISHED[figure.name].differs


def test_an_unknown_figure_model_or_lone_gpu_is_refused() -> None:
    """One line for each mistake."""
    with pytest.raises(UnknownName, match="figure"):
        chosen(["figure-9"])
    with pytest.raises(UnknownName, match="model"):
        narrowed(QUICK, ["llama-9"], [])
    with pytest.raises(TesseraError, match="no pair"):
        narrowed(QUICK, [], [("a100",)])


def test_documents_are_merged_figure_by_figure() -> None:
    """What was not made again stays, and unlike scales are called mixed."""
    old = {"scale": "full", "figures": {"links": {"scale": "full"}}, "published": {"links": 1}, "links": [1]}
    new = {"scale": "quick", "figures": {"cost": {"scale": "quick"}}, "published": {"cost": 2}, "cost": [2]}

    both = merged(old, new)

    assert ([1], [2], "mixed", {"links", "cost"}) == (
        both["links"], both["cost"], both["scale"], set(both["figures"]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scope", "expected"),
    [
        ("aten.mm.default", "model.layers.0.self_attn.q_proj", "matrix multiply"),
        ("aten.bmm.default", "model.layers.0.self_attn", "attention"),
        ("aten.bmm.default", "model.layers.0.mlp", "matrix multiply"),
        ("aten.mean.dim", "model.layers.0.input_layernorm", "norm"),
        ("aten.mean.dim", "pooler", "reduction"),
        ("aten.silu.default", "mlp.act_fn", "elementwise"),
        ("aten._to_copy.default", "", "copy"),
        ("aten.index.Tensor", "", "lookup"),
    ],
)
def test_kernel_classes(name: str, scope: str, expected: str) -> None:
    """A launch is classed by its kernel's name and by the module it came from."""
    assert expected == kernel_class(Kernel(name, Origin.ATEN), scope)
