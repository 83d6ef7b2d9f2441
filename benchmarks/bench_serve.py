"""How `tessera serve` does under load: errors, mixed-up answers, memory, and the plain way beside it.

    python benchmarks/bench_serve.py [--requests 2000] [--clients 200] [--out benchmarks/results/serve_202611]

The tiny Llama on this machine's CPU. `load`: streaming clients against `tessera serve` and against FastAPI
with `generate` in threads (`serve_plain.py`), the same requests one run after the other; every answer is
compared with the one given when its prompt was asked alone. `faults`: ten thousand open sockets, slow readers
and clients that go away, while 32 good clients ask. Latencies are the clients'; memory is resident, of the
server and its workers, sampled twice a second; seconds of processor are of the server's processes alone, so
other work on the machine does not count in them.
"""

import argparse
import json
import os
import platform
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

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny-llama"
START_LIMIT_S = 180.0
# (name, words): the plain server was quickest here with two workers of one thread each.
PLAIN = ("plain FastAPI + generate", [str(ROOT / "benchmarks" / "serve_plain.py"), "--workers", "2"])
KEPT = (
    "completed", "errors", "errors_by_kind", "duration", "request_throughput", "output_throughput",
    "mean_ttfb_ms", "median_ttfb_ms", "p99_ttfb_ms", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms", "total_input_tokens",
    "total_output_tokens", "verify",
)  # fmt: skip


@dataclass
class Watched:
    """Resident bytes of each process over time."""

    samples: list[tuple[float, dict[int, int]]] = field(default_factory=list)

    def thirds(self) -> dict[str, Any]:
        """Mean of the first and of the last third, in MB, of all processes together."""
        sums = [sum(sample.values()) / 1e6 for _, sample in self.samples]
        third = max(1, len(sums) // 3)
        first, last = sum(sums[:third]) / third, sum(sums[-third:]) / third
        return {
            "samples": len(sums),
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
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, env=_environment())
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


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def ask(url: str, *words: str) -> dict[str, Any]:
    """What `tessera bench serve` measures."""
    command = [sys.executable, "-m", "tessera", "bench", "serve", "--url", url, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return {key: found[key] for key in KEPT}


def load(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The same requests to both servers."""
    words = ["--requests", str(asked.requests), "--concurrency", str(asked.clients), "--verify"]
    words += ["--endpoint", "completions", "--prompt-tokens", "32", "--output-tokens", str(asked.tokens)]
    rows = []
    servers = [(f"tessera serve --devices {d}", _served(d, asked)) for d in asked.devices] + [PLAIN]
    for name, command in servers:
        with Server(command) as server, server.watched() as memory:
            ask(server.url, *words[2:], "--requests", str(asked.clients))  # until memory has settled
            memory.samples.clear()
            before = server.processor_s()
            found = ask(server.url, *words)
            used = server.processor_s() - before
        row = {"server": name, "start_s": server.start_s, **found, "memory": memory.thirds()}
        rows.append(row | {"processor_ms_a_token": 1e3 * used / found["total_output_tokens"]})
        print(shown(rows[-1]), flush=True)
    return rows


def _served(devices: str, asked: argparse.Namespace) -> list[str]:
    return ["-m", "tessera", "serve", MODEL, "--devices", devices, *asked.serve]


def ahead(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every `tessera serve` against the plain server; above 1 is ahead."""
    *ours, plain = rows
    return [
        {
            "server": row["server"],
            "throughput": row["output_throughput"] / plain["output_throughput"],
            "mean_ttfb": plain["mean_ttfb_ms"] / row["mean_ttfb_ms"],
            "mean_ttft": plain["mean_ttft_ms"] / row["mean_ttft_ms"],
            "p99_ttft": plain["p99_ttft_ms"] / row["p99_ttft_ms"],
            "processor_time": plain["processor_ms_a_token"] / row["processor_ms_a_token"],
        }
        for row in ours
    ]


def faults(asked: argparse.Namespace) -> dict[str, Any]:
    """Good clients beside bad ones."""
    words = ["--requests", "640", "--concurrency", "32", "--verify", "--endpoint", "completions"]
    with Server(_served(asked.devices[0], asked)) as server, server.watched() as memory:
        alone = ask(server.url, *words)
        command = [sys.executable, str(ROOT / "tests" / "bad_clients.py"), "--url", server.url]
        command += ["--idle", str(asked.sockets), "--slow", "64", "--leave", "16"]
        pipe = subprocess.PIPE
        bad = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=_environment())
        assert bad.stdout is not None
        up = json.loads(bad.stdout.readline())
        beside = ask(server.url, *words)
        counts, _ = bad.communicate("")
        after = ask(server.url, *words)
    good = {"alone": alone, "beside the bad ones": beside, "after they went": after}
    return {"bad_clients_up": up, "bad_clients": json.loads(counts), "good": good, "memory": memory.thirds()}


def main() -> None:
    """Prints; with --out writes JSON and Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--sockets", type=int, default=10_000)
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="further words of `tessera serve`"
    )
    parser.add_argument("--parts", nargs="+", default=["load", "faults"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "serve": asked.serve}
    if "load" in asked.parts:
        found["load"] = load(asked)
        found["ahead"] = ahead(found["load"])
        print(shown(found["ahead"]), flush=True)
    if "faults" in asked.parts:
        found["faults"] = faults(asked)
        print(shown(found["faults"]), flush=True)
    if asked.out is not None:
        asked.out.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")


def shown(part: Any) -> str:
    """As JSON, on as few lines as can be read."""
    return json.dumps(part, indent=1)


if __name__ == "__main__":
    main()
