"""Real models for tests, each built once."""

import functools
import random

from tessera.analyze import build_graph
from tessera.capture import Workload, build, record
from tessera.flow import make_unit
from tessera.ir import Graph, Step, Trace, WorkUnit

PROMPT, TOKENS = 8, 4


@functools.cache
def workload(kind: str, batch: int = 2) -> Workload:
    """A step of the tiny Llama."""
    if kind == "prefill":
        return build(Step("tiny-llama", "prefill", batch, PROMPT, reserve=TOKENS))
    return build(Step("tiny-llama", "decode", batch, PROMPT + TOKENS))


@functools.cache
def trace(kind: str) -> Trace:
    """Its trace."""
    return record(workload(kind))


@functools.cache
def unit() -> WorkUnit:
    """One prefill and its decodes."""
    return make_unit([trace("prefill"), trace("decode")])


def random_placement(graph: Graph, rng: random.Random, num_devices: int) -> list[int]:
    """Every launch anywhere, state kept together."""
    placement = [rng.randrange(num_devices) for _ in graph.trace.launches]
    for group in graph.groups:
        device = rng.randrange(num_devices)
        for launch in group:
            placement[launch] = device
    return placement


def graph(kind: str) -> Graph:
    """The graph of a step."""
    return build_graph(trace(kind))
