"""Services under faults: workers killed, a wire cut, a Ray node killed; every answer compared.

    python benchmarks/bench_faults.py [--kills 100] [--parts kills,starts,wire,ray] \
        [--out benchmarks/results/faults_202611]

The tiny Llama served over HTTP on `emu:a100,emu:l40s`, four clients that ask all the time, greedy. Every
answer is compared with that of the same service on one device. It is right, wrong, refused in words (an HTTP
error that says why; the client asks again), or silently lost (no answer in two minutes, or a connection that
ends without one). Full strength: `/v1/state` shows every device as ready.

kills  workers of this machine, killed (SIGKILL) at random: one device or the other, at work or while the
       worker before it is still being replaced
starts workers of services that start, killed before they are ready
wire   two hosts in network namespaces, one with the service and a device, one with `tessera worker`; the wire
       between them is cut for 2 s, for 30 s, and for good (needs root)
ray    a Ray cluster of two nodes on this machine, of which one is killed and another added some seconds later

Times are of this CPU and everything that runs beside; no GPU.
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import netns

TESSERA = [sys.executable, "-m", "tessera"]
SIZES = ["--max-model-len", "64", "--seqs", "2", "--microbatches", "2", "--max-batch-tokens", "16"]
DEVICES = "emu:a100,emu:l40s"
CLIENTS, ANSWER_S, READY_S = 4, 120.0, 240.0
CLONE_NEWNET = 0x40000000
SECRET = "a secret of more than sixteen bytes\n"

ABOUT = """\
The tiny Llama over HTTP on `emu:a100,emu:l40s`, four clients; every answer is compared with the same
service on one device: tokens and end exactly, logarithms of probabilities within 1e-4 (a request that is
taken up again reads its own tokens as a prompt). Refused in words: an HTTP error that says why, here that
its devices were lost again; the client asks again. Full strength: every device ready in `/v1/state`, from
the last kill of a burst on; a device that fails three times in a row without a step between is left alone
for 10 s, then 20 s and so on, by design. The machine was shared with other work.
"""

Ask = tuple[tuple[int, ...], int]
# A request that is taken up again reads its own tokens as a prompt: the last bit of a probability may differ.
NEAR = 1e-4


@dataclass(frozen=True)
class Told:
    """An answer: its tokens and how it ended, and the logarithms of their probabilities."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


def is_same(one: Told, other: Told) -> bool:
    """True iff the tokens are the same, and the probabilities nearly."""
    near = all(abs(a - b) < NEAR for a, b in zip(one.logprobs, other.logprobs, strict=False))
    return one.tokens == other.tokens and near


def some_asks(num: int = 12) -> list[Ask]:
    """Prompts and how many tokens are wanted."""
    rng = random.Random(0)
    return [
        (tuple(rng.randrange(256) for _ in range(rng.randrange(1, 33))), rng.randrange(8, 25))
        for _ in range(num)
    ]


