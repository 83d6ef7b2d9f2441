"""A server in a process of its own, and what it and its workers take of the machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

START_LIMIT_S = 180.0


@dataclass
class Watched:
    """Resident bytes of each process over time."""

    samples: list[tuple[float, dict[int, int]]] = field(default_factory=list)

    def thirds(self) -> dict[str, Any]:
        """Mean of the first and of the last third, in MB, of all processes together."""
        sums = [sum(sample.values()) / 1e6 for _, sample in self.samples]
        third = max(1, len(sums) // 3)
        first, last = sum(sums[:third]) / third, sum(sums[-third:]) / third
        each = range(0, len(sums), max(1, len(sums) // 12))
        return {
            "samples": len(sums),
            "every_twelfth_mb": [round(sums[i]) for i in each],
            "processes": len(self.samples[-1][1]),
            "first_third_mb": round(first, 1),
            "last_third_mb": round(last, 1),
            "growth": last / first - 1.0,
        }


class Server:
    """A server in a process of its own; in a `with` statement."""

    def __init__(self, words: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = [sys.executable, *words, "--port", str(self.port)]
        self.start_s = 0.0

    def __enter__(self) -> "Server":
        begun = time.perf_counter()
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, env=environment())
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() - begun > START_LIMIT_S:
                self._process.kill()
                raise SystemExit(f"did not start: {' '.join(self._words)}")
            time.sleep(0.1)
        self.start_s = time.perf_counter() - begun
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def processes(self) -> list[int]:
        """The server and everything it started."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def resident(self) -> dict[int, int]:
        """Bytes of each process; memory that several share counts in each."""
        found = {}
        for pid in self.processes():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
            found[pid] = pages * os.sysconf("SC_PAGE_SIZE")
        return found

    def processor_s(self) -> float:
        """Seconds of processor that all of them used."""
        ticks = 0
        for pid in self.processes():
            try:
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def watched(self) -> Iterator[Watched]:
        """Samples memory meanwhile."""
        seen, is_over = Watched(), threading.Event()

        def watch() -> None:
            while not is_over.wait(0.5):
                seen.samples.append((time.perf_counter(), self.resident()))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield seen
        finally:
            is_over.set()
            thread.join()


def environment() -> dict[str, str]:
    """One thread a process: there are as many processes as cores."""
    return os.environ | {"OMP_NUM_THREADS": "1"}
