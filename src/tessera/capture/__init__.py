"""Program -> Trace: what runs."""

from tessera.capture.models import build, known_models
from tessera.capture.record import record
from tessera.capture.workload import Workload

__all__ = ["Workload", "build", "known_models", "record"]
