"""Measured prices where there are any, the best model where not.

A device with a known GPU takes the models of that GPU for what was not timed. A CPU, or a card that no table
knows, has no model: there a launch takes the time that the model of another GPU (`YARDSTICK`) gives it, times
the median ratio of measured to modelled over the device's own launches of that class, or of all classes; the
spread of these ratios is its error.
"""

from collections.abc import Mapping
from statistics import median

from tessera.errors import CannotTime
from tessera.ir import AWAY, Cost, Costs, Device, DeviceKind, Source, Trace, verify
from tessera.profile.counts import OpClass
from tessera.profile.estimate import modelled, works
from tessera.profile.gpus import gpu
from tessera.profile.measured.measure import Measured, Reconciled, reconcile

YARDSTICK = "a100"
# Ratios of fewer launches than this say nothing about their class.
MIN_RATIOS = 3


def needs_measuring(device: Device) -> bool:
    """True for a device that runs launches in its own time here; the others are priced by their GPU."""
    is_own = device.kind is not DeviceKind.EMU and not device.is_dilated
    return is_own and device.ordinal != AWAY


def combine(
    trace: Trace, devices: tuple[Device, ...], found: Mapping[str, Measured]
) -> tuple[Costs, dict[str, Reconciled]]:
    """Costs of a trace on all devices, and for the measured ones what their launches add up to."""
    columns: list[tuple[Cost, ...]] = []
    reconciled: dict[str, Reconciled] = {}
    for device in devices:
        measured = found.get(device.name)
        if measured is None:
            columns.append(_modelled(trace, device))
            continue
        others = _modelled(trace, device) if device.gpu else _by_ratio(trace, measured)
        reconciled[device.name] = reconcile(measured, others)
        columns.append(reconciled[device.name].costs)
    costs = Costs(trace.digest, devices, tuple(zip(*columns, strict=True)))
    verify(costs)
    return costs, reconciled


def _modelled(trace: Trace, device: Device) -> tuple[Cost, ...]:
    """The price list of the GPU whose times the device keeps, or which it is."""
    if not device.gpu:
        remedy = "Run the command where it can be measured."
        raise CannotTime(f"{device.name} was not measured, and no model knows it", remedy)
    return _partial(modelled(trace, device.gpu), device)


def _partial(costs: tuple[Cost, ...], device: Device) -> tuple[Cost, ...]:
    """On a part of a card: as much slower as it has fewer SMs, a guess with an error to match."""
    if not device.num_sms:
        return costs
    share = min(1.0, device.num_sms / gpu(device.gpu).num_sms)
    return tuple(Cost(c.us / share, Source.CLASS, c.rel_error + (1 / share - 1)) for c in costs)


def _by_ratio(trace: Trace, measured: Measured) -> tuple[Cost, ...]:
    yardstick = modelled(trace, YARDSTICK)
    classes = [work.op for work in works(trace)]
    ratios: dict[OpClass | None, list[float]] = {None: []}
    for op, timing, cost in zip(classes, measured.timings, yardstick, strict=True):
        if timing is not None and timing.us > 0 and cost.us > 0:
            ratios.setdefault(op, []).append(timing.us / cost.us)
            ratios[None].append(timing.us / cost.us)
    return tuple(
        _scaled(cost, ratios.get(op, []), ratios[None]) for op, cost in zip(classes, yardstick, strict=True)
    )


def _scaled(cost: Cost, of_class: list[float], of_all: list[float]) -> Cost:
    ratios = of_class if len(of_class) >= MIN_RATIOS else of_all
    if not ratios:
        return Cost(cost.us, Source.CLASS, 1.0)
    middle = median(ratios)
    spread = median(abs(r - middle) for r in ratios) / middle
    return Cost(cost.us * middle, Source.CLASS, max(0.5, spread))
