"""The publication's set-up: pairs, links, prices, lengths, policies, and its models' served steps.

gpt-oss has MXFP4 experts (`MxSteps`): grouped products read 4.25 bits a weight and compute in bfloat16,
slower than dense ones by a factor that its census gives for A100 and L40S. Lengths are those of the
re-measured runs where there are some, else the conversation trace's medians.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from benchmarks.published import figures

from tessera.capture import outlines
from tessera.ir import BufferKind, Cluster, Costs, Device, Link, Load, Trace, WorkUnit
from tessera.plan.fluid import GroupDraft, ModelBytes, StepPrice
from tessera.planning import ServedSteps
from tessera.profile import OpClass, parse_devices, works
from tessera.profile.counts import Work
from tessera.profile.estimate import price_works

PAIRS = {
    "a100_l40s": ("a100-pcie", "l40s"),
    "h100_rtx_pro_6000": ("h100", "rtx-pro-6000"),
    "b200_h100": ("b200", "h100"),
}
# Figure 9.
CLUSTERS = {"two_a100_one_l40s": ("a100-pcie", "a100-pcie", "l40s")}
# Names in figures.json.
PRICED = {"a100-pcie": "a100", "rtx-pro-6000": "rtx_pro_6000"}
# Published policy -> ours: the policies of a service, and one placement of kernels.
POLICIES = {
    "left_card_alone": "single",
    "right_card_alone": "single",
    "request_distribution": "data-parallel",
    "prefill_decode": "prefill-decode",
    "attention_ffn": "attention-ffn",
    "kernel_disaggregation": "kernel-level",
    "prefill_decode_fractional": "prefill-decode-fractional",
}
# Beside the published ones: a split whose decode card reads prompts too, and the best of all policies.
FRACTIONAL, MIX = "prefill_decode_fractional", "tessera_mix"
SEQUENCES = 32
# A message's latency, and the share of a link's rate that InfiniBand keeps after framing.
LATENCY_US, FRAMING = 15.0, 0.9
# Bits of an MXFP4 weight with its share of the scale of 32.
MXFP4_BITS, PLAIN_BITS = 4.25, 16.0
# Time of Marlin's expert products over a dense bf16 product's: 119 and 166 TFLOP/s in re-measured prefills,
# of which experts take 72 and 66 % in the census. Others are assumed between.
MARLIN, MARLIN_ELSEWHERE = {"a100-pcie": 2.0, "l40s": 1.25}, 1.5


@dataclass(frozen=True, slots=True)
class PublishedModel:
    name: str
    prompt: int
    output: int
    is_mxfp4: bool = False

    @property
    def load(self) -> Load:
        return Load(self.prompt, self.output, "fixed")


# Qwen reads a picture of 512 x 512 (324 tokens) beside its text.
MODELS = {
    "llama_3_1_8b": PublishedModel("llama-3-8b", 1920, 1024),
    "gpt_oss_20b": PublishedModel("gpt-oss-20b", 4096, 684, is_mxfp4=True),
    "qwen_2_5_vl_7b": PublishedModel("qwen2.5-vl-7b", 1020 + 324, 128),
}
# Conversation lengths of the online runs.
CONVERSATION = Load(2102, 134, "lognormal")
UNSERVED = {
    "mamba_codestral_7b": "its state is kept by row; services of such models are not planned yet",
    "stable_diffusion_3_5_medium": "a denoising step is no service; see `python -m benchmarks.paper`",
}


def cluster(gpus: tuple[str, ...], gbit_per_s: float = 200.0, latency_us: float = LATENCY_US) -> Cluster:
    """Cards joined by InfiniBand of a bandwidth, every two by a link in each direction."""
    devices: tuple[Device, ...] = parse_devices(",".join(f"emu:{name}" for name in gpus))
    gbps = FRAMING * gbit_per_s / 8
    links = (
        Link(a.name, b.name, f"{gbit_per_s:g} Gb/s", latency_us, gbps)
        for a in devices
        for b in devices
        if a.name != b.name
    )
    return Cluster(devices, tuple(links))


def cards(pair: str, policy: str) -> tuple[str, ...]:
    """The cards that a policy uses."""
    if pair in CLUSTERS:
        return CLUSTERS[pair]
    left, right = PAIRS[pair]
    return {"left_card_alone": (left,), "right_card_alone": (right,)}.get(policy, (left, right))


def usd_per_hour(gpus: tuple[str, ...]) -> float:
    """The publication's prices."""
    prices = figures()["setup"]["prices_usd_per_hour"]
    return float(sum(prices[PRICED.get(name, name)] for name in gpus))


