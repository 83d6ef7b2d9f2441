"""started: from a model's name to a running service with its HTTP application.

Encoders and pipelines are served on the first device (`single_device`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.capture import place_of
from tessera.cli.serve_options import ServeConfig, log_line, read_keys, template_of
from tessera.errors import TesseraError
from tessera.execute.worker_stepper import MakeHub
from tessera.ir import BufferKind, Cluster, DeviceKind, ServicePlan, load, units
from tessera.kernels import PAGE
from tessera.serve.background import PlannerProcess
from tessera.serve.planning import Prepared, default_folder, prepare
from tessera.serve.records import COST_ERROR
from tessera.serve.service import Service, say
from tessera.serve.single_device import is_single_device
from tessera.serve.text import MARK, open_text

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tessera.serve.metrics import Metrics
    from tessera.serve.openai.read import Endpoint
    from tessera.serve.single_device import SingleDeviceService


@dataclass(frozen=True)
class RunningService:
    title: str
    service: "Service | SingleDeviceService"
    app: "FastAPI"
    summary: tuple[str, ...]
    facts: dict[str, Any]


class Phases:
    """Seconds of a start by the first word of each line of progress."""

    def __init__(self, advance: Callable[[str], None]) -> None:
        self._advance, self._starts = advance, [("opening", time.perf_counter())]

    def __call__(self, what: str) -> None:
        self._starts.append((what.partition(" ")[0], time.perf_counter()))
        self._advance(what)

    def line(self) -> str:
        seconds: dict[str, float] = {}
        for (name, start_s), (_, stop_s) in pairwise([*self._starts, ("", time.perf_counter())]):
            seconds[name] = seconds.get(name, 0.0) + stop_s - start_s
        parts = ", ".join(f"{name} {num:.1f}" for name, num in seconds.items())
        return f"seconds of the start, {sum(seconds.values()):.1f} after imports: {parts}"


@contextmanager
def started(
    model: str,
    cluster: Cluster,
    config: ServeConfig,
    *,
    hub: MakeHub | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> Iterator[RunningService]:
    """`hub` connects workers of other machines."""
    name = config.served_model_name or (Path(model).name if Path(model).is_dir() else model)
    if name in config.adapters:
        raise TesseraError(
            f"this is the model's own name '{name}'", "Give the adapter another one.", "--lora"
        )
    with ExitStack() as stack:
        start = _Start(model, name, cluster, config, stack)
        if is_single_device(model):
            advance(f"building {model}")
            yield start.on_one_device()
        else:
            yield start.planned(hub, Phases(advance))


@dataclass(frozen=True)
class _Start:
    """`stack` ends what was started."""

    model: str
    name: str
    cluster: Cluster
    config: ServeConfig
    stack: ExitStack

    def planned(self, hub: MakeHub | None, advance: Phases) -> RunningService:
        from tessera.serve.grammar import open_grammars
        from tessera.serve.metrics import Metrics
        from tessera.serve.openai.read import Endpoint, ModelCard, folder_defaults

        config, place, enter = self.config, place_of(self.model), self.stack.enter_context
        text = open_text(place, template_of(config.chat_template))  # first: it may be missing
        defaults = folder_defaults(place, config.generation_config != "none")
        spec, plan = config.spec(self.cluster), load(ServicePlan, config.plan) if config.plan else None
        kept = default_folder() if config.plan_cache else None
        prepared = prepare(self.model, self.cluster, spec, plan=plan, kept=kept, advance=advance)
        advance("starting workers")
        metrics = Metrics(self.name, lambda: service.snapshot())  # noqa: PLW0108 - each needs the other
        stepper, planner = enter(prepared.workers(config.transport, hub)), prepared.planner
        shape = prepared.model.shape
        service = Service(
            stepper,
            prepared.policies,
            shape,
            text,
            model=self.name,
            max_waiting=config.max_waiting,
            prefix_caching=config.prefix_caching,
            meters=metrics,
            picture_inputs=prepared.model.picture_inputs,
            planner=enter(closing(PlannerProcess(planner))) if planner else None,
            log=log_line if config.log_json else say,
        )
        picture_reader, adapters = prepared.model.picture_reader, tuple(name for name, _ in spec.adapters)
        mark = MARK if picture_reader else ""
        sizes = shape.max_tokens, shape.vocab_size
        card = ModelCard(self.name, text, *sizes, mark, adapters=adapters, defaults=defaults)
        grammars = open_grammars(text, shape.vocab_size)
        endpoint = Endpoint(
            card, service, int(time.time()), lambda: service.policies, picture_reader, grammars
        )
        enter(service)
        app, summary = self._app(endpoint, metrics), (*lines_of(prepared), advance.line())
        return RunningService(self.name, service, app, summary, self._facts(service))

    def _facts(self, service: Service) -> dict[str, Any]:
        shape = service.shape
        return {
            "model": self.name,
            "devices": list(self.cluster.names),
            "policies": list(service.snapshot().policies),
            "microbatches": shape.microbatches,
            "seqs": shape.rows,
            "max_model_len": shape.capacity,
            "step_tokens": list(shape.sizes),
            "pool_tokens": shape.pool_tokens,
            "policy": service.policy,
        }

    def on_one_device(self) -> RunningService:
        from tessera.serve.metrics import Metrics
        from tessera.serve.openai.read import Endpoint, ModelCard
        from tessera.serve.single_device import Encoder, SingleDeviceService, TextToImage, makes_images
        from tessera.serve.text import ByteText

        name, config, first = self.name, self.config, self.cluster.devices[0]
        if config.lora:
            raise TesseraError(f"{name} is no language model, so it has no adapters", "Leave --lora out.")
        device = f"cuda:{first.ordinal}" if first.kind is DeviceKind.CUDA else "cpu"
        facts: dict[str, Any] = {"model": name, "devices": [device]}
        if makes_images(self.model):
            service = SingleDeviceService(TextToImage.open(self.model, device), name)
            makes, card = "pictures from words", ModelCard(name, ByteText(), 0, 0, makes="pictures")
        else:
            encoder = Encoder.open(self.model, device, config.random_weights)
            service, makes = SingleDeviceService(encoder, name), f"embeddings of {encoder.size} numbers"
            pooling, own = encoder.pooling, encoder.max_tokens
            most = min(own, config.max_model_len or own)
            text, sizes = open_text(place_of(self.model)), pooling.sizes
            card = ModelCard(name, text, most, encoder.vocab_size, "", pooling.prompt, sizes, "vectors")
            facts |= {"max_len": most, "dimensions": encoder.size}
        self.stack.enter_context(service)
        app = self._app(Endpoint(card, service, int(time.time())), Metrics(name, service.snapshot))
        return RunningService(f"{name} ({makes})", service, app, (), facts)

    def _app(self, endpoint: "Endpoint", metrics: "Metrics") -> "FastAPI":
        from tessera.serve.app import create_app
        from tessera.serve.server import is_loopback
        from tessera.serve.tracing import add_traces

        config = self.config
        keys, is_local = read_keys(config.api_key or ()), is_loopback(config.host)
        app = create_app(endpoint, metrics, config.limits, keys, is_local, config.root_path)
        if config.otlp_traces_endpoint:
            add_traces(app, endpoint.card.model, config.otlp_traces_endpoint, self.stack)
        self.stack.enter_context(closing(app.state.reading))
        return app


def lines_of(prepared: Prepared) -> tuple[str, str, str]:
    """By the rehearsal, at full load. One more card counts as a copy of the service behind a router."""
    plan = prepared.policies[0]
    return _chosen(prepared, plan), _expected(plan), _one_more(plan)


def _chosen(prepared: Prepared, plan: ServicePlan) -> str:
    when = f"captured in {prepared.capture_s:.1f} s" if prepared.capture_s else "as planned before"
    groups = "; ".join(
        f"{x.role} on {', '.join(x.devices)}, {x.microbatches} x {x.sequences} sequences, "
        f"steps of up to {x.tokens:,} tokens"
        for x in (group.size for group in plan.groups)
    )
    homes = {group.plan.home: (group.pool_tokens - PAGE) // len(group.windows) for group in plan.groups}
    pages = " + ".join(f"{tokens:,}" for tokens in homes.values())
    least = min(prepared.model.shape.of_group(group).max_tokens for group in plan.groups)
    others = [rival.policy for rival in plan.rivals if rival.policy != "latency"]
    why = ""
    if plan.policy == "data-parallel" and others:
        why = f" (no other policy is better by more than {COST_ERROR:.0%}: {', '.join(others)})"
    return (
        f"chosen: {plan.policy}{why}: {groups} ({when}), {pages} tokens in pages, a request up to {least:,}"
    )


def _expected(plan: ServicePlan) -> str:
    load, expected = plan.load, plan.expected
    if expected is None:
        return "expected: not modelled"
    return (
        f"expected (modelled, {expected.clients} requests at once, {load.prompt_tokens} tokens in and "
        f"{load.output_tokens} out): {expected.tokens_per_s:,.0f} tokens/s, "
        f"{expected.tpot_ms:,.1f} ms a token, {expected.ttft_ms:,.0f} ms to the first"
    )


def _one_more(plan: ServicePlan) -> str:
    added = _added_per_s(plan)
    if not added:
        return "with one more device: not modelled"
    cards = [d for d in plan.cluster.devices if not d.is_cpu]
    if 0 < len(cards) < len(plan.cluster.devices):
        per_s = added[cards[0].gpu or cards[0].name]
        trace = plan.plans[0].graphs[-1].trace
        need = trace.bytes_of(BufferKind.WEIGHT)
        names = dict(plan.plans[0].lanes[0].placement.fetched)
        sent = sum(b.size_bytes for b in trace.buffers if b.name in names)
        fetched = f"{units.size(sent)} are fetched in every step and " if sent else ""
        return (
            f"the GPU cannot hold all weights ({units.size(need)}), so {fetched}its host computes with the "
            f"rest; one like it that holds them would give about {per_s:,.0f} tokens/s (modelled)"
        )
    parts = [f"{kind} adds {per_s:,.0f}" for kind, per_s in added.items()]
    return f"with one more card, as a copy beside these (modelled, tokens/s, about): {', '.join(parts)}"


def _added_per_s(plan: ServicePlan) -> dict[str, float]:
    """Kind of device -> tokens per second, by busy time, of one that runs an average device's work."""
    expected, added = plan.expected, dict[str, float]()
    busy_s = sum(expected.busy) if expected else 0.0
    if expected is None or not busy_s or not sum(map(sum, expected.steps)):
        return added
    for number, device in enumerate(plan.cluster.devices):
        alone_us = planned_us = 0.0
        for group, counts in zip(plan.groups, expected.steps, strict=True):
            placed = group.plan.lanes[0].placement.devices
            for costs, devices, num in zip(group.plan.costs, placed, counts, strict=True):
                alone_us += num * costs.total_us(number)
                planned_us += num * sum(costs.us(launch, d) for launch, d in enumerate(devices))
        if alone_us:
            added[device.gpu or device.name] = expected.tokens_per_s * planned_us / alone_us / busy_s
    return added
