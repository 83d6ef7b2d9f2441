"""started: from a model's name to a service that answers, with everything HTTP needs of it.

    with started("tiny-llama", cluster) as running:
        running.app, running.service

Puts together what the other modules make: plans (`planning`, `gpu`), workers, text, engine, HTTP.
Encoders (`embedding`) and pipelines (`images`) are served without plans and workers: `started_alone`.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.capture import place_of
from tessera.execute.worker_stepper import MakeHub
from tessera.ir import AWAY, Cluster, DeviceKind, Objective, Plan
from tessera.kernels import PAGE
from tessera.serve.endpoint import Endpoint
from tessera.serve.limits import HttpLimits
from tessera.serve.planning import Average, Prepared, ServeSpec, prepare
from tessera.serve.service import Service
from tessera.serve.tokenizer import open_text

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tessera.serve.embedding import EmbeddingService
    from tessera.serve.images import ImageService


@dataclass(frozen=True)
class ServeOptions:
    # What clients call it; empty: the model's own name, of a folder its last part.
    name: str = ""
    spec: ServeSpec = field(default_factory=ServeSpec)
    # How workers pass bytes on; see `execute.transport`.
    transport: str = "auto"
    max_waiting: int = 1024
    # False: what sequences have in common is read anew for each of them.
    prefix_caching: bool = True
    keys: tuple[str, ...] = ()
    # True if it listens on this machine only.
    is_local: bool = True
    limits: HttpLimits = field(default_factory=HttpLimits)
    # Where plans are kept between starts; None: each start plans anew.
    kept: Path | None = None


@dataclass(frozen=True)
class RunningService:
    """A service that answers, and the application in front of it."""

    name: str
    service: Service
    app: "FastAPI"
    # Three lines: what was chosen, what is expected, what another device would add.
    summary: tuple[str, ...]


@contextmanager
def started(
    model: str,
    cluster: Cluster,
    options: ServeOptions | None = None,
    *,
    hub: MakeHub | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> Iterator[RunningService]:
    """Plans, starts workers, and stops them at the end; `advance` hears what is done next.

    `hub` makes the way to workers that are not processes of this machine.
    """
    from tessera.serve.app import create_app
    from tessera.serve.grammar import open_grammars
    from tessera.serve.metrics import Metrics
    from tessera.serve.replan import PreparedPlanner

    options = options or ServeOptions()
    if any(d.kind is DeviceKind.CUDA and d.ordinal != AWAY for d in cluster.devices):
        from tessera.serve.gpu import prepare_on_gpus

        prepared = prepare_on_gpus(model, cluster, options.spec, kept=options.kept, advance=advance)
    else:
        prepared = prepare(model, cluster, options.spec, kept=options.kept, advance=advance)
    advance("starting workers")
    made, shape = prepared.model, prepared.model.shape
    name = options.name or (Path(model).name if Path(model).is_dir() else model)
    text, created = open_text(place_of(model)), int(time.time())
    sight, eyes = made.senses() or (None, None)
    metrics = Metrics(name, lambda: service.snapshot())  # noqa: PLW0108 - each needs the other
    with prepared.workers(options.transport, hub) as stepper:
        service = Service(
            stepper,
            shape,
            text,
            model=name,
            max_waiting=options.max_waiting,
            prefix_caching=options.prefix_caching,
            observer=metrics,
            sight=sight,
            planner=PreparedPlanner(prepared),
        )
        sizes, grammars = (shape.max_tokens, shape.vocab_size), open_grammars(text, shape.vocab_size)
        endpoint = Endpoint(name, service, text, *sizes, created, lambda: stepper.plans, eyes, grammars)
        with service:
            app = create_app(endpoint, metrics, options.limits, options.keys, options.is_local)
            with closing(app.state.reading) as reading:
                reading.start()
                yield RunningService(name, service, app, lines_of(prepared, options.spec.average))


@dataclass(frozen=True)
class RunningAlone:
    """An encoder or a pipeline that is served on one device, and the application in front of it."""

    name: str
    service: "EmbeddingService | ImageService"
    app: "FastAPI"
    device: str
    # What else there is to say of it: a line, and figures by name.
    summary: str
    sizes: dict[str, int]


def is_alone(model: str) -> bool:
    """True for a model that is served on one device: `started_alone` is for it."""
    from tessera.serve.embedding import embeds
    from tessera.serve.images import makes_images

    return makes_images(model) or embeds(model)


@contextmanager
def started_alone(
    model: str,
    cluster: Cluster,
    options: ServeOptions | None = None,
    *,
    advance: Callable[[str], None] = lambda what: None,
) -> Iterator[RunningAlone]:
    """Serves the embeddings or the pictures of a folder on the first device."""
    from tessera.serve.app import create_app
    from tessera.serve.images import makes_images
    from tessera.serve.metrics import Metrics

    options = options or ServeOptions()
    name = options.name or Path(place_of(model)).name
    advance(f"building {model}")
    first = cluster.devices[0]
    device = f"cuda:{first.ordinal}" if first.kind is DeviceKind.CUDA else "cpu"
    with ExitStack() as stack:
        make = _pictures if makes_images(model) else _vectors
        endpoint, summary, sizes = make(model, name, device, options, stack)
        service = endpoint.images or endpoint.embeddings
        assert service is not None, "one of them was made"
        metrics = Metrics(name, service.snapshot)
        app = create_app(endpoint, metrics, options.limits, options.keys, options.is_local)
        stack.enter_context(closing(app.state.reading)).start()
        yield RunningAlone(name, service, app, device, summary, sizes)


def _vectors(
    model: str, name: str, device: str, options: ServeOptions, stack: ExitStack
) -> tuple[Endpoint, str, dict[str, int]]:
    from tessera.serve.embedding import EmbeddingService, Encoder

    encoder = Encoder.open(model, device, options.spec.random_weights)
    service = stack.enter_context(EmbeddingService(encoder, name))
    capacity = min(encoder.max_tokens, options.spec.capacity or encoder.max_tokens)
    text = open_text(place_of(model))
    sizes = (capacity, encoder.vocab_size, int(time.time()))
    endpoint = Endpoint(name, service, text, *sizes, embeddings=service)
    told = {"max_len": capacity, "dimensions": encoder.size}
    return endpoint, f"embeddings of {encoder.size} numbers", told


def _pictures(
    model: str, name: str, device: str, options: ServeOptions, stack: ExitStack
) -> tuple[Endpoint, str, dict[str, int]]:
    from tessera.serve.images import ImageService, TextToImage
    from tessera.serve.text import ByteText

    service = stack.enter_context(ImageService(TextToImage.open(model, device), name))
    endpoint = Endpoint(name, service, ByteText(), 0, 0, int(time.time()), images=service)
    return endpoint, "pictures from words", {}


# For people. Rates are modelled, at full load: the plan's own simulated one, or where plans were rehearsed
# the one found so. Another card of each kind is counted as a copy of the service beside it, which any router
# can do: a plan over all of them is at least as good.


def lines_of(prepared: Prepared, average: Average) -> tuple[str, str, str]:
    """What was chosen, what is expected, and what one more card would add."""
    return _chosen(prepared), _expected(prepared, average), _one_more(prepared, average)


def _chosen(prepared: Prepared) -> str:
    shape, plan = prepared.model.shape, prepared.plans[0]
    sizes = ", ".join(f"{size:,}" for size in shape.sizes)
    when = f"captured in {prepared.capture_s:.1f} s" if prepared.capture_s else "as planned before"
    held = shape.microbatches * prepared.model.state_bytes
    parts = [f"{name} {100 * share:.0f} %" for name, share in _shares(plan).items()]
    where = f"work on {', '.join(parts)}" if len(parts) > 1 else f"all work on {plan.cluster.names[0]}"
    return (
        f"chosen: {shape.microbatches} x {shape.rows} requests at once, steps of {sizes} tokens ({when}), "
        f"{shape.microbatches} x {shape.pool_tokens - PAGE:,} tokens in pages ({held / 1e9:.2f} GB), "
        f"a request up to {shape.max_tokens:,}; {where}"
    )


def _expected(prepared: Prepared, average: Average) -> str:
    plan = prepared.plans[0]
    per_s = prepared.rehearsed.get(plan.policy) or _tokens_per_s(prepared, average, plan.simulated_per_s)
    if not per_s:
        return "expected: not modelled"
    held = prepared.model.shape.microbatches * prepared.model.shape.rows
    return (
        f"expected (modelled, full load, {average.prompt} tokens in and {average.output} out): "
        f"{per_s:,.0f} tokens/s, {1e3 * held / per_s:,.1f} ms a token"
    )


def _one_more(prepared: Prepared, average: Average) -> str:
    plan = prepared.plans[0]
    added = {}
    for number, device in enumerate(plan.cluster.devices):
        us = sum(
            count * sum(costs.us(launch, number) for launch in range(len(costs.costs)))
            for costs, count in zip(plan.costs, plan.unit.counts, strict=True)
        )
        kind = device.gpu or device.name
        if us:
            added[kind] = _tokens_per_s(prepared, average, 1e6 / us)
    if not added:
        return "with one more device: not modelled"
    parts = [f"{kind} adds {per_s:,.0f}" for kind, per_s in added.items()]
    return f"with one more card, as a copy beside these (modelled, tokens/s, at least): {', '.join(parts)}"


def _tokens_per_s(prepared: Prepared, average: Average, units_per_s: float) -> float:
    """A unit is what a microbatch does for all its rows' average requests."""
    return units_per_s * prepared.model.shape.rows * average.output


def _shares(plan: Plan) -> dict[str, float]:
    """Device -> its share of all devices' time at work."""
    busy: dict[str, float] = defaultdict(float)
    for lane in plan.lanes:
        weight = lane.rate_per_s if plan.objective is Objective.THROUGHPUT else 1.0
        for costs, count, places in zip(plan.costs, plan.unit.counts, lane.placement.devices, strict=True):
            for launch, device in enumerate(places):
                busy[plan.cluster.names[device]] += weight * count * costs.us(launch, device)
    total = sum(busy.values())
    return {name: us / total for name, us in busy.items()} if total else {}
