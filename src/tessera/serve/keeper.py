"""Keeper: which plans of a running service are in force, while devices fail and come back.

A device that is lost is given a new worker by the stepper; nothing is planned for that. One that fails
`MAX_FAILURES` times in a row, or is given up, is planned around: in the background, while lanes that avoid it
go on, or requests wait. When it is back, the plans for all devices are taken up again. Every plan is one for
the service's whole cluster, so that plans can follow one another without a worker being started.

What plans can do is read off them, for the monitor, with no simulation when a service starts. A plan says how
fast it is with some numbers of microbatches in flight, and a microbatch is a unit of work for `rows`
requests. By Little's law, s microbatches at a rate of r units a second hold each request for s / r seconds;
with hardly any load it is the latency of one unit. Between these the monitor interpolates. All figures are
modelled: they decide between policies, and promise nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from tessera.adapt.capability import Capability, Point
from tessera.adapt.drift import Factors
from tessera.errors import TesseraError
from tessera.execute.stepper import DeviceBack, DeviceLost
from tessera.ir import Plan

# So often in a row a device is given a new worker before it is planned around.
MAX_FAILURES = 3
# A load at which a request is alone, and the share of the capacity that counts as all of it.
ALONE, ENOUGH = 1e-3, 0.99

Plans = tuple[Plan, ...]


class Planner(Protocol):
    """Who can plan a running service anew. Called by background threads; raises TesseraError."""

    def without(self, lost: Iterable[str]) -> Plans:
        """Plans that leave devices unused."""

    def corrected(self, plans: Sequence[Plan], factors: Factors) -> Plans:
        """In place of these plans, at costs that were wrong by these factors."""


class Keeper:
    """Keeps plans in force that the devices can follow. Used by the engine's thread.

    load   takes up plans, if there are any: (plans, why, in one line)
    wake   makes the engine look for plans that are ready; from any thread
    """

    def __init__(
        self,
        plans: Plans,
        planner: Planner | None,
        load: Callable[[Plans, str], None],
        wake: Callable[[], None],
    ) -> None:
        # Those for all devices.
        self.plans = plans
        self._planner, self._load, self._wake = planner, load, wake
        # Devices that are planned around, in force or under way.
        self._around: frozenset[str] = frozenset()
        self._making: Future[Plans] | None = None
        self._background: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)

    def lost(self, event: DeviceLost) -> None:
        """A device is gone; planned around if it fails for good."""
        is_failing = event.failures >= MAX_FAILURES or event.retry_s is None
        if is_failing and event.device not in self._around:
            self._plan_around(self._around | {event.device})

    def back(self, event: DeviceBack) -> None:
        if event.device not in self._around:
            return
        left = self._around - {event.device}
        if left:
            self._plan_around(left)
            return
        self._around, self._making = left, None
        self._load(self.plans, "plans for all devices are in force again")

    def adopt(self, plans: Plans, why: str) -> None:
        """Other plans for all devices; in force now, or when the devices they need are back."""
        self.plans = plans
        if not self._around:
            self._load(plans, why)

    def poll(self) -> None:
        """Takes up plans that are ready."""
        if self._making is None or not self._making.done():
            return
        made, self._making = self._making, None
        names = ", ".join(sorted(self._around))
        try:
            plans = made.result()
        except TesseraError as error:  # requests wait for the device, or use the lanes that avoid it
            self._load((), f"no plans without {names}: {error}")
            return
        self._load(plans, f"plans without {names} are in force")

    def _plan_around(self, devices: frozenset[str]) -> None:
        self._around = devices
        if self._planner is None:
            return
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "tessera-around")
        self._making = self._background.submit(self._planner.without, devices)
        self._making.add_done_callback(lambda _: self._wake())


def capabilities_of(plans: Sequence[Plan], rows: int) -> tuple[Capability, ...]:
    """One a plan, in requests per second; empty if a plan was never simulated in flight."""
    if not all(
        any(microbatches <= plan.microbatches and rate for microbatches, rate in plan.by_microbatches)
        for plan in plans
    ):
        return ()
    return tuple(_capability(plan, rows) for plan in plans)


def _capability(plan: Plan, rows: int) -> Capability:
    tokens = plan.unit.counts[-1] + 1
    least_s = plan.latency_us * 1e-6
    there = sorted(
        (microbatches, rate)
        for microbatches, rate in plan.by_microbatches
        if microbatches <= plan.microbatches
    )
    capacity = rows * max(rate for _, rate in there)
    first = ALONE * capacity
    points = [Point(first, least_s / tokens, first * least_s)]
    for microbatches, rate in there:
        load = rows * rate
        # The curve ends below the capacity: more microbatches than bring a gain only bring waiting.
        if points[-1].rate_per_s < load < ENOUGH * capacity:
            points.append(Point(load, max(microbatches / rate, least_s) / tokens, float(microbatches * rows)))
    return Capability(plan.policy, capacity, tuple(points))
