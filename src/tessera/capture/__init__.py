"""Program -> Trace: what runs."""

from tessera import make_callable
from tessera.capture.models import build, known_models, place_of
from tessera.capture.own import CudaKernel
from tessera.capture.record import check_device, record, record_sizes, record_step
from tessera.capture.workload import Workload

__all__ = ["CudaKernel", "Workload", "build", "check_device", "known_models"]
__all__ += ["place_of", "record", "record_sizes", "record_step"]

make_callable(__name__)  # tessera.capture(fn, *args)
