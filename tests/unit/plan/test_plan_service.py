"""Drafts of services by step times, and the choice among them by rehearsal."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from factories import make_chain, make_plan
from tessera.errors import PlanInfeasible
from tessera.ir import Cluster, Expected, Group, Load, Role, ServicePlan
from tessera.plan.fluid import DIVIDED, FLUID, QUICK_FLUID, FluidModel, ModelBytes, ServiceDraft, StepPrice
from tessera.plan.service import Rehearse, plan_service
from tessera.profile import parse_devices, wire

# A card that computes fast and reads slowly, and one that reads fast: us a token, us a step, us a sequence.
RATES = {"emu:l40s": (80.0, 20_000.0, 250.0), "emu:h20": (130.0, 5_000.0, 50.0)}
WEIGHTS = 16 << 30


def price(cluster: Cluster) -> Callable[[int, int, int], StepPrice]:
    """Products by the token with a floor, attention by the sequence."""

    def at(tokens: int, sequences: int, length: int) -> StepPrice:
        rates = [RATES[name.partition("#")[0]] for name in cluster.names]
        products = [max(floor, tokens * us) for us, floor, _ in rates]
        attention = [sequences * us * length / 1024 for _, _, us in rates]
        return StepPrice(np.array([products, attention]), tokens << 16)

    return at


def fluid(devices: str, load: Load, token_bytes: int = 131_072) -> FluidModel:
    cluster = wire(parse_devices(devices), ["pcie4"])
    return FluidModel(load, cluster, price(cluster), ModelBytes(WEIGHTS, token_bytes))


def no_plan(draft: ServiceDraft) -> ServicePlan:
    """A plan without groups, which only carries its draft's figures."""
    return ServicePlan("m", draft.policy, Load(1, 1), (), Expected(
        draft.tokens_per_s, draft.tpot_ms, draft.tpot_ms, draft.ttft_ms, draft.ttft_ms, (1.0, 1.0), (), 1,
    ))  # fmt: skip


