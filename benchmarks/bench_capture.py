"""How long a full-size model takes to capture without a GPU, and how much memory.

    python -m benchmarks.bench_capture [MODEL ...] [--context 512] [--batch 1] [--json]
    python -m benchmarks.bench_capture --compiled --steps decode,denoise --context 1024 --batch 1,32,256

Every step of every full-size model is captured on fake CUDA tensors in a process of its own, from the command
line's start to the written trace: importing torch, building, recording, finding dependencies, saving.
`seconds` is the wall time of that process, `cpu` its processor time, `peak MB` its largest resident size. The
limits are 15 s and 1500 MB on two cores, held against the processor time: the process has one thread,
so that is its wall time on a machine that does nothing else.

With --compiled, Inductor's launches are captured: blocks that repeat are compiled once, for every batch anew;
nothing that an earlier process has compiled is used. The limits are then 40 s and 2000 MB.
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
# (seconds, MB) as recorded operator by operator, and compiled
LIMITS = {False: (15.0, 1500.0), True: (40.0, 2000.0)}


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one model."""

    model: str
    step: str
    batch: int
    is_compiled: bool
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
        seconds, megabytes = LIMITS[self.is_compiled]
        return self.cpu_s <= seconds and self.peak_mb <= megabytes


def measure(model: str, step: str, batch: int, context: int, is_compiled: bool = False) -> Row:
    """Captures one step in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["capture", model, "--device", "fake", "--step", step, "--batch", str(batch)]
        words += ["--context", str(context), "-o", str(Path(folder) / "x.trace"), "--json"]
        words += ["--compiled"] if is_compiled else []
        fresh = {name: str(Path(folder) / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "tessera", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **fresh},
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
        model, step, batch, is_compiled, found["launches"], found["views"], found["buffers"], found["edges"],
        round(found["weight_bytes"] / 1e9, 2), round(seconds, 1),
        round(usage.ru_utime + usage.ru_stime, 1), round(usage.ru_maxrss / 1024, 0),
    )  # fmt: skip


def show(row: Row) -> str:
    """One line of the table."""
    word = "" if row.is_within else "  OVER"
    return (
        f"{row.model:20}{row.step:9}{row.batch:6}{row.launches:9}{row.views:7}{row.buffers:9}{row.edges:7}"
        f"{row.weight_gb:11.2f}{row.seconds:9.1f}{row.cpu_s:7.1f}{row.peak_mb:9.0f}{word}"
    )


def main() -> int:
    """0 iff every step keeps both limits."""
    from tessera.capture import known_models

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=FULL_SIZE)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", default="1", help="rows, or several numbers with commas")
    parser.add_argument("--steps", default="", help="kinds of step with commas; all by default")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(
            f"{'model':20}{'step':9}{'batch':>6}{'launches':>9}{'views':>7}{'buffers':>9}{'edges':>7}"
            f"{'weights GB':>11}{'seconds':>9}{'cpu':>7}{'peak MB':>9}"
        )
    wanted = [
        (model, step, int(batch))
        for model in options.models
        for step in known_models()[model]
        for batch in options.batch.split(",")
        if not options.steps or step in options.steps.split(",")
    ]
    for model, step, batch in wanted:
        rows.append(measure(model, step, batch, options.context, options.compiled))
        if not options.json:
            print(show(rows[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(row) | {"within": row.is_within} for row in rows], indent=2))
    return 0 if all(row.is_within for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
