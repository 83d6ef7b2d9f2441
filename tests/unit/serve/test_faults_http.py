"""Clients that do harm, beside clients that do not: the real engine and the real server over a toy model.

A smaller version of what `benchmarks/bench_serve.py` does with ten thousand sockets.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("fastapi")

import http_factory
from bad_clients import BadClients, Counts
from serving_factory import ToyStepper, service_of
from tessera.serve.limits import HttpLimits
from tessera.serve.load import LoadOptions, LoadRun, figures, measure
from tessera.serve.metrics import Metrics
from tessera.serve.openai.read import Endpoint, ModelCard
from tessera.serve.records import Shape
from tessera.serve.service import Service
from tessera.serve.text import ByteText

SHAPE = Shape(microbatches=2, rows=8, capacity=256, sizes=(8, 32), pool_tokens=16 * 129, vocab_size=258)
# A slow reader is let go after a second, so that the test need not wait for a minute.
LIMITS = HttpLimits(connections=600, stall_s=1.0, drain_s=2.0)
GOOD = LoadOptions(
    60, 12, prompt_tokens=40, output_tokens=12, api="completions", num_distinct=6, timeout_s=30.0
)


@dataclass(frozen=True)
class Met:
    """A server that has met bad clients."""

    service: Service
    url: str
    counts: Counts
    good: LoadRun


async def _meet(url: str) -> tuple[Counts, LoadRun]:
    """Good clients while bad ones are there."""
    bad = BadClients(url, "toy", max_tokens=150)
    running = asyncio.create_task(bad.run(idle=300, slow=10, leave=4))
    await asyncio.wait_for(bad.is_up.wait(), 30.0)
    good = await measure(url, GOOD, lambda what: None)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return bad.counts, good


@pytest.fixture(scope="module")
def met() -> Iterator[Met]:
    with service_of(ToyStepper(SHAPE)) as service:
        endpoint = Endpoint(
            ModelCard("toy", ByteText(), SHAPE.capacity, SHAPE.vocab_size), service, 1_700_000_000
        )
        with http_factory.serving(endpoint, Metrics("toy", service.snapshot), LIMITS) as server:
            counts, good = asyncio.run(_meet(server.url))
            yield Met(service, server.url, counts, good)


def test_the_bad_clients_were_there(met: Met) -> None:
    """The test is worth something: sockets idled, readers dawdled, streams were left in the middle."""
    assert (300, 10, 0) == (met.counts.idle, met.counts.slow, met.counts.refused)
    assert met.counts.left > 10


def test_good_clients_see_no_error(met: Met) -> None:
    """Every good request is answered."""
    found = figures(met.good)

    assert {} == found["errors_by_kind"]
    assert found["completed"] == GOOD.num_requests


def test_good_clients_get_their_own_answers(met: Met) -> None:
    """No answer is mixed up with that of a client who left or reads slowly."""
    verified = figures(met.good)["verify"]

    assert (6, 0) == (verified["distinct_answers"], verified["mixed_up"])


def test_who_left_holds_no_row(met: Met) -> None:
    """When all have gone nothing runs and nothing waits, and what was left counts as cancelled."""
    end_s = time.monotonic() + 10.0
    while (now := met.service.snapshot()).running or now.waiting:
        assert time.monotonic() < end_s, f"{now.running} run and {now.waiting} wait for nobody"
        time.sleep(0.05)

    assert now.finished["cancelled"] >= met.counts.left


def test_the_server_goes_on(met: Met) -> None:
    """Afterwards the same load is answered as before."""
    again = figures(asyncio.run(measure(met.url, GOOD, lambda what: None)))

    assert (GOOD.num_requests, 0, 0) == (again["completed"], again["errors"], again["verify"]["mixed_up"])
