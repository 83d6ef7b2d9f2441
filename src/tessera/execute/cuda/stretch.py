"""stretch: how long launches and copies must take on stretched devices, and the common time scale.

A stretched device (`cuda:N/as=GPU`) runs each launch for real and lets it end when it would have ended on
another GPU. It serves launches one at a time, in the order in which they become ready, whatever request they
belong to; so does a throttled link. A launch that is due to end before the card itself is done cannot be
kept to its time. Then the whole run is slowed down by one factor: the time scale. It is the least factor at
which launches that make up 99 % of the modelled time can be met while every device of the card is busy, that
is, with the card's own time multiplied by the number of devices on it.

Rates of such a run are divided out again: modelled rate = measured rate x scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.ir import Cluster, Link

# Share of the modelled time whose launches must be met.
COVERED = 0.99
# What the two turnstiles around a launch cost by themselves, in microseconds.
TURN_US = 3.0
# A turnstile is this late by itself; taken off every wait.
SLACK_NS = 1000


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The common time scale of a run, and what it cannot keep."""

    factor: float
    # Share of the modelled time whose launches are met at this factor.
    covered: float
    # Launches times devices that are not.
    num_missed: int
    num_launches: int


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a launch or copy occupies what it runs on, and how much later it is done."""

    hold_ns: int
    extra_ns: int = 0
    # Of a launch: how long its device is at work until it must wait for a transfer, or the step ends there.
    left_ns: int = 0


def choose_scale(
    targets_us: Sequence[Sequence[float]], own_us: Sequence[float], num_sharing: int
) -> TimeScale:
    """The least factor for targets_us[launch][device] of launches that take own_us[launch] on the card."""
    wanted = []
    for row, own in zip(targets_us, own_us, strict=True):
        for target in row:
            if target > 0.0:
                wanted.append(((own * num_sharing + TURN_US) / target, target))
    total = sum(target for _, target in wanted)
    factor, met = 1.0, 0.0
    for needed, target in sorted(wanted):
        if met >= COVERED * total:
            break
        factor = max(factor, needed)
        met += target
    missed = [(needed, target) for needed, target in wanted if needed > factor]
    covered = 1.0 - sum(target for _, target in missed) / total if total else 1.0
    return TimeScale(factor, covered, len(missed), len(wanted))


def launch_hold(us: float, scale: float, left_us: float = 0.0) -> Hold:
    """What a launch of so many modelled microseconds holds its device for."""
    return Hold(round(us * scale * 1e3), left_ns=round(left_us * scale * 1e3))


def link_hold(link: Link, num_bytes: int, scale: float) -> Hold:
    """A message holds its wire while its bytes pass, and arrives a latency later."""
    return Hold(round(link.wire_us(num_bytes) * scale * 1e3), round(link.latency_us * scale * 1e3))


def throttled_links(cluster: Cluster) -> Mapping[tuple[int, int], Link]:
    """Links that must be slowed down: those that touch a stretched device. Others are what they are."""
    found = {}
    for a, src in enumerate(cluster.devices):
        for b, dst in enumerate(cluster.devices):
            link = cluster.link(a, b) if a != b else None
            if link is not None and (src.is_stretched or dst.is_stretched):
                found[a, b] = link
    return found