@dataclass(eq=False)
class MxSteps(ServedSteps):
    """Served steps with MXFP4 experts."""

    @cached_property
    def model_bytes(self) -> ModelBytes:
        plain = super().model_bytes
        trace = self.family.recordings[0].trace
        read = {a.buffer for n, w in enumerate(works(trace)) if w.op is OpClass.GROUPED
                for a in trace.launches[n].accesses}  # fmt: skip
        experts = sum(trace.buffers[b].size_bytes for b in read if trace.buffers[b].kind is BufferKind.WEIGHT)
        return replace(plain, weights=int(plain.weights - experts * (1.0 - MXFP4_BITS / PLAIN_BITS)))

    def price(self, tokens: int, sequences: int, length: int) -> StepPrice:
        key = tokens, sequences, length
        if key not in self._prices:
            plain = super().price(*key)
            family, counts, _ = self._kinds
            step = self.step(tokens, sequences, self.anchors[0].reserve, length)
            changed = packed_us(family.at(step).trace, self.cluster)
            us = plain.us.copy()
            for number, row in changed.items():
                us[number] = np.array(row) * counts[number]
            self._prices[key] = StepPrice(us, plain.temporary_bytes)
        return self._prices[key]

    def unit(self, group: GroupDraft) -> tuple[WorkUnit, tuple[Costs, ...]]:
        unit, costs = super().unit(group)
        return unit, tuple(
            _packed(graph.trace, one, self.cluster) for graph, one in zip(unit.graphs, costs, strict=True)
        )


def packed_us(trace: Trace, devices: Cluster) -> dict[int, list[float]]:
    """Times of grouped products on every device, with weights of 4.25 bits."""
    grouped = {n: w for n, w in enumerate(works(trace)) if w.op is OpClass.GROUPED and w.shape}
    by_card: dict[str, list[float]] = {}
    for card in {d.gpu for d in devices.devices}:
        slower = MARLIN.get(card, MARLIN_ELSEWHERE)
        packed = []
        for work in grouped.values():
            groups, rows, n, k = work.shape
            saved = 2 * min(groups, rows) * n * k * (1 - MXFP4_BITS / PLAIN_BITS)
            # Without a shape: tiles are small, so few rows of an expert waste nothing.
            packed.append(Work(work.op, work.dtype, slower * work.flops, int(work.num_bytes - saved)))
        # Tables of grouped products are of 16-bit weights.
        by_card[card] = [cost.us for cost in price_works(packed, card, None)]
    columns = [by_card[d.gpu] for d in devices.devices]
    return dict(zip(grouped, map(list, zip(*columns, strict=True)), strict=True))


def _packed(trace: Trace, costs: Costs, devices: Cluster) -> Costs:
    changed = packed_us(trace, devices)
    rows = tuple(
        tuple(replace(cost, us=us) for cost, us in zip(row, changed[n], strict=True)) if n in changed else row
        for n, row in enumerate(costs.costs)
    )
    return replace(costs, costs=rows)


@cache
def _recorded(model: str) -> ServedSteps:
    """Steps without devices; recordings are shared."""
    steps = ServedSteps(model, Cluster((), ()))
    is_compiled = all(outlines.find(step) for step in steps.anchors)
    return replace(steps, is_compiled=is_compiled)


def served(model: PublishedModel, devices: Cluster) -> ServedSteps:
    """Served steps of a model on devices; compiled where outlines are known."""
    recorded = _recorded(model.name)
    kind = MxSteps if model.is_mxfp4 else ServedSteps
    steps = kind(model.name, devices, is_compiled=recorded.is_compiled)
    steps.__dict__["family"] = recorded.family
    return steps


def launches(model: PublishedModel) -> str:
    return "compiled" if _recorded(model.name).is_compiled else "eager"
