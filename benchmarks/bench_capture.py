"""How long a full-size model takes to capture without a GPU, and how much memory.

    python benchmarks/bench_capture.py [MODEL ...] [--context 512] [--batch 1] [--json]

Every step of every full-size model is captured on fake CUDA tensors in a process of its own, from the command
line's start to the written trace: importing torch, building, recording, finding dependencies, saving.
`seconds` is the wall time of that process, `cpu` its processor time, `peak MB` its largest resident size. The
limits are 15 s and 1500 MB on two cores, held against the processor time: the process has one thread,
so that is its wall time on a machine that does nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FULL_SIZE = ("llama-3-8b", "gpt-oss-20b", "mamba-codestral-7b", "qwen2.5-vl-7b", "sd3.5-medium")
MAX_SECONDS, MAX_MB = 15.0, 1500.0


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one model."""

    model: str
    step: str
    launches: int
    views: int
    buffers: int
    edges: int
    weight_gb: float
    seconds: float
    cpu_s: float
    peak_mb: float

    @property
    def is_within(self) -> bool:
        """True if both limits are kept."""
        return self.cpu_s <= MAX_SECONDS and self.peak_mb <= MAX_MB


def measure(model: str, step: str, batch: int, context: int) -> Row:
    """Captures one step in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["capture", model, "--device", "fake", "--step", step, "--batch", str(batch)]
        words += ["--context", str(context), "-o", str(Path(folder) / "x.trace"), "--json"]
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "tessera", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        answer = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"tessera {' '.join(words)} ended with {process.returncode}")
    found = json.loads(answer)
    return Row(
        model, step, found["launches"], found["views"], found["buffers"], found["edges"],
        round(found["weight_bytes"] / 1e9, 2), round(seconds, 1),
        round(usage.ru_utime + usage.ru_stime, 1), round(usage.ru_maxrss / 1024, 0),
    )  # fmt: skip


def show(row: Row) -> str:
    """One line of the table."""
    word = "" if row.is_within else "  OVER"
    return (
        f"{row.model:20}{row.step:9}{row.launches:9}{row.views:7}{row.buffers:9}{row.edges:7}"
        f"{row.weight_gb:11.2f}{row.seconds:9.1f}{row.cpu_s:7.1f}{row.peak_mb:9.0f}{word}"
    )


def main() -> int:
    """0 iff every step keeps both limits."""
    from tessera.capture import known_models

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=FULL_SIZE)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(
            f"{'model':20}{'step':9}{'launches':>9}{'views':>7}{'buffers':>9}{'edges':>7}"
            f"{'weights GB':>11}{'seconds':>9}{'cpu':>7}{'peak MB':>9}"
        )
    for model in options.models:
        for step in known_models()[model]:
            rows.append(measure(model, step, options.batch, options.context))
            if not options.json:
                print(show(rows[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(row) | {"within": row.is_within} for row in rows], indent=2))
    return 0 if all(row.is_within for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
