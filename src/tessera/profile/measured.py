"""Measures distinct launches of a trace and the step on one device, and combines them with models.

In program order, launches missing from the store are timed, stored, and run once for the inputs of later
ones. One that cannot be timed is stored with its reason and priced by the next source. Measured launches are
scaled by the ratio of the measured step to their sum, part of their error.

Launches are equal if they share code, types, shapes, strides and alignment of tensors, plain arguments,
memory sharing and cached buffers (half of their bytes touched within the last half cache size). A CPU or
unknown card takes the model of `YARDSTICK`, scaled by the median ratio.
"""

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import hypot
from typing import Protocol

from tessera.errors import CannotTime, DeviceGone
from tessera.ir import AWAY, Cost, Costs, Device, DeviceKind, Kernel, Launch, Origin, Source, Trace, verify
from tessera.kernels import PARTS
from tessera.profile.corrections import MIN_RATIOS, middle_and_spread
from tessera.profile.counts import OpClass, class_of, is_zero_size, work_of
from tessera.profile.estimate import modelled, signature, works
from tessera.profile.gpus import gpu
from tessera.profile.store import Enough, Machine, Store, Timing, timing, until
from tessera.profile.tables import installed_tables

# Plausible ratios of step to sum.
MIN_SCALE, MAX_SCALE = 0.5, 2.0
# A lower clock means throttling or sharing.
THROTTLED = 0.9
RETRIES = 2
# Resolution of events and clocks.
LEAST_ERROR = 0.005

# The rest is lost to sharing and conflicts.
USEFUL_CACHE = 0.5
# CPUs have no model: their launches are compared with this GPU's.
YARDSTICK = "a100"
Advance = Callable[[str], None]


class Timer(Protocol):
    cache_bytes: int
    # Empty for the model's own inputs.
    remarks: tuple[str, ...]

    def identity(self) -> dict[str, str]:
        """Model, SMs, driver, torch."""

    def clock_mhz(self) -> float | None:
        """Under load."""

    def time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        """Microseconds; raises CannotTime or DeviceGone."""

    def run(self, launch: int) -> None:
        """Runs one launch to produce its results."""

    def whole(self, enough: Enough) -> list[float]:
        """Microseconds; raises CannotTime or DeviceGone."""


@dataclass(frozen=True, slots=True)
class Distinct:
    key: str
    # The first is timed.
    launches: tuple[int, ...]
    # Buffers that are not cached.
    cold: frozenset[int]


@dataclass(frozen=True, slots=True)
class Missed:
    launches: tuple[int, ...]
    kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    device: Device
    machine: Machine
    timings: tuple[Timing | None, ...]
    whole: Timing | None
    missed: tuple[Missed, ...]
    num_distinct: int
    # In this session.
    num_timed: int
    notes: tuple[str, ...]


def measure(
    trace: Trace,
    device: Device,
    timer: Timer,
    open_store: Callable[[Machine], Store],
    advance: Advance = lambda what: None,
    enough: Enough | None = None,
    only: frozenset[int] | None = None,
) -> Measured:
    """Raises DeviceGone after storing what was measured. `only`: these launches and equal ones, without the
    step.
    """
    machine = Machine(timer.identity(), timer.clock_mhz())
    groups, store = distinct(trace, timer.cache_bytes), open_store(machine)
    session = _Session(trace, device, timer, machine, store, advance, enough or until())
    whole = session.whole() if only is None else None
    chosen = [g for g in groups if only is None or not only.isdisjoint(g.launches)]
    todo = {g.launches[0]: g for g in chosen if session.needs_timing(g)}
    last = max(todo, default=-1)
    for index in range(last + 1):
        if index in todo:
            session.time(todo[index])
        if index < last:
            timer.run(index)
    by_launch = {n: store.row("launch", group.key).timing for group in groups for n in group.launches}
    failures = [(group.launches, store.row("failed", group.key).why) for group in groups]
    return Measured(
        device,
        machine,
        timings=tuple(by_launch[index] for index in range(len(trace.launches))),
        whole=whole,
        missed=tuple(Missed(x, trace.kernel_of(x[0]).name, why) for x, why in failures if why is not None),
        num_distinct=len(groups),
        num_timed=session.num_timed,
        notes=(*timer.remarks, *session.notes, *session.throttling()),
    )


