"""started: from a model's name to a service that answers, with everything HTTP needs of it.

    with started("tiny-llama", cluster) as ready:
        ready.app, ready.service

Puts together what the other modules make: plans (`planning`), workers (`local`), text, engine, HTTP.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UnknownName
from tessera.ir import AWAY, Cluster, DeviceKind, Objective
from tessera.serve.limits import Limits
from tessera.serve.service import AUTO, Service, ServiceConfig
from tessera.serve.steps import ROWS, SLOTS
from tessera.serve.text import open_text

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tessera.execute.worker_stepper import MakeHub
    from tessera.serve.local import Local
    from tessera.serve.planning import Prepared

# Policy that a service can be told to follow -> what it is planned for; auto has both, the monitor decides.
OBJECTIVES = {
    AUTO: (Objective.THROUGHPUT, Objective.LATENCY),
    "throughput": (Objective.THROUGHPUT,),
    "latency": (Objective.LATENCY,),
}


@dataclass(frozen=True)
class Options:
    """What is served and how; None: a size that suits the model."""

    # What clients call it; empty: the model's own name, of a folder its last part.
    name: str = ""
    slots: int | None = None
    rows: int | None = None
    max_len: int | None = None
    chunk: int | None = None
    # Of a folder: random weights in place of its own.
    random_weights: bool = False
    policy: str = AUTO
    # How workers pass bytes on; see `execute.transport`.
    transport: str = "auto"
    max_waiting: int = 1024
    keys: tuple[str, ...] = ()
    # True if it listens on this machine only.
    is_local: bool = True
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Ready:
    """A service that answers, and the application in front of it."""

    name: str
    service: Service
    app: "FastAPI"


@contextmanager
def started(
    model: str,
    cluster: Cluster,
    options: Options | None = None,
    *,
    hub: "MakeHub | None" = None,
    advance: Callable[[str], None] = lambda what: None,
) -> Iterator[Ready]:
    """Plans, starts workers, and stops them at the end; `advance` hears what is done next.

    `hub` makes the way to workers that are not processes of this machine.
    """
    from tessera.serve.local import Local

    options = options or Options()
    prepared = _prepared(model, cluster, options, advance)
    advance("starting workers")
    local = Local(prepared, transport=options.transport, hub=hub)
    with local, _serving(model, local, options) as ready:
        yield ready


def _prepared(model: str, cluster: Cluster, options: Options, advance: Callable[[str], None]) -> "Prepared":
    """The model with its plans."""
    from tessera.serve.planning import Wanted, prepare

    policies = _objectives(options.policy)
    slots, rows = options.slots or SLOTS, options.rows or ROWS
    wanted = Wanted(
        slots,
        rows,
        options.max_len,
        options.chunk,
        policies=policies,
        random_weights=options.random_weights,
    )
    if any(d.kind is DeviceKind.CUDA and d.ordinal != AWAY for d in cluster.devices):
        from tessera.serve.gpu import prepare_on_gpus

        return prepare_on_gpus(model, cluster, wanted, advance=advance)
    return prepare(model, cluster, wanted, advance=advance)


@contextmanager
def _serving(model: str, local: "Local", options: Options) -> Iterator[Ready]:
    """A service over steppers that are started."""
    from tessera.capture import place_of
    from tessera.serve.app import create_app
    from tessera.serve.metrics import Metrics
    from tessera.serve.pictures import eyes_of
    from tessera.serve.records import Endpoint
    from tessera.serve.replan import PreparedPlanner
    from tessera.serve.sight import sight_of

    made = local.prepared.model
    shape = made.shape
    name = options.name or (Path(model).name if Path(model).is_dir() else model)
    text = open_text(place_of(model), shape.vocab_size)
    metrics = Metrics(name, lambda: service.snapshot())  # noqa: PLW0108 - each needs the other
    service = Service(
        local.stepper,
        shape,
        text,
        model=name,
        config=ServiceConfig(max_waiting=options.max_waiting),
        observer=metrics,
        sight=sight_of(made),
        planner=PreparedPlanner(local.prepared),
    )
    endpoint = Endpoint(
        name,
        service,
        text,
        shape.capacity,
        shape.vocab_size,
        int(time.time()),
        lambda: local.stepper.plans,
        eyes_of(made),
    )
    with service:
        app = create_app(endpoint, metrics, options.limits, options.keys, options.is_local)
        yield Ready(name, service, app)


def _objectives(policy: str) -> tuple[Objective, ...]:
    if policy not in OBJECTIVES:
        raise UnknownName("policy", policy, OBJECTIVES)
    return OBJECTIVES[policy]
