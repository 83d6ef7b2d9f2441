"""DeviceWorker: the loop of workers of every kind.

It takes news (orders, arrivals from other workers), else advances the device.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from tessera.errors import TesseraError
from tessera.execute import messages
from tessera.execute.engine_connection import EngineConnection
from tessera.execute.links import Links, PageNews
from tessera.execute.mailbox import Hangup
from tessera.execute.memory import DeviceState, StatePlace, Storage, is_cleared
from tessera.execute.page_mover import PageMover
from tessera.ir import Program


class DeviceWorker(ABC):
    def __init__(self, setup: messages.Setup, engine: EngineConnection) -> None:
        self._setup, self._engine = setup, engine
        self._programs: list[Sequence[Program]] = []
        self._links = Links(setup, engine.mailbox, engine.post)
        self._pages: PageMover
        self._state: DeviceState

    def loop(self) -> None:
        self._engine.where = self._where
        self._engine.tell(messages.WorkerReady(time.monotonic(), os.getpid(), self._links.address))
        is_idle = False
        while True:
            news = self._engine.take(block=is_idle)
            if isinstance(news, Hangup):
                return
            if news is not None:
                self._handle(news)
            is_idle = news is None and not (self._advance() | self._pages.advance() or self._prepare())

    def _handle(self, news: Any) -> None:
        match news:
            case messages.Begin():
                self._begin(news)
            case messages.LateInputs():
                self._give(news)
            case messages.Cancel(run):
                self._pages.cancel(run)
                self._cancel(run)
                self._engine.tell(messages.Cancelled(run))
            case messages.Clear(microbatch, lane):
                self._clear(microbatch, lane)
            case messages.LoadLanes():
                news.verify()
                self._setup = self._setup.extended(news)
                self._links.load(news.programs)
                self._load(news)
                self._pages.retry()
            case messages.DropLanes(lanes, homes):
                self._setup = replace(self._setup, dropped=(*self._setup.dropped, *lanes))
                self._state.drop(homes, self._setup.kept_microbatches)
                self._drop(set(lanes))
            case messages.MovePages():
                self._pages.order(news)
            case PageNews():
                self._pages.hear(news)
            case messages.Relink(device, epoch, address):
                self._links.relink(device, epoch, address)
                self._relink(device, epoch)
                self._pages.reset(device)
            case messages.PeerLost():
                self._engine.tell(news)
            case _:
                raise TesseraError(f"a worker was sent {type(news).__name__}")

    @abstractmethod
    def _advance(self) -> bool:
        """False if only news can continue the work."""

    def _prepare(self) -> bool:
        """Does work that can wait; False if there is none."""
        return False

    def _begin(self, order: messages.Begin) -> None:
        """Starts or queues a run."""

    def _give(self, late: messages.LateInputs) -> None:
        """Lets an open run go on."""

    def _cancel(self, run: int) -> None:
        """Drops a run that will never be complete."""

    def _clear(self, microbatch: int, lane: int) -> None:
        for program in self._programs[lane]:
            for name, contents in self._state.named(microbatch, program).items():
                if is_cleared(program, name):
                    contents.zero_()

    def _find(self, place: StatePlace, name: str) -> Storage | None:
        return self._state.find(place, name, self._programs)

    def _load(self, new: messages.LoadLanes) -> None:
        """Adds lanes and steps."""

    def _drop(self, lanes: Collection[int]) -> None:
        """Frees their memory."""

    @property
    def _live(self) -> list[Program]:
        dropped = set(self._setup.dropped)
        return [p for lane, programs in enumerate(self._programs) if lane not in dropped for p in programs]

    def _relink(self, device: int, epoch: int) -> None:
        """Hook: the link to a device was reopened."""

    @abstractmethod
    def _where(self) -> list[tuple[int, int, int]]:
        """(microbatch, run, position) of every active run; called by another thread."""

    def close(self) -> None:
        self._links.close()