@dataclass(eq=False)
class _Session:
    trace: Trace
    device: Device
    timer: Timer
    machine: Machine
    store: Store
    advance: Advance
    enough: Enough
    num_timed: int = 0
    slow: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def needs_timing(self, group: Distinct) -> bool:
        launch = self.trace.launches[group.launches[0]]
        starts_none = class_of(self.trace.kernels[launch.kernel]) is OpClass.ALLOCATION
        outcome = self.store.row("launch", group.key).timing or self.store.row("failed", group.key).why
        return outcome is None and not starts_none and not is_zero_size(launch)

    def time(self, group: Distinct) -> None:
        index = group.launches[0]
        kernel = self.trace.kernel_of(index).name
        self.advance(f"{self.device.name}: {kernel}")
        try:
            result = self._steady(index, group)
        except CannotTime as error:
            self.store.add("failed", group.key, kernel, why=error.message)
            return
        except DeviceGone as error:
            self.store.add("failed", group.key, kernel, why=f"the device was lost here: {error.message}")
            raise
        self.store.add("launch", group.key, kernel, timing=result)
        self.num_timed += 1

    def _steady(self, index: int, group: Distinct) -> Timing:
        """At the clock of the session's start; after RETRIES at any clock, with a note."""
        for _ in range(1 + RETRIES):
            result = timing(self.timer.time(index, group.cold, self.enough))
            clock, start = self.timer.clock_mhz(), self.machine.clock_mhz
            if clock is None or start is None or clock >= THROTTLED * start:
                return result
            slow = f"{index} ({self.trace.kernel_of(index).name}) at {clock:.0f} MHz"
        self.slow.append(slow)
        return result

    def whole(self) -> Timing | None:
        whole = self.store.row("whole", self.trace.digest).timing
        if whole is None:
            self.advance(f"{self.device.name}: the whole step")
            try:
                whole = timing(self.timer.whole(self.enough))
                self.store.add("whole", self.trace.digest, timing=whole)
            except CannotTime as error:
                self.notes.append(f"{self.device.name}: the whole step was not measured: {error.message}")
        return whole

    def throttling(self) -> tuple[str, ...]:
        if not self.slow:
            return ()
        start = self.machine.clock_mhz or 0.0
        more = f" and {len(self.slow) - 5} more" if len(self.slow) > 5 else ""
        named = ", ".join(self.slow[:5]) + more
        return (f"{self.device.name} throttles or is busy: it began at {start:.0f} MHz, and timed {named}",)


@dataclass(frozen=True, slots=True)
class Reconciled:
    costs: tuple[Cost, ...]
    # Before scaling.
    sum_us: float
    whole_us: float | None
    scale: float
    notes: tuple[str, ...]


def reconcile(measured: Measured, others: tuple[Cost, ...]) -> Reconciled:
    pairs = tuple(zip(measured.timings, others, strict=True))
    measured_us = sum(t.us for t, _ in pairs if t is not None)
    other_us = sum(c.us for t, c in pairs if t is None)
    total_us, whole_us = measured_us + other_us, measured.whole.us if measured.whole else None
    scale, notes = 1.0, list[str]()
    if whole_us is not None and measured_us > 0.0:
        scale = (whole_us - other_us) / measured_us
        if not MIN_SCALE <= scale <= MAX_SCALE:
            scale = 1.0
            notes.append(
                f"{measured.device.name}: the launches add up to {total_us:.0f} us and the whole step takes "
                f"{whole_us:.0f} us; too far apart to scale one to the other"
            )
    gap = abs(scale - 1.0)
    costs = tuple(
        c if t is None else Cost(t.us * scale, Source.MEASURED, max(LEAST_ERROR, hypot(t.rel_error, gap)))
        for t, c in pairs
    )
    return Reconciled(costs, total_us, whole_us, scale, tuple(notes))


def distinct(trace: Trace, cache_bytes: int) -> tuple[Distinct, ...]:
    cold = cold_buffers(trace, cache_bytes)
    names = [_kernel_name(k) for k in trace.kernels]
    groups: dict[str, list[int]] = {}
    for index, launch in enumerate(trace.launches):
        groups.setdefault(_key(names[launch.kernel], launch, cold[index]), []).append(index)
    return tuple(Distinct(key, tuple(rows), cold[rows[0]]) for key, rows in groups.items())


