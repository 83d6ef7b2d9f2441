"""`tessera run` on several machines: processes that meet at an address, in network namespaces too."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import netns
from commands import answer, without_transformers
from tessera.cli import _main

TESSERA = [sys.executable, "-m", "tessera"]
# Processes import the tests' own model.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
LIMIT_S = 240


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that divides a model without transformers, whose import takes seconds."""
    folder = tmp_path_factory.mktemp("remote")
    capture = ["capture", "layers_model:step", "-o", str(folder / "x.trace")]
    divide = ["plan", str(folder / "x.trace"), "--devices", "emu:a100,emu:l40s", "--policy", "layer-pipeline"]
    for words in (capture, [*divide, "-o", str(folder / "x.plan")]):
        assert 0 == _main(words)
    (folder / "secret").write_text("a secret of more than sixteen bytes\n")
    return folder / "x.plan"


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(plan: Path, commands: Sequence[Sequence[str]]) -> Any:
    """Runs the ranks together; the JSON document of the first."""
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for c in commands
    ]
    try:
        found = [process.communicate(timeout=LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [0] * len(commands) == [p.returncode for p in running], [err for _, err in found]
    out = found[0][0]
    return json.loads(out[out.index("{") :])


def ranks(plan: Path, address: str, *more: str) -> list[list[str]]:
    """The commands of rank 0 and 1."""
    meet = ["run", str(plan), "--rendezvous", address, *more]
    return [
        [*TESSERA, *meet, "--rank", "0", "--requests", "4", "--verify", "--json"],
        [*TESSERA, *meet, "--rank", "1"],
    ]


def test_two_processes_meet_on_loopback(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a secret, on this machine only: the same bits over TCP. Rank 0 is this process."""
    first, second = ranks(plan, f"127.0.0.1:{free_port()}")
    without_transformers(plan.parent)
    path = os.pathsep.join([str(plan.parent), ENVIRONMENT["PYTHONPATH"]])
    with subprocess.Popen(second, env=ENVIRONMENT | {"PYTHONPATH": path}) as other:
        found = answer(*first[len(TESSERA) : -1], capsys=capsys)
        assert 0 == other.wait(LIMIT_S)

    assert found["verified"] is True
    assert (4, 0) == (found["requests"], found["lost"])
    assert all(row["compute_us"] > 0 for row in found["per_device"])


@pytest.mark.slow
def test_torchrun_starts_the_same_program(plan: Path) -> None:
    """Two processes of torchrun are the two devices."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = ["-m", "tessera", "run", str(plan), "--torchrun", "--requests", "3", "--verify", "--json"]
    found = answers(plan, [[*launcher, *rendezvous, *command]])

    assert found["verified"] is True
    assert 0 == found["lost"]


@pytest.mark.slow  # by default a service does so: test_serve_remote
def test_two_network_namespaces_run_one_plan(plan: Path) -> None:
    """Nothing is shared but the wire and the secret, and every bit is the same."""
    commands = ranks(plan, "10.99.0.1:29500", "--secret-file", str(plan.with_name("secret")))
    with netns.joined("10.99.0") as hosts:
        found = answers(plan, [[*netns.within(n), *c] for n, c in zip(hosts, commands, strict=True)])

    assert found["verified"] is True
    assert (4, 0) == (found["requests"], found["lost"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rendezvous", "nowhere"], "no HOST:PORT"),
        (["--rendezvous", "10.1.2.3:4"], "--secret-file"),
        (["--rendezvous", "127.0.0.1:4", "--rank", "7"], "no rank 7"),
        (["--torchrun"], "not started by torchrun"),
        (["--transport", "pigeon"], "unknown transport 'pigeon'; known: auto, host, ipc, nvshmem, shm"),
    ],
)
def test_wrong_options_end_in_one_line(
    plan: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names the option and what to do."""
    assert 2 == _main(["run", str(plan), *words])
    assert message in capsys.readouterr().err
