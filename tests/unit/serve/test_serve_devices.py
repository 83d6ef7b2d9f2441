"""Devices that a service takes by itself."""

import pytest
import torch

from tessera.cli.serve_options import ServeConfig
from tessera.profile import devices
from tessera.profile.devices import Card


def test_the_cpu_is_taken_in_where_gpus_cannot_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    card = (Card("NVIDIA GeForce RTX 4090", 24_000_000_000, 128),)
    monkeypatch.setattr(devices.parse_devices, "__defaults__", (lambda: card,))

    assert "cuda:0" == ServeConfig().device_names("tiny-llama")
    assert "cuda:0" == ServeConfig().device_names("llama-3-8b")
    assert "cuda:0,cpu" == ServeConfig().device_names("gpt-oss-20b")
    capped = ServeConfig(memory=["cuda:0=10GB", "cpu=20GB"])
    assert "cuda:0,cpu" == capped.device_names("llama-3-8b")
    assert "cpu" == ServeConfig(devices="cpu").device_names("gpt-oss-20b")
