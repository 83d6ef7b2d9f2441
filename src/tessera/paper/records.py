"""What the evaluation is made of: workloads, wires, cases, and what came out of a case.

A workload is one batch of alike requests of a model: its steps and how often each runs. A case is a workload
on some devices joined by one kind of wire, with so many batches in flight; every figure about throughput is a
set of cases, and cases that several figures share are worked out once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tessera.capture import known_models
from tessera.errors import UnknownName
from tessera.ir import Cluster, Device, Link, Step
from tessera.plan.baselines import COARSE
from tessera.profile import LINKS, gpu, parse_devices

# Denoising steps of one picture.
DENOISE_STEPS = 28


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of requests of one model; `output` tokens each, or one picture."""

    model: str
    batch: int
    prompt: int
    output: int

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of one batch, in order."""
        kinds = known_models().get(self.model)
        if kinds is None:
            raise UnknownName("model", self.model, known_models())
        if "decode" not in kinds:
            return (Step(self.model, kinds[0], self.batch, self.prompt),)
        prefill = Step(self.model, "prefill", self.batch, self.prompt, 0, self.output)
        return prefill, Step(self.model, "decode", self.batch, self.prompt + self.output)

    @property
    def counts(self) -> tuple[int, ...]:
        """Runs of each step."""
        return (1, self.output) if len(self.steps) > 1 else (DENOISE_STEPS,)

    @property
    def title(self) -> str:
        """In words."""
        if len(self.steps) > 1:
            return f"{self.model}, batch {self.batch}, {self.prompt} + {self.output} tokens"
        return f"{self.model}, batch {self.batch}, {DENOISE_STEPS} steps a picture"


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
    """Which policies are worked out beside the planner's own and the coarse ones, and in what time."""

    # Seconds for the mixed-integer program of the single placement; None: it is left out.
    milp_s: float | None = None
    # The latency policy, which takes several times as long to plan as all others together.
    has_latency: bool = False
    # The coarse policies only: for cards that are alike.
    is_coarse: bool = False

    def joined(self, other: "Effort") -> "Effort":
        """What satisfies both."""
        limits = [x for x in (self.milp_s, other.milp_s) if x is not None]
        return Effort(
            max(limits, default=None),
            self.has_latency or other.has_latency,
            self.is_coarse and other.is_coarse,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to plan and simulate."""

    workload: Workload
    # Names of GPUs, as `tessera gpus` lists them.
    gpus: tuple[str, ...]
    wire: Wire
    slots: int = 4
    effort: Effort = field(default=Effort(), compare=False)

    @property
    def pair(self) -> str:
        """As in the documents: a100+l40s, or 2x a100+2x l40s."""
        counted = {name: self.gpus.count(name) for name in self.gpus}
        return "+".join(name if n == 1 else f"{n}x {name}" for name, n in counted.items())

    def cluster(self) -> Cluster:
        """The devices, every two joined by a wire of their own in each direction."""
        devices: tuple[Device, ...] = parse_devices(",".join(f"emu:{name}" for name in self.gpus))
        links = tuple(
            Link(a.name, b.name, self.wire.name, self.wire.latency_us, self.wire.gbps)
            for a in devices
            for b in devices
            if a.name != b.name
        )
        return Cluster(devices, links)

    def doubled(self) -> "Case":
        """Two of the better card in place of a pair."""
        best = max(dict.fromkeys(self.gpus), key=_strength)
        return replace(self, gpus=(best, best), effort=Effort(is_coarse=True))


def _strength(name: str) -> float:
    """What makes a card the better one: compute times bandwidth, by the data sheet."""
    found = gpu(name)
    return (found.bf16_tflops or found.fp16_tflops) * found.memory_gbps


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the policies of a case reach, in requests per second, simulated; None: does not fit or apply."""

    policies: Mapping[str, float | None]
    # No mix of placements on these devices is faster, by busy time under the same costs; None without a plan.
    bound_per_s: float | None
    # Busy time of the single placement alone, which needs enough requests in flight to be reached.
    single_placement_busy_per_s: float | None
    # Whether the mixed-integer program was solved to its end.
    single_placement_note: str
    num_lanes: int
    usd_per_hour: float | None
    # Share of the modelled time by source of its price: measured, table, fitted, class.
    sources: Mapping[str, float]
    cpu_s: float
    # Why there is no plan at all.
    why: str = ""

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The best of the other policies on the same devices."""
        return self._best([name for name in self.policies if name not in OWN])

    @property
    def best_coarse(self) -> tuple[str, float] | None:
        """The best of those that are not kernel-level."""
        return self._best(COARSE)

    def _best(self, names: Iterable[str]) -> tuple[str, float] | None:
        rated = [(rate, name) for name in names if (rate := self.policies.get(name))]
        if not rated:
            return None
        rate, name = max(rated)
        return name, rate

    @property
    def own(self) -> float | None:
        """The throughput plan."""
        return self.policies.get("throughput")

    @property
    def source(self) -> str:
        """What kind of figures these are, in words."""
        return f"simulated on {costs_in_words(self.sources)} costs"


# Policies that are this system's own; the others are baselines.
OWN = ("throughput",)


def costs_in_words(sources: Mapping[str, float]) -> str:
    """measured, tables and modelled, with their shares of the time."""
    groups = {
        "measured": sources.get("measured", 0.0),
        "tables": sources.get("table", 0.0),
        "modelled": sources.get("fitted", 0.0) + sources.get("class", 0.0),
    }
    words = [f"{name} {share:.0%}" for name, share in groups.items() if share >= 0.005]
    return words[0].split()[0] if len(words) == 1 else " / ".join(words)
