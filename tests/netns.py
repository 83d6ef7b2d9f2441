"""Two network namespaces joined by a wire that can be cut: two machines as far as the network goes."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def ip(*words: str) -> bool:
    """Runs the ip tool; True if it did what it was told."""
    return 0 == subprocess.run(["ip", *words], capture_output=True, check=False).returncode


@contextmanager
def joined(network: str) -> Iterator[tuple[str, str]]:
    """Their names; they have the addresses 1 and 2 of a network such as 10.99.0.

    Skips the test where the system does not permit it. Tests that run at the same time name other networks.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip tool")
    unique = f"{network.split('.')[1]}-{os.getpid()}"
    names, ends = (f"tessera-a{unique}", f"tessera-b{unique}"), (f"ta{unique}", f"tb{unique}")
    try:
        made = all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            made = made and ip("link", "set", end, "netns", name)
            made = made and ip("-n", name, "addr", "add", f"{network}.{number + 1}/24", "dev", end)
            made = made and ip("-n", name, "link", "set", end, "up")
            made = made and ip("-n", name, "link", "set", "lo", "up")
        if not made:
            pytest.skip("this machine does not permit network namespaces")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def within(name: str) -> list[str]:
    """What to put before a command so that it runs there."""
    return ["ip", "netns", "exec", name]


def set_wire(name: str, state: str) -> None:
    """Cuts the wire at one end (`down`), or mends it (`up`)."""
    if not ip("-n", name, "link", "set", name.replace("tessera-", "t", 1), state):
        raise RuntimeError(f"the wire of {name} could not be set {state}")
