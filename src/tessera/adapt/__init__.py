"""Observations -> which policy now, and when to plan anew."""

from tessera.adapt.capability import Capability, LaneLoad, Point, crossing_per_s
from tessera.adapt.drift import Factors, corrected
from tessera.adapt.events import Action, Adopted, Arrived, Event, Lost, Measured, Ticked
from tessera.adapt.live import Hands, Live, measured_of
from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.adapt.rebalance import rebalanced

__all__ = [
    "Action",
    "Adopted",
    "Arrived",
    "Capability",
    "Event",
    "Factors",
    "Hands",
    "LaneLoad",
    "Live",
    "Lost",
    "Measured",
    "Monitor",
    "MonitorConfig",
    "Point",
    "Ticked",
    "corrected",
    "crossing_per_s",
    "measured_of",
    "rebalanced",
]
