"""Scale: how much of the evaluation is worked out. `QUICK` is a coarse grid in minutes, `FULL` takes longer.

The workloads are the five families at their published sizes. Their shapes are choices of this evaluation and
not the publication's: a batch that fits an 80 GB card with four in flight, prompts and answers as in chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.errors import TesseraError
from tessera.paper.records import Effort, Wire, Workload

Pair = tuple[str, ...]

LLAMA = Workload("llama-3-8b", 32, 512, 128)
WORKLOADS = (
    LLAMA,
    Workload("gpt-oss-20b", 16, 512, 128),
    Workload("mamba-codestral-7b", 16, 512, 128),
    Workload("qwen2.5-vl-7b", 16, 512, 128),
    Workload("sd3.5-medium", 4, 1024, 0),
)
# The published pair, opposite strengths, and one GPU type beside a much faster one.
FIRST: Pair = ("a100", "l40s")
PAIRS = (FIRST, ("rtx-pro-6000", "h20"), ("h100", "l40s"))
MORE_PAIRS = (("h100", "h20"), ("h20", "l40s"), ("h100", "a100"), ("l40s", "l4"))


@dataclass(frozen=True, slots=True)
class Scale:
    """Grids of all figures."""

    name: str
    workloads: tuple[Workload, ...]
    pairs: tuple[Pair, ...]
    links: tuple[str, ...]
    slots: int
    # What is planned beside the coarse policies: for the first workload on the first pair, on the first pair,
    # and elsewhere. The latency policy of a large model takes longer to plan than all others together.
    first_effort: Effort
    pair_effort: Effort
    other_effort: Effort
    # Serving: the workload, loads as shares of the best capacity, requests a load, windows as multiples of
    # the monitor's own, thresholds in standard errors.
    served: Workload
    loads: tuple[float, ...]
    bursts: tuple[float, ...]
    num_requests: int
    windows: tuple[float, ...]
    thresholds: tuple[float, ...]
    # Numbers of GPUs.
    sizes: tuple[int, ...]
    # Bandwidths of the link, and the workloads they are tried on.
    gbps: tuple[float, ...]
    linked: tuple[Workload, ...]
    # The map of regimes.
    regime_pairs: tuple[Pair, ...]
    regime_links: tuple[str, ...]
    regime_workloads: tuple[Workload, ...]


def _grid(model: str, batches: Sequence[int], prompts: Sequence[int], output: int) -> tuple[Workload, ...]:
    return tuple(Workload(model, b, p, output) for b in batches for p in prompts)


QUICK = Scale(
    name="quick",
    workloads=WORKLOADS,
    pairs=PAIRS,
    links=("pcie4",),
    slots=4,
    first_effort=Effort(milp_s=6.0, has_latency=True),
    pair_effort=Effort(milp_s=5.0),
    other_effort=Effort(milp_s=3.0),
    served=LLAMA,
    loads=(0.2, 0.5, 0.65, 0.8, 0.95),
    bursts=(0.45,),
    num_requests=1500,
    windows=(0.1, 1.0, 10.0),
    thresholds=(0.0, 1.0, 3.0),
    sizes=(2, 4, 8),
    gbps=(1.0, 5.0, 25.0, 100.0, 400.0),
    linked=(LLAMA,),
    regime_pairs=(FIRST, ("h100", "h20"), ("rtx-pro-6000", "h20"), ("l40s", "l4")),
    regime_links=("pcie4",),
    regime_workloads=(*_grid("llama-3-8b", (8, 64), (256, 2048), 128),),
)
FULL = replace(
    QUICK,
    name="full",
    pairs=(*PAIRS, *MORE_PAIRS),
    links=("pcie4", "nvlink"),
    first_effort=Effort(milp_s=60.0, has_latency=True),
    pair_effort=Effort(milp_s=60.0, has_latency=True),
    other_effort=Effort(milp_s=20.0, has_latency=True),
    loads=(0.1, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.1, 1.4),
    bursts=(0.3, 0.5, 0.7),
    num_requests=4000,
    windows=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    thresholds=(0.0, 0.5, 1.0, 2.0, 4.0),
    sizes=(2, 4, 6, 8, 12, 16),
    gbps=(0.5, 1.0, 2.5, 5.0, 11.2, 25.0, 50.0, 100.0, 286.0, 1000.0),
    linked=(LLAMA, Workload("llama-3-8b", 4, 2048, 8), Workload("llama-3-8b", 64, 64, 256)),
    regime_pairs=(*PAIRS, *MORE_PAIRS),
    regime_links=("ib100", "pcie4", "nvlink"),
    regime_workloads=(
        *_grid("llama-3-8b", (8, 32, 128), (128, 1024), 128),
        *_grid("gpt-oss-20b", (8, 32), (128, 1024), 128),
        *_grid("mamba-codestral-7b", (8, 32), (128, 1024), 128),
        *_grid("qwen2.5-vl-7b", (8, 32), (512,), 128),
        *_grid("sd3.5-medium", (1, 8), (1024,), 0),
    ),
)


def narrowed(scale: Scale, models: Sequence[str], pairs: Sequence[Pair]) -> Scale:
    """The same with other models or pairs; a model that the scale has no shape for takes a usual one."""
    if models:
        known = {w.model: w for w in WORKLOADS}
        chosen = tuple(known.get(m, Workload(m, 4, 64, 16)) for m in models)
        for workload in chosen:
            _ = workload.steps  # an unknown model is refused here
        serving = [w for w in chosen if len(w.steps) > 1]
        scale = replace(
            scale,
            workloads=chosen,
            linked=chosen[:1],
            regime_workloads=chosen,
            served=serving[0] if serving else scale.served,
        )
    if pairs:
        for pair in pairs:
            if len(pair) < 2:
                message = f"'{'+'.join(pair)}' is no pair"
                raise TesseraError(message, "Write two GPUs, as a100+l40s.", "--pairs")
        scale = replace(scale, pairs=tuple(pairs), regime_pairs=tuple(pairs))
    return scale


def wires(names: Sequence[str]) -> tuple[Wire, ...]:
    """By name."""
    return tuple(Wire.preset(name) for name in names)