class Service:
    """A server in a process of its own; in a `with` statement."""

    def __init__(self, *words: str, devices: str = DEVICES, folder: Path) -> None:
        self._log = folder / f"serve-{time.monotonic_ns()}.log"
        command = [
            *TESSERA,
            "serve",
            "tiny-llama",
            "--devices",
            devices,
            *SIZES,
            "--port",
            "0",
            "--json",
            *words,
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
            )
        self.url = ""

    def __enter__(self) -> "Service":
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the service did not start:\n{self.said()}")
        self.url = json.loads(line)["url"]
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Number of its process."""
        return self._process.pid

    def is_running(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def said(self) -> str:
        """Its standard error."""
        return self._log.read_text()

    def ask(self, ask: Ask) -> Told:
        """What a request is answered; raises OSError, ValueError or HTTPException if it is not."""
        body = {"model": "tiny-llama", "prompt": list(ask[0]), "max_tokens": ask[1], "temperature": 0}
        data = json.dumps(body | {"ignore_eos": True, "logprobs": 1}).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", data, head)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            choice = json.loads(reply.read())["choices"][0]
        told = choice["logprobs"]
        return Told((*told["tokens"], choice["finish_reason"]), tuple(told["token_logprobs"]))

    def devices(self) -> list[dict[str, Any]]:
        """As `/v1/state` shows them."""
        with urllib.request.urlopen(f"{self.url}/v1/state", timeout=ANSWER_S) as reply:
            return list(json.loads(reply.read())["devices"])

    def is_whole(self, restarts: Mapping[str, int] | None = None) -> bool:
        """True if every device is ready, and was started again so often."""
        wanted = restarts or {}
        return all(
            device["state"] == "ready" and device["restarts"] >= wanted.get(device["name"], 0)
            for device in self.devices()
        )

    def await_whole(self, restarts: Mapping[str, int] | None = None, limit_s: float = READY_S) -> float:
        """Seconds until it is at full strength."""
        start_s = time.monotonic()
        while not self.is_whole(restarts):
            if time.monotonic() - start_s > limit_s:
                raise SystemExit(f"not at full strength after {limit_s:.0f} s:\n{self.said()}")
            time.sleep(0.05)
        return time.monotonic() - start_s


@dataclass
class Load:
    """Clients that ask all the time; in a `with` statement."""

    service: Service
    expected: dict[Ask, Told]
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    # When right answers came.
    right_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        for number in range(CLIENTS):
            self._threads.append(threading.Thread(target=self._run, args=(random.Random(number),)))
            self._threads[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, rng: random.Random) -> None:
        asks = list(self.expected)
        while not self._is_over.is_set():
            ask, start_s = rng.choice(asks), time.monotonic()
            what = self._one(ask)
            self.counts[what] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - start_s)
            if what == "right":
                self.right_s.append(time.monotonic())
            else:
                time.sleep(0.2)

    def _one(self, ask: Ask) -> str:
        try:
            found = self.service.ask(ask)
            if not is_same(found, self.expected[ask]):
                self.refusals[f"wrong: {found} in place of {self.expected[ask]}"[:500]] += 1
                return "wrong"
            return "right"
        except urllib.error.HTTPError as error:
            with error:
                said = json.loads(error.read()).get("error", {}).get("message", "")
            self.refusals[f"{error.code} {said}"[:160]] += 1
            return "refused" if said else "silent"
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.refusals[f"silent: {error!r}"[:160]] += 1
            return "silent"

    def await_answer(self, since_s: float, limit_s: float = READY_S) -> float:
        """Seconds from a moment to the first right answer to a request after it has been answered again."""
        while not any(at > since_s for at in self.right_s[-CLIENTS:]):
            if time.monotonic() - since_s > limit_s:
                raise SystemExit(f"nothing was answered for {limit_s:.0f} s:\n{self.service.said()}")
            time.sleep(0.05)
        return min(at for at in self.right_s if at > since_s) - since_s

    def document(self) -> dict[str, Any]:
        """What came of all requests."""
        told = {what: self.counts[what] for what in ("right", "wrong", "refused", "silent")}
        return {**told, "longest_answer_s": round(self.longest_s, 2), "refusals": dict(self.refusals)}


def environment() -> dict[str, str]:
    """One thread a worker, as several share the machine."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def reference(folder: Path) -> dict[Ask, Told]:
    """What one device answers."""
    with Service(devices="emu:a100", folder=folder) as service:
        return {ask: service.ask(ask) for ask in some_asks()}


