"""Frozen records shared by all stages; imports the standard library and msgspec only.

Suffixes: _us microseconds, _bytes bytes, _gbps gigabytes per second, _per_s per second. Counts start with
num_. Byte ranges are half-open. Equality and hashing are by value.
"""

from tessera.ir.cluster import AWAY, MEMORY_SHARE, Cluster, Cost, Costs, Device, DeviceKind, Link, Source
from tessera.ir.files import kind_of, load, save
from tessera.ir.graph import Edge, Graph, Hazard, Value, WorkUnit
from tessera.ir.plan import (
    SLOTS,
    Baseline,
    Fetch,
    Free,
    Instruction,
    Lane,
    Objective,
    Placement,
    Plan,
    Program,
    Recv,
    Robust,
    Run,
    Send,
    Transfer,
    lane_sequence,
)
from tessera.ir.service import Expected, Group, GroupSize, Load, Rival, Role, ServicePlan
from tessera.ir.timeline import Arrivals, Clock, Decision, DecisionKind, Span, Timeline
from tessera.ir.trace import (
    GENERATOR,
    Access,
    Arg,
    Buffer,
    BufferKind,
    Kernel,
    Launch,
    Origin,
    Region,
    Step,
    Symbol,
    Trace,
    View,
    arg_views,
    digest,
    region,
)
from tessera.ir.verify import verify

__all__ = [
    "AWAY", "GENERATOR", "MEMORY_SHARE", "SLOTS", "Access", "Arg", "Arrivals", "Baseline", "Buffer",
    "BufferKind", "Clock", "Cluster", "Cost", "Costs", "Decision", "DecisionKind", "Device", "DeviceKind",
    "Edge", "Expected", "Fetch", "Free", "Graph", "Group", "GroupSize", "Hazard", "Instruction", "Kernel",
    "Lane", "Launch", "Link", "Load", "Objective", "Origin", "Placement", "Plan", "Program", "Recv", "Region",
    "Rival", "Robust", "Role", "Run", "Send", "ServicePlan", "Source", "Span", "Step", "Symbol", "Timeline",
    "Trace", "Transfer", "Value", "View", "WorkUnit", "arg_views", "digest", "kind_of", "lane_sequence",
    "load", "region", "save", "verify",
]  # fmt: skip
