r"""Requests in a row through a service whose policy is switched and whose workers are killed.

    python benchmarks/soak.py --requests 1000 --kills 20 --out benchmarks/results/soak_202611.json
    python benchmarks/soak.py --devices cuda:0/as=h20,cuda:0/as=l40s --requests 1000 --kills 20
    python benchmarks/soak.py --model tiny-gpt-oss --devices emu:l40s,cpu --memory emu:l40s=2.5MB \
        --policies kernel-level --requests 200 --kills 20
    python benchmarks/soak.py --minutes 30      through HTTP: see `soak_http`

All policies of a model are loaded in one pair of workers. Clients ask all the time, greedy, with prompts and
answers of random lengths; after every few answers another policy is chosen at random, so sequences are moved,
handed over in place or restarted; splits move pages all the time. Kills (SIGKILL) are spread over the run, of
a random device, and come only when all devices are ready. Every answer is compared with that of the same
request alone under the first policy (`single`, or with a cap the first one given), before the faults:

    wrong  other tokens
    lost   an error instead of an answer
    hung   no answer within --limit seconds

Exits with 1 unless all three are 0. Resident memory is the engine's, after a tenth of the requests and at the
end. Times are of this machine.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.soak_http import soaked_minutes

from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Load
from tessera.profile import cap_memory, parse_devices, wire
from tessera.serve.planning import prepare
from tessera.serve.policies import POLICIES
from tessera.serve.records import AnswerPiece, Ask, Finish, Sampling, ServeSpec
from tessera.serve.service import Service
from tessera.serve.text import ByteText

GREEDY = Sampling(temperature=0.0)
# Longest prompt and answer, and seconds in which killed workers must be back.
MAX_PROMPT, MAX_ANSWER, BACK_S = 40, 24, 120.0


@dataclass
class Soak:
    service: Service
    stepper: WorkerStepper
    asks: list[Ask]
    names: list[str]
    options: argparse.Namespace
    rng: random.Random
    references: list[list[int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    by_policy: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    resident_mb: list[float] = field(default_factory=list)

    async def answer(self, ask: Ask) -> tuple[list[int], str]:
        """Tokens, and the message of an error."""
        tokens: list[int] = []
        async for event in self.service.answer(ask):
            if isinstance(event, AnswerPiece):
                tokens += [token.number for token in event.tokens]
            elif isinstance(event, Finish) and event.reason == "error":
                return tokens, event.message or "error"
        return tokens, ""

    async def client(self) -> None:
        while self.num_asked < self.options.requests:
            self.num_asked += 1
            number = self.rng.randrange(len(self.asks))
            self.by_policy[self.service.policy] += 1
            try:
                given = await asyncio.wait_for(self.answer(self.asks[number]), self.options.limit)
            except TimeoutError:
                self.counts["hung"] += 1
                continue
            self.note(number, *given)

    def note(self, number: int, tokens: list[int], message: str) -> None:
        self.counts["answered"] += 1
        if message:
            self.counts["lost"] += 1
            self.messages.append(message)
        elif tokens != self.references[number]:
            self.counts["wrong"] += 1
        else:
            self.counts["right"] += 1
        if self.counts["answered"] % self.options.switch_every == 0:
            self.service.switch(self.rng.choice(self.names))
            self.counts["switches"] += 1
        if self.counts["answered"] == max(1, self.options.requests // 10):
            self.resident_mb.append(resident_mb())

    async def killer(self) -> None:
        """Kills at even shares of the requests."""
        for number in range(self.options.kills):
            due = (number + 0.5) / self.options.kills * self.options.requests
            while self.counts["answered"] + self.counts["hung"] < due:
                await asyncio.sleep(0.01)
            await self.ready()
            use = self.stepper.use().devices
            pid = use[self.rng.choice(sorted(use))].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.counts["kills"] += 1
            await asyncio.sleep(self.rng.random() * 0.5)

    async def ready(self) -> None:
        until_s = time.monotonic() + BACK_S
        while any(status.state != "ready" for status in self.stepper.use().devices.values()):
            if time.monotonic() > until_s:
                self.counts["not_back"] += 1
                return
            await asyncio.sleep(0.05)

    async def run(self) -> None:
        for ask in self.asks:
            tokens, message = await self.answer(ask)
            assert not message, message
            self.references.append(tokens)
        clients = [self.client() for _ in range(self.options.clients)]
        killing = asyncio.ensure_future(self.killer())
        await asyncio.gather(*clients)
        killing.cancel()
        await self.ready()


def resident_mb() -> float:
    return round(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def random_asks(num: int, rng: random.Random) -> list[Ask]:
    lengths = [(rng.randrange(1, MAX_PROMPT), rng.randrange(1, MAX_ANSWER + 1)) for _ in range(num)]
    return [
        Ask(tuple(rng.randrange(256) for _ in range(prompt)), answer, GREEDY, ignores_end=True)
        for prompt, answer in lengths
    ]


def soaked(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    # With a cap no device holds the model alone.
    names = [*([] if options.memory else ["single"]), *options.policies.split(",")]
    names = list(dict.fromkeys(names))
    spec = ServeSpec(
        2, options.seqs, 96, 32, load=Load(MAX_PROMPT // 2, MAX_ANSWER // 2),
        policies=tuple(names), effort="quick",
    )  # fmt: skip
    devices = cap_memory(parse_devices(options.devices), options.memory)
    made = prepare(options.model, wire(devices, [options.link]), spec)
    with (
        made.workers() as stepper,
        Service(
            stepper, made.policies, made.model.shape, ByteText(), policy=names[0], log=lambda line: None
        ) as service,
    ):
        soak = Soak(service, stepper, random_asks(options.distinct, rng), names, options, rng)
        begun_s = time.monotonic()
        asyncio.run(soak.run())
        seconds, state = time.monotonic() - begun_s, service.snapshot()
    soak.resident_mb.append(resident_mb())
    keys = ("answered", "right", "wrong", "lost", "hung", "switches", "kills", "not_back")
    return {
        "command": f"python benchmarks/soak.py {' '.join(sys.argv[1:])}",
        "requests": soak.num_asked,
        **{key: soak.counts[key] for key in keys},
        "pages_moved": state.pages_moved,
        "retried": state.retried,
        "preemptions": state.preemptions,
        "prefix_hits": state.prefix_hits,
        "last_switch_ms": state.last_switch_ms,
        "restarts": {device.name: device.restarts for device in state.devices},
        "by_policy": dict(soak.by_policy),
        "seconds": round(seconds, 1),
        "resident_mb": soak.resident_mb,
        "messages": soak.messages[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--devices", default="emu:a100,emu:l40s")
    parser.add_argument("--link", default="pcie4")
    parser.add_argument("--memory", action="append", default=[], help="DEVICE=SIZE, a cap of a device")
    parser.add_argument("--policies", default=",".join(POLICIES), help="besides single")
    parser.add_argument("--minutes", type=float, help="through HTTP, for so long")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--switch-every", type=int, default=7, help="answers between two switches")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--distinct", type=int, default=40)
    parser.add_argument("--seqs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.minutes:
        found = soaked_minutes(options, f"python benchmarks/soak.py {' '.join(sys.argv[1:])}")
    else:
        found = soaked(options)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if any(found.get(key) for key in ("wrong", "lost", "hung", "not_back")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
