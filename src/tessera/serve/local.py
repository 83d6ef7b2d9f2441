"""Local: the worker processes of one service, and what they were prepared from.

They are processes of this machine, or of others, by the `hub` that is handed in. A worker that is lost is
started again by the stepper; a device that fails again and again is planned around by `keeper`.
"""

from tessera.execute.forking import FORKSERVER
from tessera.execute.worker_stepper import MakeHub, WorkerStepper
from tessera.serve.planning import Prepared

# A step that takes longer than this will never end.
STEP_TIMEOUT_S = 60.0


class Local:
    """In a `with` statement, which starts the workers and ends them."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        transport: str = "auto",
        timeout_s: float | None = STEP_TIMEOUT_S,
        hub: MakeHub | None = None,
    ) -> None:
        self.prepared = prepared
        self.stepper = WorkerStepper(
            prepared.plans,
            prepared.model.weights(),
            microbatches=prepared.model.shape.slots,
            transport=transport,
            timeout_s=timeout_s,
            method=FORKSERVER,
            hub=hub,
            scale=prepared.scale,
        )

    def __enter__(self) -> "Local":
        self.stepper.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stepper.__exit__(None, None, None)
