"""What the evaluation is made of: loads, wires, cases, and what came out of a case.

A load is alike requests of a model, as many as there can be: whole ones, or their prefills or decodes alone,
with or without a limit of time. A case is a load on some devices joined by one kind of wire; batch and
microbatches are each policy's own to choose. Every figure about throughput is a set of cases, and cases that
several figures share are worked out once. A shape is a load at one batch, for what has to be of one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera import ir
from tessera.capture import known_models
from tessera.errors import UnknownName
from tessera.ir import Cluster, Device, Link, Step
from tessera.plan import BATCHES
from tessera.plan.baselines import COARSE
from tessera.profile import LINKS, gpu, parse_devices

# Denoising steps of one picture.
DENOISE_STEPS = 28
FAMILIES = {
    "llama-3-8b": "dense",
    "gpt-oss-20b": "mixture of experts",
    "mamba-codestral-7b": "state space",
    "qwen2.5-vl-7b": "multimodal",
    "sd3.5-medium": "diffusion",
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one model: `output` tokens each behind a prompt, or pictures."""

    model: str
    prompt: int
    output: int
    # request, prefill or decode; of a model without decodes, its only step.
    phase: str = "request"
    # Milliseconds: per output token or denoising step, of prefills alone until they are done.
    limit_ms: float | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those of a request, in order."""
        kinds = known_models().get(self.model)
        if kinds is None:
            raise UnknownName("model", self.model, known_models())
        if "decode" not in kinds:
            return (Step(self.model, kinds[0], 1, self.prompt),)
        prefill = Step(self.model, "prefill", 1, self.prompt, 0, self.output)
        decode = Step(self.model, "decode", 1, self.prompt + self.output)
        return {"request": (prefill, decode), "prefill": (prefill,), "decode": (decode,)}[self.phase]

    @property
    def counts(self) -> tuple[int, ...]:
        """Runs of each step in a request."""
        return (1, self.output) if len(self.steps) > 1 else (1,)

    @property
    def target(self) -> ir.Load:
        """As the planner takes it."""
        tokens = self.output if len(self.steps) > 1 else 1
        is_prefill = self.steps[-1].kind == "prefill"
        limits = (None, self.limit_ms) if is_prefill else (self.limit_ms, None)
        return ir.Load(1, tokens, tpot_ms=limits[0], ttft_ms=limits[1])

    @property
    def per_result(self) -> int:
        """What the planner counts as tokens, in one of what the figures count."""
        return {"request": self.output, "denoise": DENOISE_STEPS}.get(self.kind, 1)

    @property
    def counted(self) -> str:
        """What the figures count."""
        return {"decode": "tokens", "denoise": "pictures"}.get(self.kind, "requests")

    @property
    def tokens_per_result(self) -> int:
        """Tokens, of prompts where there is no answer, in one of them; pictures have none."""
        return {"request": self.output, "prefill": self.prompt, "decode": 1}.get(self.kind, 0)

    @property
    def kind(self) -> str:
        """request, prefill or decode; of a model without decodes, its step."""
        return self.phase if len(self.steps) > 1 else self.steps[0].kind

    @property
    def title(self) -> str:
        """In words."""
        what = {
            "request": f"{self.prompt} + {self.output} tokens",
            "prefill": f"prefills of {self.prompt} tokens",
            "decode": f"decodes at {self.prompt + self.output} tokens",
        }.get(self.kind, f"{DENOISE_STEPS} steps a picture")
        limit = "" if self.limit_ms is None else f", within {self.limit_ms:g} ms"
        return f"{self.model}, {what}{limit}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one model at one batch."""

    load: Load
    batch: int

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.load.title}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Wire:
    """What joins every two devices."""

    name: str
    latency_us: float
    gbps: float

    @classmethod
    def preset(cls, name: str) -> "Wire":
        """One that has a name: pcie4, nvlink and so on."""
        if name not in LINKS:
            raise UnknownName("link", name, LINKS)
        return cls(name, LINKS[name].latency_us, LINKS[name].gbps)

    @classmethod
    def of_gbps(cls, gbps: float, latency_us: float = 10.0) -> "Wire":
        """One of a given bandwidth."""
        return cls(f"{gbps:g} GB/s", latency_us, gbps)


