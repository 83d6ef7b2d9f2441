"""A plan says how much of its time rests on wide prices, and why the whole is known better."""

from dataclasses import replace

import pytest

from report_factory import make_plan, make_work
from tessera.ir import Plan, Source
from tessera.profile import GPUS, borrowed, sureness


def plan_with(rel_error: float, source: Source) -> Plan:
    """A plan whose costs all have this error and source."""
    made = make_plan()
    costs = tuple(
        replace(
            listed,
            costs=tuple(
                tuple(replace(cost, rel_error=rel_error, source=source) for cost in row)
                for row in listed.costs
            ),
        )
        for listed in made.costs
    )
    return replace(made, costs=costs)


def test_wide_prices_are_counted_by_their_time() -> None:
    """All of the time is priced at ±50 %, or none of it."""
    assert 1.0 == pytest.approx(sureness(plan_with(0.5, Source.CLASS)).wide_share)
    assert 0.0 == sureness(plan_with(0.1, Source.FITTED)).wide_share


def test_unlike_kernels_cancel_in_part() -> None:
    """Kernels of ±50 % in several classes and on two devices: the whole is known better."""
    found = sureness(plan_with(0.5, Source.CLASS))

    assert len(found.parts) > 1
    assert max(p.share for p in found.parts) * 0.5 <= found.rel_error < 0.5
    assert "±50%" in found.sentence


def test_shares_add_up_to_the_busy_time() -> None:
    """By part and by source."""
    found = sureness(make_plan())

    assert 1.0 == pytest.approx(sum(p.share for p in found.parts))
    assert 1.0 == pytest.approx(sum(found.by_source.values()))


def test_allocations_need_no_model() -> None:
    """A mixture of experts has some; they take no time, so nothing of a plan rests on them."""
    found = sureness(make_plan(work=(("mlp", "aten.new_empty.default", 0.0, 0.0), *make_work())))

    assert "allocation" not in {p.op for p in found.parts}
    assert found.parts == sureness(make_plan()).parts


@pytest.mark.parametrize("name", ["rtx-3080", "rtx-3090", "a6000", "a5000", "l20"])
def test_cards_without_measurements_say_whose_models_they_borrow(name: str) -> None:
    """From cards of the same chip."""
    specs = GPUS

    assert borrowed(name)
    assert all(specs[lender].chip == specs[name].chip for lender in borrowed(name))


def test_cards_with_measurements_borrow_nothing() -> None:
    """Their own rows price them."""
    assert () == borrowed("h200") == borrowed("l40s")
