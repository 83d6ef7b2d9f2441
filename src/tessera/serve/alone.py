"""AloneService: what services of models on one device share, whatever they make.

They compute on one device in this process, without plans and workers, so they take no asks; what they do they
show as any service does.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from tessera.errors import AskError
from tessera.serve.records import Ask, DeviceView, Events, Snapshot


class AloneService(ABC):
    """Use it in a `with` statement. `makes`: what it makes, and the path that is for it."""

    failure = ""

    def __init__(self, model: str, device: str, makes: str) -> None:
        self._model, self._device, self._makes = model, device, makes
        self._running = self._tokens = 0
        self._busy_s, self._begun_s = 0.0, time.monotonic()
        self._finished = dict.fromkeys(("stop", "cancelled"), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @abstractmethod
    def stop(self, grace_s: float = 0.0) -> None:
        """Refuses what comes and what waits; what is being computed is waited for."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Those that are not being computed yet."""

    @contextmanager
    def _computing(self, num: int) -> Iterator[None]:
        begun_s, self._running = time.monotonic(), num
        try:
            yield
        finally:
            self._running, self._busy_s = 0, self._busy_s + time.monotonic() - begun_s

    def answer(self, ask: Ask) -> Events:
        raise AskError(f"this model makes {self._makes}.", place="model")

    def snapshot(self) -> Snapshot:
        share = self._busy_s / max(1e-9, time.monotonic() - self._begun_s)
        return Snapshot(
            model=self._model,
            policy="single-device",
            policies=("single-device",),
            devices=(DeviceView(self._device, share, 0),),
            links=(),
            running=self._running,
            waiting=self.num_waiting,
            prompt_tokens=self._tokens,
            finished=dict(self._finished),
        )
