"""GpuCopier: copies of pages on a stream of their own, beside the graphs, through pinned memory."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.device import GpuDevice
from tessera.execute.page_mover import PageCopier
from tessera.execute.transport import shared_bytes


class GpuCopier(PageCopier):
    def __init__(self, device: GpuDevice) -> None:
        super().__init__(device.card)
        self._stream = device.plain_stream(device.priorities[1])

    def stream(self) -> Any:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def staging(self, size: int, path: Path | None) -> torch.Tensor:
        if path is None:
            return driver.pinned((size,))
        shared = shared_bytes(path, size)
        with suppress(WorkerError):  # copies are then slower
            driver.pin(shared)
        return shared
