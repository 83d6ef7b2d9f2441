"""`tessera serve` on several machines: two hosts in network namespaces; how processes of torchrun meet."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import netns
from tessera.cli import _main
from tessera.cli.remote import Meeting, gathered
from tessera.errors import MismatchError

TESSERA = [sys.executable, "-m", "tessera"]
SMALL = [
    "--max-model-len",
    "32",
    "--seqs",
    "2",
    "--microbatches",
    "1",
    "--max-batch-tokens",
    "8",
    "--policy",
    "latency",
    "--effort",
    "quick",
]
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
        with (tmp_path / f"{len(running)}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
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


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two machines; those that `start` starts on them end before the wire does."""
    with netns.joined("10.98.0") as names:
        yield names


@pytest.mark.slow
def test_two_hosts_serve_one_model(hosts: tuple[str, str], tmp_path: Path, start: Start) -> None:
    """One has the endpoint and a device, the other only a worker, which is sent what to run.

    The wire between them is cut for a while: the answer is late and the same. In the end the worker leaves.
    """
    secret = tmp_path / "secret"
    secret.write_text("a secret of more than sixteen bytes\n")
    here, there = (netns.within(name) for name in hosts)
    meet = ["--rendezvous", "10.98.0.1:29500", "--secret-file", str(secret)]
    service = start([*here, *TESSERA, *SERVE, *meet])
    worker = start([*there, *TESSERA, "worker", *meet])
    url = url_of(service)
    first = fetch(url, here)
    netns.set_wire(hosts[1], "down")
    mend = threading.Timer(2.0, netns.set_wire, (hosts[1], "up"))
    mend.start()
    second = fetch(url, here)
    mend.join()
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


def test_processes_of_torchrun_find_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells where it listens through torchrun's own store, and there is one process per device."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    first, second = (under_torchrun(monkeypatch, rank, store) for rank in (0, 1))
    with gathered("emu:a100,emu:l40s", first, None, "tiny-llama") as (devices, hub):
        assert ["emu:a100", "emu:l40s"] == [device.name for device in devices]
        assert isinstance(hub, partial)
        assert (1, "127.0.0.1", hub.keywords["rendezvous"].port) == (second.rank, *second.address())
    with (
        pytest.raises(MismatchError, match=r"torchrun started 2 processes for 3 devices"),
        gathered("emu:a100,emu:l40s,emu:l40s", first, None, "tiny-llama"),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "tiny-llama", "--rendezvous", "nowhere"], "no HOST:PORT"),
        (["serve", "tiny-llama", "--rank", "1"], "--rendezvous: no address is given"),
        (["serve", "tiny-llama", "--secret-file", __file__], "--rendezvous: no address is given"),
        (["serve", "tiny-llama", "--rendezvous", "10.1.2.3:4"], "--secret-file"),
        (["serve", "tiny-llama", "--rendezvous", "127.0.0.1:0", "--ray", "local"], "one way only"),
        (["serve", "tiny-llama", "--ray", "ray://10.1.2.3:10001"], "--ray auto"),
        (["serve", "tiny-llama", "--devices", "away:a100*"], "only Ray knows"),
        (
            ["serve", "tiny-llama", "--devices", "emu:a100", "--transport", "pigeon"],
            "unknown transport 'pigeon'",
        ),
        (["worker"], "--rendezvous"),
        (["worker", "--rendezvous", "10.1.2.3:4"], "--secret-file"),
        (["worker", "--rendezvous", "127.0.0.1:4", "--rank", "-2"], "--rank"),
        (["worker", "--rendezvous", "127.0.0.1:4", "--patience", "-1"], "--patience"),
    ],
)
def test_wrong_options_end_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names the option and what to do."""
    assert 2 == _main(words)
    assert message in capsys.readouterr().err
