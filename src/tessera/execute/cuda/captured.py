"""Captured: plans over one work unit and one cluster, as CUDA graphs ready to be launched.

Every slot has one graph for each program of each lane of each plan, over the same weights and the same state;
programs that do the same share a graph. Memory is counted before anything is allocated.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import torch

from tessera.errors import DeviceMemoryError
from tessera.execute.cuda import driver
from tessera.execute.cuda.graph import ProgramGraph
from tessera.execute.cuda.launches import Launchable, Launches, refuse_generators
from tessera.execute.cuda.machine import Machine
from tessera.execute.cuda.pace import make_pace, make_queues
from tessera.execute.cuda.requests import check_same, first_line, is_short, key_of
from tessera.execute.cuda.slot import Resident, Slot, check_fits, count_needs, open_slot
from tessera.execute.lower import lower
from tessera.ir import Plan, Program

Tensors = Mapping[str, torch.Tensor]
# Step -> compiled objects by kernel.
Kernels = Mapping[int, Mapping[int, Launchable]]


class Captured:
    """The graphs of some plans; use it in a `with` statement."""

    def __init__(
        self,
        plans: Sequence[Plan],
        weights: Tensors,
        kernels: Kernels | None = None,
        scale: float = 1.0,
        is_profiled: bool = False,
    ) -> None:
        """`kernels`: compiled objects, valid on the first device's GPU. `scale`: see `stretch`.

        `is_profiled`: every launch and copy is stamped, which costs a few microseconds each.
        """
        check_same(plans)
        self.plans, self.scale, self.is_profiled = tuple(plans), scale, is_profiled
        self.traces = tuple(g.trace for g in plans[0].unit.graphs)
        for trace in self.traces:
            refuse_generators(trace)
        # programs[plan][lane]
        self.programs = [lower(plan) for plan in plans]
        self.num_slots = max(plan.slots for plan in plans)
        self.slots: list[Slot] = []
        self._weights, self._kernels = weights, kernels or {}
        self._machine: Machine | None = None
        self._graphs: dict[tuple[int, Program], ProgramGraph] = {}

    def __enter__(self) -> "Captured":
        try:
            self._start()
        except torch.OutOfMemoryError as error:
            self.close()
            remedy = f"Use fewer slots than {self.num_slots}, a smaller batch or a smaller context."
            raise DeviceMemoryError(first_line(error), remedy, self.names) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the GPUs and gives back graphs, memory and streams."""
        if self._machine is not None:
            machine, self._machine = self._machine, None
            machine.close()
        self._graphs, self.slots = {}, []
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # a GPU that has failed gives nothing back, and has said so
                torch.cuda.empty_cache()

    @property
    def names(self) -> str:
        """The devices, for messages."""
        return ", ".join(self.plans[0].cluster.names)

    @property
    def num_graphs(self) -> int:
        """Graphs of all slots."""
        return len(self._graphs)

    def graph(self, slot: int, program: Program) -> ProgramGraph:
        """The graph of a program in a slot."""
        return self._graphs[slot, key_of(program)]

    def _start(self) -> None:
        cluster = self.plans[0].cluster
        self._machine = Machine(cluster.devices)
        programs = [p for plan in self.programs for lane in plan for p in lane]
        self._check_memory(programs)
        launches = self._make_launches(self._machine)
        resident = Resident(self.traces, self._weights)
        queues = make_queues(cluster, self.num_slots)
        for number in range(self.num_slots):
            slot = open_slot(number, self._machine, programs, self.traces)
            self.slots.append(slot)
            for plan, lanes in zip(self.plans, self.programs, strict=True):
                for program in (p for lane in lanes for p in lane):
                    if (number, key_of(program)) not in self._graphs:
                        pace = make_pace(program, plan, queues, self.scale, self.is_profiled)
                        self._graphs[number, key_of(program)] = ProgramGraph(
                            program,
                            self.traces[program.step],
                            slot,
                            resident,
                            launches[program.step],
                            pace,
                            is_short(plan, program.step),
                        )
        self._machine.synchronize()

    def _make_launches(self, machine: Machine) -> list[dict[int, Launches]]:
        """launches[step][ordinal]"""
        first = machine.devices[0].ordinal
        return [
            {
                o: Launches(trace, driver.card(o), self._kernels.get(step) if o == first else None)
                for o in machine.ordinals
            }
            for step, trace in enumerate(self.traces)
        ]

    def _check_memory(self, programs: Sequence[Program]) -> None:
        ordinals = [d.ordinal for d in self.plans[0].cluster.devices]
        there = {n: t.device.index or 0 for n, t in self._weights.items() if t.is_cuda}
        free = {o: torch.cuda.mem_get_info(o)[0] for o in set(ordinals)}
        check_fits(count_needs(programs, self.traces, ordinals, there), free, self.num_slots)