def figures(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum of times."""
    ordered = sorted(seconds)
    last = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {
        "median_s": round(statistics.median(ordered), 2),
        "p95_s": round(last, 2),
        "max_s": round(ordered[-1], 2),
    }


def kill_workers(num: int, expected: dict[Ask, Told], folder: Path, seed: int = 0) -> dict[str, Any]:
    """Kills at random, alone and in bursts that strike replacements while they start."""
    rng, states, times, bursts = random.Random(seed), Counter[str](), list[float](), Counter[int]()
    with Service(folder=folder) as service, Load(service, expected) as load:
        service.await_whole()
        done = 0
        while done < num:
            size = min(rng.choice((1, 1, 1, 2, 3)), num - done)
            bursts[size] += 1
            restarts: dict[str, int] = {}
            for number in range(size):
                is_hurried = number > 0 and rng.random() < 0.7
                if not is_hurried:
                    time.sleep(rng.random() * rng.choice((0.05, 0.5, 2.0)))
                device = kill_one(service, rng, is_hurried)
                states[device["state"]] += 1
                restarts[device["name"]] = device["restarts"] + 1
                done += 1
            times.append(service.await_whole(restarts))
            time.sleep(rng.random())
        load.await_answer(time.monotonic())
        num_restarts = sum(device["restarts"] for device in service.devices())
    return {
        "kills": num,
        "killed_while": dict(states),
        "bursts": {str(size): n for size, n in sorted(bursts.items())},
        "restarts": num_restarts,
        "full_strength": figures(times),
        **load.document(),
    }


def kill_one(service: Service, rng: random.Random, is_hurried: bool = False) -> dict[str, Any]:
    """Kills a worker that there is, in a hurry one that starts; returns how its device was."""
    hurry_s = time.monotonic() + 1.0
    while True:
        there = [device for device in service.devices() if device["pid"] is not None]
        if is_hurried and time.monotonic() < hurry_s:
            there = [device for device in there if device["state"] == "starting"]
        if not there:
            continue
        device = rng.choice(there)
        try:
            os.kill(device["pid"], signal.SIGKILL)
        except ProcessLookupError:  # it had just died
            continue
        return device


def start_under_fire(num: int, expected: dict[Ask, Told], folder: Path) -> dict[str, Any]:
    """Services whose first workers are killed before they are ready; they start all the same."""
    waits = []
    for seed in range(num):
        rng = random.Random(seed)
        start_s = time.monotonic()
        service = Service(folder=folder)
        kill_child(service, rng)
        with service:
            service.await_whole()
            waits.append(time.monotonic() - start_s)
            same = (is_same(service.ask(ask), told) for ask, told in expected.items())
            assert all(same), "a wrong answer"
    return {"starts": num, "ready": figures(waits)}


def kill_child(service: Service, rng: random.Random) -> None:
    """Kills a worker process of a service that starts, as soon as there is one and some moments more."""
    while service.is_running():
        found = [worker for parent in children(service.pid) for worker in children(parent)]
        if found:
            time.sleep(rng.random() * 0.3)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
                return
        time.sleep(0.01)
    raise SystemExit(f"the service did not start:\n{service.said()}")


def children(pid: int) -> list[int]:
    """Children of a process."""
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread, and what it starts, is in a network namespace meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(f"/var/run/netns/{name}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)


def cut_wire(expected: dict[Ask, Told], folder: Path) -> list[dict[str, Any]]:
    """Two hosts, the wire between them cut for some time."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    found = []
    with netns.joined("10.94.0") as (here, there), inside(here):
        meet = ["--rendezvous", "10.94.0.1:29500", "--secret-file", str(secret)]
        for cut_s in (2.0, 30.0, None):
            with (folder / f"worker-{cut_s}.log").open("w") as log:
                command = [*netns.within(there), *TESSERA, "worker", *meet]
                worker = subprocess.Popen(command, stderr=log, env=environment())
            try:
                with Service(*meet, folder=folder) as service, Load(service, expected) as load:
                    found.append(one_cut(service, load, there, cut_s))
            finally:
                netns.set_wire(there, "up")
                worker.terminate()
                worker.wait()
            found[-1] |= load.document()
    return found


def one_cut(service: Service, load: Load, there: str, cut_s: float | None) -> dict[str, Any]:
    """A cut under load, and what came after."""
    service.await_whole()
    time.sleep(3.0)
    netns.set_wire(there, "down")
    cut_at_s = time.monotonic()
    if cut_s is None:
        time.sleep(1.0)  # answers that were on their way
        answered_s = load.await_answer(time.monotonic())
        time.sleep(5.0)
        states = {device["name"]: device["state"] for device in service.devices()}
        return {"cut_s": None, "answers_after_s": round(1.0 + answered_s, 2), "devices": states}
    time.sleep(cut_s)
    netns.set_wire(there, "up")
    mended_s = time.monotonic()
    answered_s = load.await_answer(mended_s)
    time.sleep(0.5)
    service.await_whole()
    whole_s = time.monotonic() - mended_s
    time.sleep(3.0)
    lost = [device["name"] for device in service.devices() if device["losses"]]
    return {
        "cut_s": cut_s,
        "answers_after_s": round(answered_s, 2),
        "full_strength_s": round(whole_s, 2),
        "lost": lost,
        "since_cut_s": round(time.monotonic() - cut_at_s, 2),
    }


def kill_node(expected: dict[Ask, Told], folder: Path, pause_s: float = 10.0) -> dict[str, Any]:
    """A Ray cluster of two nodes, one of which is killed under load; another comes later."""
    import ray
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**small, "resources": {"a100": 1}})
    try:
        node = cluster.add_node(**small, resources={"l40s": 1})
        with Service("--ray", cluster.address, folder=folder) as service, Load(service, expected) as load:
            service.await_whole()
            time.sleep(3.0)
            cluster.remove_node(node, allow_graceful=False)
            killed_s = time.monotonic()
            noticed_s = until(lambda: not service.is_whole()) - killed_s
            time.sleep(pause_s)
            cluster.add_node(**small, resources={"l40s": 1})
            added_s = time.monotonic()
            whole_s = service.await_whole()
            answered_s = load.await_answer(added_s)
            time.sleep(3.0)
    finally:
        cluster.shutdown()
    return {
        "ray": ray.__version__,
        "noticed_s": round(noticed_s, 2),
        "node_away_s": round(added_s - killed_s, 2),
        "full_strength_s": round(whole_s, 2),
        "answers_after_s": round(answered_s, 2),
        **load.document(),
    }


