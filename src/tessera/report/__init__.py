"""Tables and pictures for the terminal, Perfetto traces, HTML pages."""

from tessera.report.figures import (
    PolicyLine,
    UsedDevice,
    compared,
    device_uses,
    main_lane,
    round_limits,
    short_name,
    utilisation,
)
from tessera.report.page import write_advice, write_report
from tessera.report.perfetto import write_perfetto
from tessera.report.picture import layer_picture

__all__ = [
    "PolicyLine", "UsedDevice", "compared", "device_uses", "layer_picture", "main_lane",
    "round_limits", "short_name", "utilisation",
    "write_advice", "write_perfetto", "write_report",
]  # fmt: skip
