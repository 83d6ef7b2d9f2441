"""Answers of a form against plain ones, on a device that takes a fixed time for every step.

    python benchmarks/bench_schema.py [--step-ms 9] [--out benchmarks/results/schema_202611]

The engine, its grammars (a vocabulary of 128,256) and the encoding of its orders are real and take this
machine's time; the device is a clock. A step begins when the one before has ended and its order is there,
and chooses tokens when its masks are there; a message takes `--message-ms`. 64 sequences, a list of integers
as in `gpu_http.py`. No HTTP. On a busy machine run it with `chrt -r 1`.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from serving_factory import GREEDY, ToyStepper, read_all
from tessera.execute.messages import Begin, LateInputs, encode, pack
from tessera.execute.stepper import StepCall, StepDone, Tensors
from tessera.kernels.choice import Number
from tessera.serve.grammar import GrammarCompiler
from tessera.serve.records import Ask, Shape
from tessera.serve.service import Service
from tessera.serve.text import ByteText

ROWS, VOCAB, PROMPT = 64, 128_256, 8
SHAPE = Shape(
    microbatches=1, rows=ROWS, capacity=1024, sizes=(ROWS, 4 * ROWS), pool_tokens=16 * 2049, vocab_size=VOCAB
)
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}


class ClockDevice(ToyStepper):
    """Steps of a fixed time; what is chosen is any token that its mask allows."""

    def __init__(self, step_s: float, message_s: float, tail_s: float) -> None:
        super().__init__(SHAPE, ("clock",))
        self._step_time_s, self._message_s, self._tail_s = step_s, message_s, tail_s
        # What was ordered: (step, when its order and its masks were there, masks).
        self._ordered: deque[tuple[StepCall, float, float, Any]] = deque()
        self._free_s = 0.0
        self._is_awake = threading.Event()
        self.idle_s: list[float] = []

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        """One microbatch."""

    def close(self, microbatch: int) -> None:
        """At the end."""

    def can_queue(self, microbatch: int) -> bool:
        """One device."""
        return True

    def start(self, call: StepCall) -> None:
        """Encodes the order, as for a worker."""
        encode(Begin(0, 0, 0, 0, {name: pack(t) for name, t in call.inputs.items()}, {}, False))
        there_s = time.perf_counter() + self._message_s
        masks = None if call.is_open else call.inputs["masks"].numpy().copy()
        given_s = float("inf") if call.is_open else there_s
        numbers = call.inputs["numbers"].numpy()[:, Number.MASK].copy()
        call = replace(call, inputs={"rows": torch.from_numpy(numbers)})
        self._ordered.append((call, there_s, given_s, masks))

    def give(self, microbatch: int, inputs: Tensors) -> None:
        """Masks of the step that runs."""
        encode(LateInputs(0, {name: pack(t) for name, t in inputs.items()}))
        call, there_s, _, _ = self._ordered[0]
        given_s = time.perf_counter() + self._message_s
        self._ordered[0] = (call, there_s, given_s, inputs["masks"].numpy().copy())

    def take(self, timeout_s: float | None) -> StepDone | None:
        """Waits for the end of the oldest step."""
        limit_s = time.perf_counter() + (3600.0 if timeout_s is None else timeout_s)
        if not self._ordered:
            self._is_awake.wait(max(0.0, limit_s - time.perf_counter()))
            self._is_awake.clear()
            return None
        call, there_s, given_s, masks = self._ordered[0]
        begun_s = max(self._free_s, there_s)
        chosen_s = max(begun_s + self._step_time_s - self._tail_s, given_s)
        end_s = chosen_s + self._tail_s
        assert end_s < float("inf"), "an open step is given its masks before anything is waited for"
        until_s = min(end_s, limit_s) - time.perf_counter()
        if until_s > 0 and self._is_awake.wait(until_s):
            self._is_awake.clear()
            return None
        if end_s > limit_s:
            return None
        self._ordered.popleft()
        idle_s = (begun_s - self._free_s) + (chosen_s - begun_s - self._step_time_s + self._tail_s)
        if self._free_s and idle_s < 1.0:
            self.idle_s.append(idle_s)
        self._free_s = end_s
        tokens = torch.full((ROWS,), 65)
        for row, number in enumerate(call.inputs["rows"].tolist()):
            if number:
                tokens[row] = self._allowed(masks[number - 1])
        return StepDone(0, call.step, {"next_tokens": tokens}, self._step_time_s)

    def _allowed(self, mask: Any) -> int:
        words = np.flatnonzero(mask)
        if not len(words):
            return -1
        word = int(words[self._random.randrange(len(words))])
        bits = int(mask[word]) & 0xFFFFFFFF
        return 32 * word + (bits & -bits).bit_length() - 1

    def wake(self) -> None:
        """From any thread."""
        self._is_awake.set()


def measure(args: argparse.Namespace, grammar: Any, is_ahead: bool) -> dict[str, float]:
    """Tokens a second, and the device's idle time between two steps."""
    device = ClockDevice(args.step_ms / 1e3, args.message_ms / 1e3, args.tail_ms / 1e3)
    if not is_ahead:
        for lane in device.lanes.all:
            type(lane).can_give = property(lambda lane: False)  # type: ignore[method-assign, assignment]
    asks = [
        Ask((n, *range(PROMPT - 1)), args.tokens, GREEDY, grammar=grammar, ignores_end=True)
        for n in range(ROWS)
    ]
    with Service(device, device.policies, SHAPE, ByteText(), model="clock", log=lambda line: None) as service:
        asyncio.run(read_all(service, asks))
        device.idle_s.clear()
        begun_s = time.perf_counter()
        told = asyncio.run(read_all(service, asks))
        seconds = time.perf_counter() - begun_s
    num = sum(one.finish.output_tokens for one in told)
    assert num == ROWS * args.tokens, num
    idle_ms = float(np.median(device.idle_s)) * 1e3
    return {"tokens per s": round(num / seconds, 1), "idle ms between steps, median": round(idle_ms, 3)}


def main() -> None:
    """Greedy; a form with masks that follow its steps; a form whose steps wait for their masks."""
    parser = argparse.ArgumentParser(description="Answers of a form on a device of fixed step times.")
    parser.add_argument("--step-ms", type=float, default=9.0)
    parser.add_argument("--message-ms", type=float, default=0.3)
    parser.add_argument("--tail-ms", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    grammar = GrammarCompiler(ByteText(), VOCAB).compile(f"start: %json {json.dumps(LIST)}", "schema")
    found: dict[str, Any] = {"command": " ".join(["python", "benchmarks/bench_schema.py", *sys.argv[1:]])}
    is_first = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    found["machine"] = f"{os.cpu_count()} cores of {platform.machine()}{', ahead of other work' * is_first}"
    found["greedy"] = measure(args, None, True)
    found["schema"] = measure(args, grammar, True)
    found["schema, steps wait for their masks"] = measure(args, grammar, False)
    for name in ("schema", "schema, steps wait for their masks"):
        found[name]["of greedy"] = round(found[name]["tokens per s"] / found["greedy"]["tokens per s"], 4)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