def until(is_so: Callable[[], bool], limit_s: float = READY_S) -> float:
    """When something has come true."""
    start_s = time.monotonic()
    while not is_so():
        if time.monotonic() - start_s > limit_s:
            raise SystemExit("it did not happen")
        time.sleep(0.05)
    return time.monotonic()


def table(found: dict[str, Any]) -> str:
    """What is read."""
    head = ("fault", "right", "wrong", "refused in words", "silently lost", "longest answer s")
    rows = [f"| {' | '.join(head)} | full strength after s |", "|---|---|---|---|---|---|---|"]

    def row(name: str, part: dict[str, Any], strength: str) -> None:
        cells = [str(part[what]) for what in ("right", "wrong", "refused", "silent", "longest_answer_s")]
        rows.append(f"| {name} | {' | '.join(cells)} | {strength} |")

    if "kills" in found:
        part = found["kills"]
        took = part["full_strength"]
        while_in = ", ".join(f"{n} {state}" for state, n in part["killed_while"].items())
        row(
            f"{part['kills']} workers killed ({while_in})",
            part,
            f"median {took['median_s']}, p95 {took['p95_s']}, longest {took['max_s']}",
        )
    for part in found.get("wire", []):
        cut = "for good" if part["cut_s"] is None else f"for {part['cut_s']:g} s"
        strength = (
            f"{part['full_strength_s']} after the mend"
            if "full_strength_s" in part
            else (f"never; answers go on after {part['answers_after_s']}")
        )
        row(f"wire cut {cut}", part, strength)
    if "ray" in found:
        part = found["ray"]
        row(
            f"Ray node killed, another added {part['node_away_s']:g} s later",
            part,
            f"{part['full_strength_s']} after the node came",
        )
    return "\n".join(rows)


def main() -> None:
    """Runs the parts and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--parts", default="kills,starts,wire,ray")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults_202611"))
    options = parser.parse_args()
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        expected = reference(folder)
        path = options.out.with_suffix(".json")
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        runs: dict[str, Callable[[], Any]] = {
            "kills": lambda: kill_workers(options.kills, expected, folder),
            "starts": lambda: start_under_fire(options.starts, expected, folder),
            "wire": lambda: cut_wire(expected, folder),
            "ray": lambda: kill_node(expected, folder),
        }
        for part in parts:
            found[part] = runs[part]()
            print(part, json.dumps(found[part]), flush=True)
            path.write_text(json.dumps(found, indent=2) + "\n")
    write(found, options.out.with_suffix(".md"), options.kills)


def write(found: dict[str, Any], path: Path, kills: int) -> None:
    """The page beside the figures."""
    fire = found.get("starts")
    lines = [
        "# Services under faults",
        "",
        f"{found['machine']}; no GPU. Command: `python benchmarks/bench_faults.py --kills {kills}`",
        "",
        ABOUT,
        table(found),
        "",
    ]
    if fire:
        lines += [
            f"{fire['starts']} services had a worker killed while it started: all answered right, ready "
            f"after {fire['ready']['median_s']} s (median), {fire['ready']['max_s']} s at most.",
            "",
        ]
    path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