def cold_buffers(trace: Trace, cache_bytes: int) -> list[frozenset[int]]:
    touched: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
    passed = 0.0
    cold: list[frozenset[int]] = []

    def recent(buffer: int) -> int:
        history = touched[buffer]
        while history and history[0][0] <= passed - cache_bytes * USEFUL_CACHE:
            history.popleft()
        return sum(n for _, n in history)

    for launch in trace.launches:
        reads, writes = _bytes(launch, reading=True), _bytes(launch, reading=False)
        cold.append(frozenset(buffer for buffer, n in reads.items() if recent(buffer) < n / 2))
        passed += work_of(trace.kernels[launch.kernel], launch).num_bytes
        for buffer, num_bytes in (reads | writes).items():
            touched[buffer].append((passed, num_bytes))
    return cold


def _bytes(launch: Launch, reading: bool) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for buffer, region in launch.regions(reading):
        sizes[buffer] += region.num_bytes
    return sizes


def _kernel_name(kernel: Kernel) -> str:
    """PTX by digest, since names repeat."""
    if kernel.origin is Origin.ATEN:
        return kernel.name
    return f"{kernel.name}:{hashlib.sha256(kernel.ptx.encode()).hexdigest()}"


def _key(kernel: str, launch: Launch, cold: frozenset[int]) -> str:
    place = 1 + PARTS.get(kernel, -1)
    if place and isinstance(first := launch.args[place], int):
        # Further parts of a mixture differ in their experts only.
        launch = replace(launch, args=(*launch.args[:place], min(1, first), *launch.args[place + 1 :]))
    return hashlib.sha256(json.dumps([kernel, *signature(launch, cold)]).encode()).hexdigest()[:32]


def needs_measuring(device: Device) -> bool:
    """Real hardware of this machine at its own speed."""
    return device.kind is not DeviceKind.EMU and not device.is_dilated and device.ordinal != AWAY


def combine(
    trace: Trace, devices: tuple[Device, ...], by_device: Mapping[str, Measured]
) -> tuple[Costs, dict[str, Reconciled]]:
    columns: list[tuple[Cost, ...]] = []
    reconciled: dict[str, Reconciled] = {}
    by_gpu = modelled(trace, (d.gpu for d in devices if d.gpu), installed_tables())
    for device in devices:
        measured = by_device.get(device.name)
        if measured is None:
            columns.append(_modelled(by_gpu, device))
            continue
        others = _modelled(by_gpu, device) if device.gpu else _by_ratio(trace, measured)
        reconciled[device.name] = reconcile(measured, others)
        columns.append(reconciled[device.name].costs)
    costs = Costs(trace.digest, devices, tuple(zip(*columns, strict=True)))
    verify(costs)
    return costs, reconciled


def _modelled(by_gpu: Mapping[str, tuple[Cost, ...]], device: Device) -> tuple[Cost, ...]:
    if not device.gpu:
        remedy = "Run the command where it can be measured."
        raise CannotTime(f"{device.name} was not measured, and no model knows it", remedy)
    costs = by_gpu[device.gpu]
    if not device.num_sms:
        return costs
    share = min(1.0, device.num_sms / gpu(device.gpu).num_sms)
    return tuple(Cost(c.us / share, Source.CLASS, c.rel_error + (1 / share - 1)) for c in costs)


def _by_ratio(trace: Trace, measured: Measured) -> tuple[Cost, ...]:
    yardstick = modelled(trace, [YARDSTICK], installed_tables())[YARDSTICK]
    classes = [work.op for work in works(trace)]
    ratios: dict[OpClass | None, list[float]] = defaultdict(list)
    for op, timed, cost in zip(classes, measured.timings, yardstick, strict=True):
        if timed is not None and timed.us > 0 and cost.us > 0:
            for key in (op, None):
                ratios[key].append(timed.us / cost.us)

    def scaled(op: OpClass, cost: Cost) -> Cost:
        among = ratios[op] if len(ratios[op]) >= MIN_RATIOS else ratios[None]
        if not among:
            return Cost(cost.us, Source.CLASS, 1.0)
        middle, spread = middle_and_spread(among)
        return Cost(cost.us * middle, Source.CLASS, max(0.5, spread))

    return tuple(map(scaled, classes, yardstick))
