"""A system for tests of the controller: remembers what it was told, and has a clock that is moved by hand."""

from collections.abc import Callable
from concurrent.futures import Future

from tessera.adapt.controller import Replanned
from tessera.errors import TesseraError
from tessera.ir import Plan


class FakeSystem:
    policy = "quick"

    def __init__(self) -> None:
        self.now = 1000.0
        self.switched: list[str] = []
        self.loaded: list[tuple[Plan, ...]] = []
        self._jobs: list[tuple[Future[Replanned[Plan]], Callable[[], Replanned[Plan]]]] = []

    def now_s(self) -> float:
        return self.now

    def switch(self, policy: str) -> None:
        self.switched.append(policy)

    def load(self, plans: tuple[Plan, ...]) -> None:
        self.loaded.append(plans)

    def switch_s(self) -> float:
        return 0.1

    def submit(self, job: Callable[[], Replanned[Plan]]) -> Future[Replanned[Plan]]:
        self._jobs.append((Future(), job))
        return self._jobs[-1][0]

    def work(self) -> None:
        """Does what was submitted and not cancelled."""
        for future, job in self._jobs:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except TesseraError as error:
                    future.set_exception(error)
        self._jobs = []