@dataclass(frozen=True, slots=True)
class Effort:
    """How closely a case is looked at, and which policies are worked out beside the coarse ones."""

    # Batches of steps that are planned alone.
    batches: tuple[int, ...] = BATCHES
    # Search of a service: full or quick.
    search: str = "full"
    # The single placement by a mixed-integer program.
    has_single: bool = False
    # The latency policy, which takes several times as long to plan as all others together.
    has_latency: bool = False

    def joined(self, other: "Effort") -> "Effort":
        """What satisfies both."""
        closer = max(self, other, key=lambda x: len(x.batches))
        search = "full" if "full" in (self.search, other.search) else "quick"
        has_single, has_latency = self.has_single or other.has_single, self.has_latency or other.has_latency
        return Effort(closer.batches, search, has_single, has_latency)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to plan and simulate."""

    load: Load
    # Names of GPUs, as `tessera gpus` lists them.
    gpus: tuple[str, ...]
    wire: Wire
    effort: Effort = field(default=Effort(), compare=False)

    @property
    def pair(self) -> str:
        """As in the documents: a100+l40s, or 2x a100+2x l40s."""
        counted = {name: self.gpus.count(name) for name in self.gpus}
        return "+".join(name if n == 1 else f"{n}x {name}" for name, n in counted.items())


def wired(gpus: Sequence[str], wire: Wire) -> Cluster:
    """The devices, every two joined by a wire of their own in each direction."""
    devices: tuple[Device, ...] = parse_devices(",".join(f"emu:{name}" for name in gpus))
    links = tuple(
        Link(a.name, b.name, wire.name, wire.latency_us, wire.gbps)
        for a in devices
        for b in devices
        if a.name != b.name
    )
    return Cluster(devices, links)


@dataclass(frozen=True, slots=True)
class Reached:
    """What one policy gives at its own best, simulated."""

    # What the load counts per second: requests, tokens or pictures.
    per_s: float
    # Per output token or denoising step; of prefills alone, until they are done.
    ms: float
    # Sequences on each device.
    batch: Mapping[str, int]
    microbatches: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the policies of a case reach; one that does not fit, apply or keep to the limit is not there."""

    policies: Mapping[str, Reached]
    # No mix of placements on these devices is faster at the plan's batch, by busy time; None without a plan.
    bound_per_s: float | None
    # Which policy the chosen plan is.
    chosen: str
    # How far the mixed-integer program was solved.
    single_placement_note: str
    # Its rate by busy time, which needs enough requests in flight to be reached.
    single_placement_busy_per_s: float | None
    num_lanes: int
    usd_per_hour: float | None
    # Share of the modelled time by source of its price: measured, table, fitted, class.
    sources: Mapping[str, float]
    # compiled or eager.
    launches: str
    cpu_s: float
    # Why there is no plan at all.
    why: str = ""

    @property
    def rates(self) -> dict[str, float]:
        """Policy -> what it gives per second."""
        return {name: reached.per_s for name, reached in self.policies.items()}

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The best of the other policies on the same devices."""
        return self._best([name for name in self.policies if name not in OWN])

    @property
    def best_coarse(self) -> tuple[str, float] | None:
        """The best of those that are not kernel-level."""
        return self._best(COARSE)

    def _best(self, names: Iterable[str]) -> tuple[str, float] | None:
        rated = [(rate, name) for name in names if (rate := self.rates.get(name))]
        if not rated:
            return None
        rate, name = max(rated)
        return name, rate

    def alike(self, num: int) -> tuple[str, float, float | None] | None:
        """(card that is best alone, rate of so many of it with a replica on each, their rent)."""
        alone = self.policies.get("single")
        if alone is None:
            return None
        (device,) = alone.batch
        card = gpu(device.removeprefix("emu:").split("#")[0])
        return card.name, num * alone.per_s, None if card.usd_per_hour is None else num * card.usd_per_hour

    @property
    def own(self) -> float | None:
        """The throughput plan."""
        return self.rates.get("throughput")

    def over(self, policy: str | None) -> float | None:
        """The throughput plan over another policy."""
        other = self.rates.get(policy) if policy else None
        return self.own / other if self.own and other else None

    @property
    def ratios(self) -> dict[str, Any]:
        """The best baseline, and the plan over it and over data-parallel; as rows have them."""
        best = self.best_baseline
        return {
            "best_baseline": best[0] if best else None,
            "ratio_to_best_baseline": self.over(best[0] if best else None),
            "ratio_to_data_parallel": self.over("data-parallel"),
        }

    @property
    def source(self) -> str:
        """What kind of figures these are, in words."""
        return f"simulated on {costs_in_words(self.sources)} costs"


# Policies that are this system's own; the others are baselines.
OWN = ("throughput",)


def usd_per_million(usd_per_hour: float | None, per_s: float | None) -> float | None:
    """Dollars for a million at a rate."""
    return usd_per_hour / 3600 / per_s * 1e6 if usd_per_hour and per_s else None


def costs_in_words(sources: Mapping[str, float]) -> str:
    """measured, tables and modelled, with their shares of the time."""
    groups = {
        "measured": sources.get("measured", 0.0),
        "tables": sources.get("table", 0.0),
        "modelled": sources.get("fitted", 0.0) + sources.get("class", 0.0),
    }
    words = [f"{name} {share:.0%}" for name, share in groups.items() if share >= 0.005]
    return words[0].split()[0] if len(words) == 1 else " / ".join(words)
