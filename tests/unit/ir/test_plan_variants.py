"""Plans whose lanes are of unlike batches: rules, figures and files."""

from dataclasses import replace
from pathlib import Path

import pytest

from batches_factory import mixed_plan
from factories import make_chain, make_plan
from tessera.errors import MismatchError, RuleBroken
from tessera.ir import Plan, Timeline, load, need_one_batch, save, verify
from tessera.simulate import simulate


def test_a_larger_batch_counts_for_more() -> None:
    """Weights are batches over the first variant's, and rows those of all lanes."""
    plan = mixed_plan()

    assert [8, 2] == [plan.batch_of(lane) for lane in plan.lanes]
    assert [1.0, 0.25] == [plan.weight_of(lane) for lane in plan.lanes]
    assert plan.rows_per_s == pytest.approx(8e6 / 560 + 2e6 / 440)
    assert [plan.unit_of(lane) for lane in plan.lanes] == [v.unit for v in plan.every_variant]
    assert [0, 1] == [plan.first_step(lane) for lane in plan.lanes]


def test_files_keep_the_variants(tmp_path: Path) -> None:
    """A plan with unlike batches comes back equal."""
    plan = mixed_plan()
    save(plan, tmp_path / "x.plan")
    save(simulate(plan, 6), tmp_path / "x.timeline")

    assert plan == load(Plan, tmp_path / "x.plan")
    assert len(load(Timeline, tmp_path / "x.timeline").weights) == 6


def test_rules_of_variants() -> None:
    """A lane of no variant, a variant of no lane, and variants that are no other batch are refused."""
    plan = mixed_plan()
    first = plan.lanes[0]
    broken = {
        "every lane follows a variant": replace(plan, lanes=(first, replace(plan.lanes[1], variant=2))),
        "each is followed by a lane": replace(plan, lanes=(first,)),
        "the same steps at different batches": replace(plan, variants=(plan.every_variant[0],)),
        "one price list per step": replace(
            plan, variants=(replace(plan.variants[0], costs=plan.every_variant[0].costs),)
        ),
    }
    for words, wrong in broken.items():
        with pytest.raises(RuleBroken, match=words):
            verify(wrong)


def test_variants_have_the_same_multiplicities() -> None:
    """A variant that runs its step more often is other work."""
    plan = mixed_plan()
    other = replace(plan.variants[0], unit=replace(plan.variants[0].unit, counts=(2,)))

    with pytest.raises(RuleBroken, match="the same steps"):
        verify(replace(plan, variants=(other,)))


def test_what_takes_one_batch_says_so() -> None:
    """With the batches, in one line with a remedy; plans of one batch pass."""
    need_one_batch(make_plan([make_chain(3)], [[[0, 1, 0]]]), "a service")

    with pytest.raises(
        MismatchError, match=r"lanes of batch 8, 2; a service takes one batch.*--batch-choices"
    ):
        need_one_batch(mixed_plan(), "a service")