def rehearsed(share: float = 1.0, slower: float = 1.0) -> Rehearse:
    """Some share of the drafted rate, at longer times."""

    def rehearse(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
        drafted = plan.expected
        assert drafted is not None
        tpot_ms, ttft_ms = slower * drafted.tpot_ms, slower * drafted.ttft_ms
        return Expected(share * drafted.tokens_per_s, tpot_ms, 0, ttft_ms, 0, (1.0, 1.0), (), 1)

    return rehearse


def test_prompts_go_to_the_card_that_computes_and_answers_to_the_one_that_reads() -> None:
    """The fractional split is best, and below the bound."""
    found = fluid("emu:h20,emu:l40s", Load(1024, 256, tpot_ms=50.0))
    best = found.drafts("prefill-decode-fractional")[0]
    roles = {group.role: found.cluster.names[group.devices[0]] for group in best.groups}

    assert {Role.PROMPTS: "emu:l40s", Role.MIXED: "emu:h20"} == roles
    others = [
        found.drafts(policy)[0].tokens_per_s for policy in ("single", "data-parallel", "prefill-decode")
    ]
    assert max(others) < best.tokens_per_s <= found.bound_per_s


def test_drafts_keep_limits_and_memory() -> None:
    """With less time per token, and with less memory, there are fewer sequences."""
    loads = (Load(1024, 256), Load(1024, 256, tpot_ms=60.0), Load(1024, 256, tpot_ms=40.0))
    drafts = [fluid("emu:h20", load).drafts("single")[0] for load in loads]
    numbers = [draft.groups[0].sequences for draft in drafts]

    assert sorted(numbers, reverse=True) == numbers
    assert drafts[1].tpot_ms <= 60.0
    assert drafts[2].tpot_ms <= 40.0
    tight = fluid("emu:h20", Load(1024, 256), token_bytes=1 << 20)
    (group,) = tight.drafts("single")[0].groups
    assert group.pool_tokens * (1 << 20) + WEIGHTS <= 0.9 * tight.cluster.devices[0].memory_bytes


@pytest.mark.parametrize(
    "devices", ["emu:h20", "emu:h20,emu:h20,emu:l40s", "emu:l40s,emu:l40s,emu:l40s,emu:l40s"]
)
@pytest.mark.parametrize("lengths", [(1024, 256), (64, 512), (4096, 1)])
def test_every_draft_is_below_the_bound_and_uses_devices_once(devices: str, lengths: tuple[int, int]) -> None:
    found = fluid(devices, Load(*lengths))
    for policy in ("single", "data-parallel", "prefill-decode", "prefill-decode-fractional"):
        for draft in found.drafts(policy):
            used = [device for group in draft.groups for device in group.devices]
            assert len(used) == len(set(used)) == (1 if policy == "single" else len(found.cluster.devices))
            assert 0 < draft.tokens_per_s <= 1.001 * found.bound_per_s
            assert all(1 <= group.sequences <= max(group.sizes) for group in draft.groups)
    assert found.drafts("single")


def test_short_requests_have_rows_for_all_prompts_of_a_step() -> None:
    """The best single device reads full steps of prompts of 64 tokens, answered by one or two tokens."""
    for answer in (1, 2):
        (group,) = fluid("emu:h20", Load(64, answer)).drafts("single")[0].groups

        assert 64 * group.sequences >= 2 * group.sizes[-1]


def test_drafts_read_a_prompt_at_once() -> None:
    """Answers that end in a share of the steps put prompt tokens into as many."""
    found = fluid("emu:h20", Load(2048, 64))
    for draft in found._drafts("single"):
        (group,), step_s = draft.groups, 1e-3 * draft.tpot_ms
        ended = draft.tokens_per_s / 64 * step_s
        mixed_s = 1e-6 * found.price(group.sizes[-1], group.sequences, group.length).total_us(0)

        assert step_s >= 0.99 * (1.0 - math.exp(-ended)) * mixed_s


@pytest.mark.parametrize(
    ("quick", "slow", "load", "policies"),
    [
        (
            "h20",
            "l40s",
            Load(512, 128, tpot_ms=15.0),
            ("data-parallel", "prefill-decode", "prefill-decode-fractional"),
        ),
        ("l40s", "h20", Load(512, 128, ttft_ms=80.0), ("data-parallel",)),
    ],
)
def test_a_card_that_misses_a_limit_is_left_out(
    quick: str, slow: str, load: Load, policies: tuple[str, ...]
) -> None:
    """Copies on two quick cards remain beside one too slow, and so does a split between them."""
    pair = f"emu:{quick},emu:{quick}"
    models = [fluid(devices, load) for devices in (pair, f"{pair},emu:{slow}")]
    for policy in policies:
        alone, beside = (max((x.tokens_per_s for x in m.drafts(policy)), default=0.0) for m in models)

        assert beside >= alone > 0.0


def test_the_plan_is_the_best_rehearsed_policy_with_the_others_as_rivals() -> None:
    found = fluid("emu:h20,emu:l40s", Load(1024, 256, tpot_ms=50.0))
    plan = plan_service([found], no_plan, rehearsed(0.95))

    assert "prefill-decode-fractional" == plan.policy
    assert plan.expected is not None
    assert plan.expected.tokens_per_s == max(rival.expected.tokens_per_s for rival in plan.rivals)
    assert {"single", "data-parallel", "prefill-decode"} < {rival.policy for rival in plan.rivals}
    assert plan.bound_per_s == found.bound_per_s


def test_a_policy_that_misses_the_limit_in_rehearsal_is_drafted_for_a_lower_one() -> None:
    """Rehearsed times are a fifth longer than drafted ones."""
    load = Load(1024, 256, tpot_ms=50.0)
    plan = plan_service([fluid("emu:h20,emu:l40s", load)], no_plan, rehearsed(1.0, 1.2))

    assert all(rival.expected.is_within(load) for rival in plan.rivals)
    assert {"single", "data-parallel"} < {rival.policy for rival in plan.rivals}


def test_a_quick_plan_is_refused_only_after_drafts_for_lower_limits() -> None:
    """A single rehearsal that misses the limit does not show that no service keeps it."""
    load = Load(1024, 256, tpot_ms=100.0)
    quick = replace(fluid("emu:h20,emu:l40s", load), config=QUICK_FLUID, devices=(0,))
    plan = plan_service([quick], no_plan, rehearsed(1.0, 2.0))

    assert plan.expected is not None
    assert plan.expected.is_within(load)


def test_drafts_may_be_limited_to_some_devices() -> None:
    """They use no other, and reach no more than the others could."""
    found = fluid("emu:h20,emu:l40s,emu:l40s", Load(1024, 256))
    part = replace(found, devices=(1, 2))
    for policy in ("single", "data-parallel", "prefill-decode", "layer-pipeline"):
        best = part.drafts(policy)[0]
        assert {device for group in best.groups for device in group.devices} <= {1, 2}
    assert part.bound_per_s < found.bound_per_s


@pytest.mark.parametrize(
    ("load", "token_bytes", "message"),
    [
        (Load(1024, 256, tpot_ms=0.5), 131_072, "no service keeps to the limits: the nearest takes"),
        (Load(1024, 256, ttft_ms=0.5), 131_072, "no service keeps to the limits"),
        (Load(1024, 256), 1 << 28, "the model and a few requests need .* GB of one device"),
    ],
)
def test_what_cannot_be_kept_is_said_in_a_line(load: Load, token_bytes: int, message: str) -> None:
    with pytest.raises(PlanInfeasible, match=message):
        plan_service([fluid("emu:h20,emu:l40s", load, token_bytes)], no_plan, rehearsed())


def divided(devices: str, token_bytes: int = 131_072) -> FluidModel:
    """With attention apart, which has an eighth of the weights."""
    found = fluid(devices, Load(1024, 256), token_bytes)
    return replace(found, model=replace(found.model, attention=(False, True), attention_weights=WEIGHTS >> 3))


def test_more_sequences_leave_a_lane_over_devices_less_choice() -> None:
    """Pages that fill both cards divide layers by memory, not by speed."""
    found = divided("emu:h20,emu:l40s", token_bytes=1 << 19)
    for policy in ("layer-pipeline", "kernel-level"):
        drafts = sorted(found._drafts(policy), key=lambda draft: draft.pool_tokens)
        best, largest = found.drafts(policy)[0], drafts[-1]

        assert best.tokens_per_s > 1.1 * largest.tokens_per_s
        assert best.pool_tokens < largest.pool_tokens


def test_equal_cells_have_lanes_of_their_own() -> None:
    """Two pairs do what one does twice; a lane over all four is drafted too."""
    pair, pairs = divided("emu:h20,emu:l40s"), divided("emu:h20,emu:l40s,emu:h20,emu:l40s")
    (one, *_), (two, *_) = (
        model.drafts("layer-pipeline", depth=depth) for model, depth in ((pair, (1, 4)), (pairs, (2, 8)))
    )

    assert 2 * one.tokens_per_s == pytest.approx(two.tokens_per_s)
    assert one.tpot_ms == two.tpot_ms
    assert [(0, 1), (2, 3)] == [group.devices for group in two.groups]
    assert (0, 1, 2, 3) == pairs.drafts("layer-pipeline", depth=(1, 8))[0].groups[0].devices


def test_cells_have_their_kinds_in_one_order() -> None:
    """A placement of the first one is copied by place, whatever the order of the devices."""
    pairs = divided("emu:h20,emu:l40s,emu:l40s,emu:h20")

    two = pairs.drafts("layer-pipeline", depth=(2, 8))[0]

    assert [(0, 1), (3, 2)] == [group.devices for group in two.groups]


def test_attention_is_drafted_where_its_pages_fit() -> None:
    """The card that reads fast has attention; pages that fill it leave no draft on the smaller card."""
    found = divided("emu:h20,emu:l40s")
    rates = {policy: found.drafts(policy)[0].tokens_per_s for policy in DIVIDED}
    (group,) = found.drafts("attention-ffn")[0].groups
    held = group.pool_tokens * 131_072 + (WEIGHTS >> 3)

    assert rates["kernel-level"] >= max(rates.values())
    assert held <= 0.9 * found.cluster.devices[0].memory_bytes
    assert not fluid("emu:h20,emu:l40s", Load(1024, 256)).drafts("attention-ffn")


def test_microbatches_of_a_lane_are_chosen_by_simulated_steps() -> None:
    """Two wait for one another twice as long as drafted; each number is made once, the best is rehearsed."""
    found = divided("emu:h20,emu:l40s")
    chain, made = make_chain(2), list[int]()
    step = replace(chain, step=replace(chain.step, kind="tokens"))
    played: list[int] = []

    def make(draft: ServiceDraft) -> ServicePlan:
        _, num = draft.depth
        made.append(num)
        steps_per_s = 1e3 * num / draft.tpot_ms * (0.5 if num == 2 else 1.0)
        lane = replace(make_plan([step], [[(0, 1)]]), simulated_per_s=steps_per_s)
        group = Group(Role.MIXED, lane, draft.groups[0].sequences, num)
        return replace(no_plan(draft), groups=(group,))

    def rehearse(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
        played.append(plan.groups[0].microbatches)
        return rehearsed()(plan, load, clients)

    plan = plan_service([found], make, rehearse, policies=("layer-pipeline",))

    assert {2, 3, 4} == set(made)
    assert len(made) == 3
    assert [plan.groups[0].microbatches] == played != [2]


@pytest.mark.parametrize(
    ("tpot_ms", "ttft_ms", "policy"),
    [(40.0, 900.0, "prefill-decode"), (60.0, 900.0, "data-parallel"), (40.0, 1100.0, "data-parallel")],
)
def test_of_equal_rates_a_much_shorter_time_per_token_decides(
    tpot_ms: float, ttft_ms: float, policy: str
) -> None:
    """Half the time per token, and no later first token."""

    def rehearse(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
        is_split = plan.policy == "prefill-decode"
        times = (tpot_ms, 0.0, ttft_ms, 0.0) if is_split else (100.0, 0.0, 1000.0, 0.0)
        return Expected(980.0 if is_split else 1000.0, *times, (1.0, 1.0), (), 1)

    names = ("data-parallel", "prefill-decode")
    found = plan_service([fluid("emu:h20,emu:l40s", Load(1024, 256))], no_plan, rehearse, policies=names)
    assert policy == found.policy


@pytest.mark.parametrize("tpot_ms", [None, 0.01])
def test_answers_of_one_token_are_planned_by_their_rate(tpot_ms: float | None) -> None:
    """None has a time per token, so none is quicker by it, and every limit of it is kept."""

    def rehearse(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
        rate, ttft_ms = (980.0, 500.0) if plan.policy == "single" else (1000.0, 1000.0)
        return Expected(rate, 0.0, 0.0, ttft_ms, 0.0, (1.0, 1.0), (), 1)

    names, load = ("single", "data-parallel"), Load(64, 1, tpot_ms=tpot_ms)
    found = plan_service([fluid("emu:h20,emu:l40s", load)], no_plan, rehearse, policies=names)
    assert "data-parallel" == found.policy


def waiting(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
    """Each of forty requests makes the first tokens of all 10 ms later."""
    clients = clients or 40
    return Expected(10.0 * clients, 50.0, 0.0, 10.0 * clients, 0.0, (1.0, 1.0), (), clients)


def test_first_tokens_are_in_time_with_fewer_requests() -> None:
    """However few: Little's law alone takes away too few at a time."""
    found = plan_service([fluid("emu:h20,emu:l40s", Load(1024, 256, ttft_ms=200.0))], no_plan, waiting)

    assert found.expected is not None
    assert 10 <= found.expected.clients <= 20


def test_limits_below_every_draft_are_tried_with_fewer_requests() -> None:
    """Drafts are for full load."""
    names, free = ("single", "data-parallel"), fluid("emu:h20,emu:l40s", Load(1024, 256, ttft_ms=1e9))
    least_ms = min(draft.ttft_ms for name in names for draft in free._drafts(name))
    model = fluid("emu:h20,emu:l40s", Load(1024, 256, ttft_ms=0.9 * least_ms))
    found = plan_service([model], no_plan, waiting, policies=names)

    assert not any(model.drafts(name) for name in names)
    assert found.expected is not None
    assert found.expected.is_within(model.load)


@pytest.mark.parametrize("lengths", [(2048, 512), (4096, 128), (512, 64)])
def test_limited_first_tokens_have_steps_that_read_a_prompt_at_once(lengths: tuple[int, int]) -> None:
    """Also where memory holds few sequences, which seldom end."""
    found = fluid("emu:l40s", Load(*lengths, ttft_ms=1.0), token_bytes=1 << 19)
    draft = found.nearest("single")
    once_ms = 1e-3 * found.price(lengths[0], 8, found.length).total_us(0)

    assert draft is not None
    assert once_ms < draft.ttft_ms < 1.2 * once_ms + 20.0


def test_a_split_reads_no_prompt_sooner_than_its_steps() -> None:
    """A prompt of many steps takes all of them."""
    found = fluid("emu:h20,emu:l40s", Load(16_384, 64), token_bytes=1 << 15)
    drafts = found.drafts("prefill-decode")

    assert drafts
    for draft in drafts:
        (group, *_) = draft.groups
        step_ms = 1e-3 * found.price(group.sizes[-1], group.sequences, group.length).total_us(
            group.devices[0]
        )
        assert draft.ttft_ms >= step_ms * 16_384 / group.sizes[-1]


@pytest.mark.parametrize("slower", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("limits", [(None, 2.0), (None, 60.0), (1.0, None), (3.0, None)])
def test_times_that_a_refusal_names_are_reached(
    slower: float, limits: tuple[float | None, float | None]
) -> None:
    """They are rehearsed, however far the limits are."""
    load = Load(1024, 256, tpot_ms=limits[0], ttft_ms=limits[1])
    with pytest.raises(PlanInfeasible) as refused:
        plan_service([fluid("emu:h20,emu:l40s", load)], no_plan, rehearsed(1.0, slower))
    named = [1.01 * float(word) for word in re.findall(r"([\d.]+) ms", str(refused.value))]
    told = replace(load, tpot_ms=limits[0] and named[0], ttft_ms=limits[1] and named[1])

    assert plan_service([fluid("emu:h20,emu:l40s", told)], no_plan, rehearsed(1.0, slower)).expected


def test_the_nearest_draft_is_tried_after_others_missed() -> None:
    """Those that promise more may all be late."""
    load = Load(1024, 256, ttft_ms=400.0)
    found = fluid("emu:h20,emu:l40s", load)
    nearest = found.nearest("single")
    assert nearest is not None

    def rehearse(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
        drafted = plan.expected
        assert drafted is not None
        late = 1.0 if drafted.ttft_ms <= nearest.ttft_ms else 10.0
        return replace(drafted, ttft_ms=late * drafted.ttft_ms)

    assert plan_service([found], no_plan, rehearse, policies=("single",)).expected


def test_requests_are_taken_away_down_to_one() -> None:
    """A service that is in time for one request at a time only is found."""

    def rehearse(plan: ServicePlan, load: Load, clients: int | None) -> Expected:
        clients = clients or 1000
        return Expected(1e-3, 50.0, 0.0, 199.0 if clients == 1 else 201.0, 0.0, (1.0, 1.0), (), clients)

    found = plan_service([fluid("emu:h20,emu:l40s", Load(1024, 256, ttft_ms=200.0))], no_plan, rehearse)

    assert found.expected is not None
    assert found.expected.clients == 1


def test_memory_is_filled_between_two_step_sizes() -> None:
    """Where it is short, a quick plan, which tries two sizes per doubling, is as good as a full one."""
    found = divided("emu:h20,emu:l40s", token_bytes=1 << 21)
    full, quick = (
        replace(found, config=config).drafts("layer-pipeline")[0].tokens_per_s
        for config in (FLUID, QUICK_FLUID)
    )
    assert quick == pytest.approx(full, rel=0.01)


@pytest.mark.parametrize(("policy", "token_bytes"), [("single", 1 << 21), ("layer-pipeline", 1 << 22)])
def test_groups_are_as_small_as_memory_asks(policy: str, token_bytes: int) -> None:
    """Also below the sizes that are tried elsewhere."""
    best = divided("emu:l40s,emu:l40s", token_bytes).drafts(policy)[0]
    assert best.groups[0].sequences < FLUID.least_tokens


@pytest.mark.parametrize("policy", ["single", "layer-pipeline"])
def test_few_sequences_answer_in_nearly_all_steps(policy: str) -> None:
    """Where memory allows few, a prompt is read in a large step as soon as a sequence has ended."""
    found = replace(divided("emu:h20,emu:h20", token_bytes=12 << 20), load=Load(256, 512))
    best = found.drafts(policy)[0]
    (group,) = best.groups
    num = group.sequences * group.microbatches
    assert 1e-3 * best.tokens_per_s * best.tpot_ms > 0.9 * num
    assert num < 32


def test_each_device_has_room_for_its_own_microbatches_alone() -> None:
    """As its worker has, so that a plan with large steps on several devices can be served."""
    found = fluid("emu:h20,emu:l40s", Load(1024, 64))

    def large(tokens: int, sequences: int, length: int) -> StepPrice:
        return replace(found.price(tokens, sequences, length), temporary_bytes=tokens << 24)

    times = []
    drafts = replace(found, price=large).drafts("data-parallel")
    for group in (group for draft in drafts for group in draft.groups):
        held = WEIGHTS + group.pool_tokens * found.model.token
        room = found.cluster.devices[group.devices[0]].memory_bytes - held
        times.append(room / large(group.sizes[-1], group.sequences, group.length).temporary_bytes)
    assert 1 <= min(times) < 2


@pytest.mark.parametrize("lengths", [(64, 32), (2048, 64), (16, 1)])
def test_memory_that_a_refusal_names_is_enough(lengths: tuple[int, int]) -> None:
    """On one device."""
    found = fluid("emu:h20", Load(*lengths), token_bytes=1 << 22)

    def with_gb(num: float) -> FluidModel:
        device = replace(found.cluster.devices[0], memory_bytes=int(1e9 * num))
        return replace(found, cluster=replace(found.cluster, devices=(device,)))

    with pytest.raises(PlanInfeasible) as refused:
        plan_service([with_gb(18.0)], no_plan, rehearsed())
    (gb,) = re.findall(r"need ([\d.]+) GB", str(refused.value))

    assert with_gb(float(gb)).drafts("single")
    assert not with_gb(0.98 * float(gb)).drafts("single")
