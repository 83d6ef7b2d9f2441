"""What the GPU benchmarks share: a log on disk, a request with fixed inputs, the machine in words."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Log:
    """Results of one part, on disk after every entry."""

    def __init__(self, path: Path) -> None:
        self._path, self.began = path, time.monotonic()
        self.found: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Adds or replaces an entry."""
        self.found[name] = value
        self.found["seconds"] = round(time.monotonic() - self.began, 1)
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        failed = value["error"] if isinstance(value, dict) and "error" in value else ""
        text = str(failed)[-1500:] if failed else json.dumps(value)[:700]
        print(f"[{self.found['seconds']:6.1f} s] {name}: {text}", flush=True)

    def attempt(self, name: str, what: Callable[..., Any], *args: Any) -> Any:
        """Runs one experiment; a failure is written down and does not stop the rest."""
        try:
            value = what(*args)
        except Exception:  # noqa: BLE001 - one experiment must not stop the others
            self.put(name, {"error": traceback.format_exc()[-3000:]})
            return None
        self.put(name, value)
        return value


@dataclass(frozen=True)
class Same:
    """A request whose steps all have the same inputs, on whatever state there is."""

    given: dict[str, Any]

    def state(self) -> dict[str, Any]:
        return {}

    def inputs(self, step: int, run: int, last: Any) -> dict[str, Any]:
        return self.given


def whole_card() -> Any:
    """A cluster of the card alone."""
    from tessera.ir import Cluster
    from tessera.profile import parse_devices

    return Cluster(parse_devices("cuda:0"), ())


def about() -> dict[str, Any]:
    """What it runs on."""
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__, "gpu": "none"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "sms": properties.multi_processor_count, "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": sys.version.split()[0],
    }  # fmt: skip
