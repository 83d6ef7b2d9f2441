"""How `tessera profile` measures: one device after the other, with a bar, into a store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.cli.output import progress, warning
from tessera.errors import DeviceGone
from tessera.ir import Device, Trace

if TYPE_CHECKING:
    from tessera.profile.measured import Clocks, Machine, Measured, Reconciled, Store


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where measurements are kept, and what is done with those made at other clocks."""

    path: Path
    clocks: "Clocks"
    # Where nobody named the store: hears why it is done without, if it is.
    spare: Callable[[str], None] | None = None

    def open(self, machine: "Machine") -> "Store":
        """The store, as one device sees it."""
        from tessera.profile.measured import Store

        return Store(self.path, machine, self.clocks, self.spare)


def keeping(store: Path | None, clocks: str) -> Keeping:
    """What the options say."""
    from tessera.profile.measured import clocks_named, default_store

    return Keeping(store or default_store(), clocks_named(clocks), warning() if store is None else None)


def measure_devices(trace: Trace, devices: Sequence[Device], kept: Keeping) -> dict[str, "Measured"]:
    """What the devices that keep their own time take, by name."""
    from tessera.profile.measured import needs_measuring

    wanted = [d for d in devices if needs_measuring(d)]
    if not wanted:
        return {}
    with progress("importing torch", None) as advance:
        from tessera.flow import partition_streams

        streams = partition_streams(wanted)
        advance("building the model")
    return {device.name: _measure(trace, device, streams.get(device.name), kept) for device in wanted}


def _measure(trace: Trace, device: Device, stream: Any, kept: Keeping) -> "Measured":
    from tessera.flow import make_timer
    from tessera.profile.measured import count_distinct, measure

    timer = make_timer(trace, device, stream)
    num = 0

    def counted(advance: Callable[[str], None]) -> Callable[[str], None]:
        def on(what: str) -> None:
            nonlocal num
            num += 1
            advance(what)

        return on

    with progress(f"measuring {device.name}", 1 + count_distinct(trace, timer)) as advance:
        try:
            return measure(trace, device, timer, kept.open, counted(advance))
        except DeviceGone as error:
            message = f"{error.message}; {max(0, num - 2)} launches were timed before and are kept"
            raise DeviceGone(message, error.remedy, str(kept.path)) from error


def measured_document(found: dict[str, "Measured"], sums: dict[str, "Reconciled"]) -> dict[str, Any]:
    """What was measured, in figures: one entry a device."""
    return {
        name: {
            "identity": dict(m.machine.identity),
            "clock_mhz": m.machine.clock_mhz,
            "distinct": m.num_distinct,
            "timed_now": m.num_timed,
            "launches_measured": sum(t is not None for t in m.timings),
            "sum_us": sums[name].sum_us,
            "whole_us": sums[name].whole_us,
            "scale": sums[name].scale,
            "missed": [{"launches": list(x.launches), "kernel": x.kernel, "why": x.why} for x in m.missed],
        }
        for name, m in found.items()
    }


def remarks(found: dict[str, "Measured"], sums: dict[str, "Reconciled"]) -> tuple[str, ...]:
    """What a reader of measured prices should know."""
    said: list[str] = []
    for name, measured in found.items():
        said += [*measured.notes, *sums[name].notes, *_gap(name, sums[name])]
        for missed in measured.missed[:5]:
            said.append(
                f"{name}: launch {missed.launches[0]} ({missed.kernel}; {len(missed.launches)} alike) was "
                f"not timed: {missed.why}; priced by the next source"
            )
        if len(measured.missed) > 5:
            said.append(f"{name}: {len(measured.missed) - 5} more kinds of launch were not timed; see --json")
    return tuple(said)


def _gap(name: str, found: "Reconciled") -> list[str]:
    if found.whole_us is None:
        return []
    share = found.whole_us / found.sum_us - 1 if found.sum_us else 0.0
    return [
        f"{name}: the launches add up to {found.sum_us:.0f} us, the whole step takes {found.whole_us:.0f} us "
        f"({share:+.1%}); measured launches were multiplied by {found.scale:.3f}"
    ]
