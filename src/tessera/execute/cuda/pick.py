"""Plans that are loaded together on GPUs, each tried out; see `execute.pick`."""

from collections.abc import Sequence

from tessera.execute.cuda.captured import Captured
from tessera.execute.cuda.engine import CudaEngine
from tessera.execute.cuda.measure import always
from tessera.execute.flight import Request
from tessera.execute.pick import ROUNDS, Trial, try_all


def try_plans(captured: Captured, requests: Sequence[Request], rounds: int = ROUNDS) -> list[Trial]:
    """Each plan's rate, in requests a second of the run's own time (see `stretch`)."""
    engine = CudaEngine(captured, keeps_results=False, keeps_state=True)
    return try_all(captured.plans, lambda number: engine.run(requests, always(number)), rounds)
