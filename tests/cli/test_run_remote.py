"""`tessera run` on several machines: processes that meet at an address, in network namespaces too."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import _main

TESSERA = [sys.executable, "-m", "tessera"]
LIMIT_S = 240


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that divides every layer."""
    folder = tmp_path_factory.mktemp("remote")
    capture = ["capture", "tiny-llama", "--batch", "1", "--context", "16", "-o", str(folder / "x.trace")]
    divide = ["plan", str(folder / "x.trace"), "--devices", "emu:a100,emu:l40s", "--policy", "attention-ffn"]
    for words in (capture, [*divide, "-o", str(folder / "x.plan")]):
        assert 0 == _main(words)
    (folder / "secret").write_text("a secret of more than sixteen bytes\n")
    return folder / "x.plan"


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(commands: Sequence[Sequence[str]]) -> Any:
    """Runs the ranks together; the JSON document of the first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
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


def test_two_processes_meet_on_loopback(plan: Path) -> None:
    """Without a secret, on this machine only: the same bits over gloo."""
    found = answers(ranks(plan, f"127.0.0.1:{free_port()}"))

    assert found["verified"] is True
    assert (4, 0) == (found["requests"], found["lost"])
    assert all(row["compute_us"] > 0 for row in found["per_device"])


def test_torchrun_starts_the_same_program(plan: Path) -> None:
    """Two processes of torchrun are the two devices."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = ["-m", "tessera", "run", str(plan), "--torchrun", "--requests", "3", "--verify", "--json"]
    found = answers([[*launcher, *rendezvous, *command]])

    assert found["verified"] is True
    assert 0 == found["lost"]


def ip(*words: str) -> bool:
    """Runs the ip tool; True if it did what it was told."""
    return 0 == subprocess.run(["ip", *words], capture_output=True, check=False).returncode


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a wire: two machines as far as the network is concerned."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip tool")
    names = (f"tessera-a{os.getpid()}", f"tessera-b{os.getpid()}")
    ends = (f"ta{os.getpid()}", f"tb{os.getpid()}")
    try:
        made = all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            made = made and ip("link", "set", end, "netns", name)
            made = made and ip("-n", name, "addr", "add", f"10.99.0.{number + 1}/24", "dev", end)
            made = made and ip("-n", name, "link", "set", end, "up")
            made = made and ip("-n", name, "link", "set", "lo", "up")
        if not made:
            pytest.skip("this machine does not permit network namespaces")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def test_two_network_namespaces_run_one_plan(plan: Path, namespaces: tuple[str, str]) -> None:
    """Nothing is shared but the wire and the secret, and every bit is the same."""
    commands = ranks(plan, "10.99.0.1:29500", "--secret-file", str(plan.with_name("secret")))
    found = answers([["ip", "netns", "exec", n, *c] for n, c in zip(namespaces, commands, strict=True)])

    assert found["verified"] is True
    assert (4, 0) == (found["requests"], found["lost"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rendezvous", "nowhere"], "no HOST:PORT"),
        (["--rendezvous", "10.1.2.3:4"], "--secret-file"),
        (["--rendezvous", "127.0.0.1:4", "--rank", "7"], "no rank 7"),
        (["--torchrun"], "not started by torchrun"),
        (["--transport", "pigeon"], "unknown transport 'pigeon'; known: gloo, nccl, shm"),
    ],
)
def test_wrong_options_end_in_one_line(
    plan: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names the option and what to do."""
    assert 2 == _main(["run", str(plan), *words])
    assert message in capsys.readouterr().err
