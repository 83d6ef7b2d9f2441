"""Observations -> which policy now, and when to plan anew."""

from tessera.adapt.avoid import widened, without_devices
from tessera.adapt.capability import Capability, Point, crossing_per_s
from tessera.adapt.drift import LEAST_GAIN, Factors, corrected, scaled_costs
from tessera.adapt.events import (
    Action,
    Adopted,
    Arrived,
    Event,
    Lost,
    MeasuredLaunches,
    MeasuredSteps,
    Returned,
    Ticked,
)
from tessera.adapt.live import Decisions, Hands, Live
from tessera.adapt.monitor import Monitor, MonitorConfig

__all__ = [
    "LEAST_GAIN",
    "Action",
    "Adopted",
    "Arrived",
    "Capability",
    "Decisions",
    "Event",
    "Factors",
    "Hands",
    "Live",
    "Lost",
    "MeasuredLaunches",
    "MeasuredSteps",
    "Monitor",
    "MonitorConfig",
    "Point",
    "Returned",
    "Ticked",
    "corrected",
    "crossing_per_s",
    "scaled_costs",
    "widened",
    "without_devices",
]
