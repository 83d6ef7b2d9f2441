"""The time between two steps of a service on a GPU, and where the host's time goes.

    python benchmarks/gpu_gaps.py --out benchmarks/results --name gaps_h200_202611 \
        --cases cuda:0:32:1x64,cuda:0/as=h20+cuda:0/as=l40s:8:2x64:attention-ffn

A case is devices : layers (0: all) : microbatches x sequences : policy. Clients ask again and again.
Gaps are measured by CUDA events: from the end of a graph to the start of the next on the same GPU. A step is
`ahead` if it was ordered while another one of its microbatch ran. Host times are means per step:

    engine   between an event and the next wait: tokens chosen, next step named, text made
    order    of these, in `Stepper.start`: inputs packed, encoded and sent
    wait     until the next event

The worker's share is profiled afterwards in this process: one worker runs the last orders again, and cProfile
lists its functions by their own time. Moments of the start come with each case.
"""

import argparse
import cProfile
import io
import pstats
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_common import Log, about

PROMPT, OUTPUT = 512, 128
# Orders that the profiled worker runs again.
PROFILED = 200


class Watched:
    """A stepper whose calls are timed."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper
        self.is_on = False
        self.order_s = self.engine_s = self.wait_s = 0.0
        # (step, ordered ahead, seconds, busy and idle by device)
        self.steps: list[tuple[int, bool, float, dict[str, float], dict[str, float]]] = []
        self._running: dict[int, int] = defaultdict(int)
        self._ahead: dict[int, list[bool]] = defaultdict(list)
        self._left_s = time.perf_counter()
        # (device, encoded order) of the last orders.
        self.orders: list[tuple[int, bytes]] = []
        send = stepper.hub.send

        def kept(device: int, data: bytes) -> bool:
            self.orders = [*self.orders[-4 * PROFILED :], (device, data)] if self.is_on else []
            return bool(send(device, data))

        stepper.hub.send = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def start(self, call: Any) -> None:
        began = time.perf_counter()
        self._ahead[call.microbatch].append(self._running[call.microbatch] > 0)
        self._running[call.microbatch] += 1
        self._stepper.start(call)
        self.order_s += time.perf_counter() - began

    def take(self, timeout_s: float | None) -> Any:
        began = time.perf_counter()
        self.engine_s += began - self._left_s
        event = self._stepper.take(timeout_s)
        self._left_s = time.perf_counter()
        self.wait_s += self._left_s - began
        if type(event).__name__ == "StepDone":
            self._running[event.microbatch] -= 1
            is_ahead = self._ahead[event.microbatch].pop(0)
            if self.is_on:
                times = (event.seconds, dict(event.busy_s), dict(event.idle_s))
                self.steps.append((event.step, is_ahead, *times))
        return event

    def reset(self) -> None:
        self.is_on, self.steps = True, []
        self.order_s = self.engine_s = self.wait_s = 0.0


def spread_us(values_s: list[float]) -> dict[str, float]:
    """Quantiles in microseconds."""
    ranked = sorted(values_s)
    if not ranked:
        return {"num": 0}
    at = {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (10, 50, 90, 99)}
    mean = sum(ranked) / len(ranked)
    return {"num": len(ranked), **{k: round(v * 1e6, 1) for k, v in {**at, "mean": mean}.items()}}


def gaps_of(watched: Watched, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for is_ahead in (True, False):
        rows = [row for row in watched.steps if row[1] is is_ahead]
        word = "ahead" if is_ahead else "not ahead"
        for device in sorted({name for row in rows for name in row[4]}):
            found[f"gap us, {word}, {device}"] = spread_us(
                [row[4][device] for row in rows if device in row[4]]
            )
        for step in sorted({row[0] for row in rows}):
            some = [row for row in rows if row[0] == step]
            busy = [max(row[3].values(), default=0.0) for row in some]
            found[f"{names[step]}, {word}"] = {
                "step us": spread_us([row[2] for row in some]), "busy us": spread_us(busy),
            }  # fmt: skip
    num = max(1, len(watched.steps))
    found["host us per step"] = {
        "engine": round((watched.engine_s - watched.order_s) / num * 1e6, 1),
        "order": round(watched.order_s / num * 1e6, 1),
        "wait": round(watched.wait_s / num * 1e6, 1),
    }
    return found


class _Told:
    """An engine for a worker in this process: keeps nothing."""

    mailbox: Any = None

    def __init__(self) -> None:
        self.leads = False

    def tell(self, message: Any) -> None:
        from tessera.execute.messages import encode

        encode(message)

    def post(self, news: Any) -> None:
        pass


def profiled(setup: Any, orders: list[tuple[int, bytes]]) -> list[str]:
    """Orders of a worker with the card to itself, one after the other; its functions by own time."""
    import torch

    from tessera.execute.cuda.worker import CudaWorker
    from tessera.execute.messages import Begin, decode

    torch.set_grad_enabled(False)
    engine: Any = _Told()
    worker = CudaWorker(setup, engine)
    found = [data for device, data in orders if device == setup.device]
    begins = [data for data in found if isinstance(decode(data), Begin)][-PROFILED:]

    def run(data: bytes) -> None:
        message: Any = decode(data)
        worker._handle(message)
        while worker._running:
            worker._end_runs()

    for data in begins[:20]:
        run(data)
    profile = cProfile.Profile()
    profile.enable()
    for data in begins:
        run(data)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(28)
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    worker.close()
    return [f"{len(begins)} orders", *lines[2:]]


def case(args: argparse.Namespace, text: str) -> dict[str, Any]:
    from benchmarks.gpu_serve_hf import named
    from benchmarks.gpu_serve_load import run_load

    from tessera.ir import Load
    from tessera.profile import parse_devices, wire
    from tessera.serve.planning import prepare
    from tessera.serve.records import ServeSpec
    from tessera.serve.service import Service
    from tessera.serve.text import ByteText

    rest, _, policy = text.rpartition(":") if text.count("x") and not text[-1].isdigit() else (text, "", "")
    rest, _, size = rest.rpartition(":")
    devices, _, layers = rest.rpartition(":")
    num, rows = (int(n) for n in size.split("x"))
    cluster = wire(parse_devices(devices.replace("+", ",")), ["pcie4"])
    began, moments = time.monotonic(), list[Any]()

    def advance(what: str) -> None:
        moments.append([round(time.monotonic() - began, 1), what])

    load = Load(PROMPT, OUTPUT)
    spec = ServeSpec(num, rows, 2 * (PROMPT + OUTPUT), 2048, load=load)
    spec = replace(spec, policies=(policy,)) if policy else spec
    model = named(args.model, int(layers)) if int(layers) else args.model
    prepared = prepare(model, cluster, spec, advance=advance)
    advance("starting workers")
    with prepared.workers("auto") as stepper:
        advance("workers are ready")
        watched: Any = Watched(stepper)
        with Service(watched, prepared.policies, prepared.model.shape, ByteText()) as service:
            run_load(service, num * rows, load, 2.0)
            advance("first load")
            watched.reset()
            found = run_load(service, num * rows, load, args.seconds)
        names = [f"{g.trace.step.context} tokens" for g in stepper.lanes.graphs]
        found |= gaps_of(watched, names)
        setup, orders = stepper.hub.setups[0], list(watched.orders)
    advance("done")
    if len(cluster.devices) == 1:
        found["worker's functions"] = profiled(setup, orders)
    return {"scale": round(prepared.scale, 3), **found, "moments": moments}


def main() -> None:
    parser = argparse.ArgumentParser(description="The time between two steps on a GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="gaps")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--cases", default="cuda:0:32:1x64")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / f"{args.name}.json")
    words = " ".join("OUT" if word == str(args.out) else word for word in sys.argv[1:])
    log.put("about", {**about(), "command": f"python benchmarks/gpu_gaps.py {words}"})
    for text in args.cases.split(","):
        found = log.attempt(text, case, args, text)
        for line in (found or {}).get("worker's functions", ()):
            print("   ", line)
        for key, value in (found or {}).items():
            if key != "worker's functions":
                print("   ", key, value)


if __name__ == "__main__":
    main()
