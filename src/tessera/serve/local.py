"""Local: makes and owns the steppers of one service, and makes another when one is over.

A lost worker is replaced by a new process on the same device, with the weights that are in memory; on
several machines by whoever calls for that device next (see `gathering`). A device that is lost again and
again, or whose worker does not call, is planned around: the service goes on with the rest. While lanes are
left that avoid a lost device, nothing is replaced: the service goes on without it.
"""

import time
from collections import defaultdict
from contextlib import ExitStack
from types import TracebackType

from tessera.errors import WorkerError
from tessera.execute.hub import FORKSERVER, hidden_main
from tessera.execute.serving import SlotsLost, Stepper
from tessera.execute.stepper import WorkerStepper
from tessera.serve.gathering import Gathering
from tessera.serve.planning import Prepared
from tessera.serve.steps import STEP_TIMEOUT_S

# So often within so long a device is given new workers.
MAX_LOSSES, LOSSES_S = 2, 600.0
# Workers that are lost while they start are started again so often.
MAX_STARTS = 3


class Local:
    """The steppers of a service; in a `with` statement, which starts the first and ends them all."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        transport: str = "shm",
        timeout_s: float | None = STEP_TIMEOUT_S,
        gathering: Gathering | None = None,
    ) -> None:
        self.prepared = prepared
        self._transport, self._timeout_s, self._gathering = transport, timeout_s, gathering
        # Device -> when it was lost.
        self._losses: defaultdict[str, list[float]] = defaultdict(list)
        self._stack = ExitStack()
        self._stepper: WorkerStepper | None = None

    @property
    def stepper(self) -> WorkerStepper:
        """The one in use."""
        assert self._stepper is not None, "started by the `with` statement"
        return self._stepper

    def __enter__(self) -> "Local":
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    def replace(self, lost: SlotsLost) -> Stepper:
        """Another stepper for one that is over; raises if no device is left to plan for."""
        self._stack.close()
        now = time.monotonic()
        self._losses[lost.device].append(now)
        recent = {name: sum(now - at < LOSSES_S for at in times) for name, times in self._losses.items()}
        gone = [d.name for d in self.prepared.cluster.devices if recent.get(d.name, 0) > MAX_LOSSES]
        if gone:
            self.prepared = self.prepared.without(gone)
        self._start_again()
        return self.stepper

    def _start_again(self) -> None:
        """Plans without the devices whose workers do not come; tries again where one was lost again."""
        failures = 0
        while True:
            try:
                self._start()
            except WorkerError:
                absent = self._gathering.absent() if self._gathering is not None else []
                failures += 0 if absent else 1
                if failures >= MAX_STARTS:
                    raise
                if absent:
                    self.prepared = self.prepared.without(absent)
            else:
                return

    def _start(self) -> None:
        names = self.prepared.cluster.names
        made = WorkerStepper(
            self.prepared.plans,
            self.prepared.model.weights(),
            self.prepared.model.shape,
            transport=self._transport,
            timeout_s=self._timeout_s,
            method=FORKSERVER,
            hub=self._gathering.hub_for(names) if self._gathering is not None else None,
        )
        with hidden_main():
            self._stepper = self._stack.enter_context(made)
