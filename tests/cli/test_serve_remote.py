"""`tessera serve` on several machines: two hosts in network namespaces; how processes of torchrun meet."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from tessera.cli import _main
from tessera.cli.remote import Meeting, gathered
from tessera.errors import MismatchError
from tessera.profile import parse_devices, wire

TESSERA = [sys.executable, "-m", "tessera"]
SMALL = ["--max-len", "32", "--rows", "2", "--slots", "1", "--chunk", "8", "--policy", "latency"]
SERVE = ["serve", "tiny-llama", "--devices", "emu:a100,emu:l40s", *SMALL, "--port", "0", "--json"]
ASK = {"model": "tiny-llama", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LIMIT_S = 240
FETCH = (
    "import sys, urllib.request as r; "
    "q = r.Request(sys.argv[1], sys.argv[2].encode(), {'content-type': 'application/json'}); "
    "print(r.urlopen(q, timeout=120).read().decode())"
)
Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands, and ends what is left of them: first politely, so that they end their own."""
    running: list[subprocess.Popen[str]] = []

    def go(command: Sequence[str]) -> "subprocess.Popen[str]":
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{len(running)}.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        running.append(process)
        return process

    yield go
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def url_of(process: "subprocess.Popen[str]") -> str:
    """Where a service answers, when it does."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended before it answered"
    return str(json.loads(line)["url"])


def fetch(url: str, prefix: Sequence[str] = ()) -> Any:
    """Asks for a completion, from where `prefix` puts the client."""
    command = [*prefix, sys.executable, "-c", FETCH, f"{url}/v1/completions", json.dumps(ASK)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert 0 == found.returncode, found.stderr
    return json.loads(found.stdout)["choices"][0]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that all hosts have."""
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of more than sixteen bytes\n")
    return path


def ip(*words: str) -> bool:
    """Runs the ip tool; True if it did what it was told."""
    return 0 == subprocess.run(["ip", *words], capture_output=True, check=False).returncode


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a wire: two machines as far as the network is concerned."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip tool")
    names = (f"tessera-c{os.getpid()}", f"tessera-d{os.getpid()}")
    ends = (f"tc{os.getpid()}", f"td{os.getpid()}")
    try:
        made = all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            made = made and ip("link", "set", end, "netns", name)
            made = made and ip("-n", name, "addr", "add", f"10.98.0.{number + 1}/24", "dev", end)
            made = made and ip("-n", name, "link", "set", end, "up")
            made = made and ip("-n", name, "link", "set", "lo", "up")
        if not made:
            pytest.skip("this machine does not permit network namespaces")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def test_two_hosts_serve_one_model(hosts: tuple[str, str], secret: Path, start: Start) -> None:
    """One has the endpoint and a device, the other only a worker, which is sent what to run, and leaves."""
    here, there = (["ip", "netns", "exec", name] for name in hosts)
    meet = ["--rendezvous", "10.98.0.1:29500", "--secret-file", str(secret)]
    service = start([*here, *TESSERA, *SERVE, *meet])
    worker = start([*there, *TESSERA, "worker", *meet])
    url = url_of(service)
    first, second = fetch(url, here), fetch(url, here)
    service.send_signal(signal.SIGTERM)

    assert "length" == first["finish_reason"]
    assert first == second
    assert 0 == service.wait(LIMIT_S)
    assert 0 == worker.wait(LIMIT_S)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, store: Any) -> Meeting:
    """What a process of torchrun makes of its surroundings, which are a store, its rank and their number."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    module = sys.modules["torch.distributed.rendezvous"]  # a function of that name hides it
    monkeypatch.setattr(module, "rendezvous", lambda url: iter([(store, rank, 2)]))
    return Meeting.of(None, 0, None, True)


def test_processes_of_torchrun_find_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells where it listens through torchrun's own store, and there must be one process a device."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    first, second = (under_torchrun(monkeypatch, rank, store) for rank in (0, 1))
    two, three = (wire(parse_devices(",".join(["cpu"] * n)), []) for n in (2, 3))
    with gathered(two, "tiny-llama", first, None) as gathering:
        assert gathering is not None
        assert (1, gathering.gate.address) == (second.rank, second.address())
    with (
        pytest.raises(MismatchError, match=r"torchrun started 2 processes for 3 devices"),
        gathered(three, "tiny-llama", first, None),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "tiny-llama", "--rendezvous", "nowhere"], "no HOST:PORT"),
        (["serve", "tiny-llama", "--rendezvous", "10.1.2.3:4"], "--secret-file"),
        (["serve", "tiny-llama", "--rendezvous", "127.0.0.1:0", "--ray", "local"], "one way only"),
        (["serve", "tiny-llama", "--ray", "ray://10.1.2.3:10001"], "--ray auto"),
        (["worker"], "--rendezvous"),
        (["worker", "--rendezvous", "10.1.2.3:4"], "--secret-file"),
        (["worker", "--rendezvous", "127.0.0.1:4", "--rank", "-2"], "no rank -2"),
        (["worker", "--rendezvous", "127.0.0.1:4", "--patience", "-1"], "--patience"),
    ],
)
def test_wrong_options_end_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names the option and what to do."""
    assert 2 == _main(words)
    assert message in capsys.readouterr().err
