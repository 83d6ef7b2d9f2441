"""Which transports a machine can use."""

from pathlib import Path

import pytest
import torch

from tessera.execute import driver
from tessera.execute.cuda import direct
from tessera.execute.cuda.direct import chosen, transports


def usable() -> list[str]:
    """Names of those that can be used."""
    return [state.name for state in transports() if state.is_usable]


@pytest.fixture
def _one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "has", lambda name: True)
    monkeypatch.setattr(direct, "library_path", lambda: Path("libnvshmem_host.so.3"))


def test_every_transport_is_listed_with_a_reason() -> None:
    """By the names that `--transport` takes."""
    found = transports()

    assert ["shm", "ipc", "nvshmem", "host"] == [state.name for state in found]
    assert all(state.why for state in found)


def test_without_a_gpu_workers_of_cpus_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shared memory here, over TCP elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert ["shm", "host"] == usable()
    assert chosen(transports())["GPUs of one machine"] is None


@pytest.mark.usefixtures("_one_card")
def test_two_elements_on_one_card_need_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM refuses them otherwise, so the way is there and cannot be used."""
    monkeypatch.delenv(direct.MPS_SHARE, raising=False)
    assert ["shm", "ipc", "host"] == usable()

    monkeypatch.setenv(direct.MPS_PIPE, "pipes")
    monkeypatch.setenv(direct.MPS_SHARE, "50")
    assert ["shm", "ipc", "nvshmem", "host"] == usable()


@pytest.mark.usefixtures("_one_card")
def test_cards_without_peer_access_are_joined_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into another card's memory would fail."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)

    assert "ipc" not in usable()
    assert "host" == chosen(transports())["GPUs of one machine"]
