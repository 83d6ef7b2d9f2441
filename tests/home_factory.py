"""A small model with pages for tests of homes and moves: two layers, steps of any number of tokens."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from factories import make_cluster, make_plan
from tessera.capture import Workload, record
from tessera.capture.workload import on_device
from tessera.ir import Cluster, Plan, Step, Trace
from tessera.kernels import NEWEST, PAGE

WIDTH, PAGES = 16, 8
PAGE_BYTES = PAGE * WIDTH * 4
# Numbers of a position and pages of a home; small by default.
Size = tuple[int, int]
SMALL: Size = (WIDTH, PAGES)
NAMES = ("pages.0", "pages.1")


class PagedNet(torch.nn.Module):
    """Each layer writes what comes in to its slots, and reads other slots."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(width, width, generator=generator) / 4) for _ in NAMES
        )


@functools.cache
def net(width: int = WIDTH) -> PagedNet:
    """One for all steps."""
    return PagedNet(width)


@functools.cache
def workload(tokens: int, sequences: int = 2, size: Size = SMALL) -> Workload:
    """A step of so many tokens; `newest` counts its runs, for so many sequences."""
    width, num_pages = size

    def call(
        inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        for name, weight in zip(NAMES, net(width).layers, strict=True):
            places = state[name].view(-1, width)
            places.index_copy_(0, inputs["slots"], x)
            x = torch.tanh(places[inputs["read"]] @ weight)
        state[NEWEST].add_(1)
        return {"y": x + state[NEWEST].sum()}

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
        slots = torch.arange(PAGE, PAGE + tokens)
        return {"x": x, "slots": slots, "read": slots.clone()}

    def make_state(seed: int) -> dict[str, torch.Tensor]:
        pages = {name: torch.zeros(num_pages, PAGE, width) for name in NAMES}
        return {**pages, NEWEST: torch.zeros(sequences, dtype=torch.int64)}

    step = Step("paged", "tokens", sequences, tokens, reserve=num_pages * PAGE)
    return Workload(step, net(width), call, make_inputs, make_state, lambda first, run, last: dict(first))


@functools.cache
def trace(tokens: int, sequences: int = 2, size: Size = SMALL, device: str = "cpu") -> Trace:
    """The step, recorded; its weights are on that device from then on."""
    return record(on_device(workload(tokens, sequences, size), device))


def inputs(tokens: int, first: int, read: int, seed: int = 0, size: Size = SMALL) -> dict[str, torch.Tensor]:
    """Tokens that are written from slot `first` on, and read from slot `read` on."""
    made = workload(tokens, size=size).make_inputs(seed)
    span = torch.arange(tokens)
    return {**made, "slots": first + span, "read": read + span}


def plan_of(
    tokens: Sequence[int],
    devices: Sequence[int],
    home: str,
    sequences: int = 2,
    cluster: Cluster | None = None,
    microbatches: int = 4,
    size: Size = SMALL,
    device: str = "cpu",
) -> Plan:
    """A plan of steps whose first layer is on the first device and whose second is on the last."""
    traces = [trace(num, sequences, size, device) for num in tokens]
    lane = [_place(found, devices[0], devices[-1]) for found in traces]
    plan = make_plan(traces, [lane], cluster=cluster or make_cluster(2), microbatches=microbatches)
    return replace(plan, home=home)


def _place(found: Trace, first: int, second: int) -> list[int]:
    second_layer = next(n for n, b in enumerate(found.buffers) if b.name == NAMES[1])
    touching = (
        n for n, launch in enumerate(found.launches) if any(a.buffer == second_layer for a in launch.accesses)
    )
    boundary = next(touching)
    return [first if n < boundary else second for n in range(len(found.launches))]


def weights(size: Size = SMALL) -> dict[str, torch.Tensor]:
    """Weights of every step."""
    return dict(workload(2, size=size).weights())


class Expectation:
    """What the model's own code gives, with pages by home and `newest` by microbatch."""

    def __init__(self) -> None:
        self.homes: dict[str, dict[str, torch.Tensor]] = {}
        self.newest: dict[int, torch.Tensor] = {}

    def run(self, home: str, microbatch: int, tokens: int, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Output of one step."""
        state = workload(tokens).make_state(0)
        newest = self.newest.setdefault(microbatch, state.pop(NEWEST))
        pages = self.homes.setdefault(home, state)
        return workload(tokens).run(given, {**pages, NEWEST: newest})["y"]

    def move(self, source: str, destination: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Pages of one home to pages of another."""
        fresh = {n: t for n, t in workload(2).make_state(0).items() if n != NEWEST}
        there = self.homes.setdefault(destination, fresh)
        for name in NAMES:
            for from_page, to_page in pairs:
                there[name][to_page] = self.homes[source][name][from_page]
