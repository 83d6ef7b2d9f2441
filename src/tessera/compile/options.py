"""Options: what a user of the backend may choose."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tessera.errors import TesseraError, UnknownName
from tessera.ir import Cluster, Objective
from tessera.plan import PLANNERS
from tessera.profile import make_cluster, parse_devices


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose; see `tessera.compile`."""

    devices: str
    link: str = "pcie4"
    objective: str = Objective.LATENCY.value
    slots: int = 1
    policy: str | None = None
    verify: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Options":
        """Checked options; every mistake is answered with what is possible."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownName("option", name, known)
        found = dict(given)
        devices = found.get("devices", "")
        found["devices"] = devices if isinstance(devices, str) else ",".join(devices)
        options = cls(**found)
        if options.objective not in tuple(Objective):
            raise UnknownName("objective", str(options.objective), tuple(Objective))
        if options.policy is not None and options.policy not in PLANNERS:
            raise UnknownName("policy", str(options.policy), PLANNERS)
        if type(options.slots) is not int or options.slots < 1:
            raise TesseraError(
                f"{options.slots!r} is no number of slots", "Use 1 or more.", "options['slots']"
            )
        return options

    def cluster(self) -> Cluster:
        """The devices and links that are named."""
        try:
            return make_cluster(parse_devices(self.devices), self.link)
        except TesseraError as error:
            if isinstance(error, UnknownName):
                raise
            raise TesseraError(error.message, error.remedy, "options['devices']") from error
