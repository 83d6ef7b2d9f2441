"""`tessera demo`: the main job, from model to verified bits."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import _main


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run of the demo."""
    folder = tmp_path_factory.mktemp("demo")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        assert 0 == _main(["demo", "--json", "--tokens", "4"])
    return json.loads(out.getvalue()), folder


def test_demo_is_verified(demo: tuple[dict[str, Any], Path]) -> None:
    """Tokens, logits and state of every request equal the undivided run's, under both policies."""
    found, _ = demo

    assert found["verified"] is True
    assert found["tokens_equal"] is True
    assert found["logits_equal"] is True
    assert ["emu:a100", "emu:l40s"] == found["devices"]


def test_demo_compares_policies(demo: tuple[dict[str, Any], Path]) -> None:
    """The plan is never below a coarser policy, and every figure is marked as modelled."""
    throughput = dict(demo[0]["throughput"])
    assert "modelled" == throughput.pop("source")
    assert "requests/s" == throughput.pop("unit")
    plan, bound = throughput.pop("plan"), throughput.pop("bound")

    assert {"single", "data-parallel", "prefill-decode", "attention-ffn"} <= throughput.keys()
    assert max(throughput.values()) <= plan <= bound * (1 + 1e-6)


def test_demo_really_divides_the_model(demo: tuple[dict[str, Any], Path]) -> None:
    """One policy always uses both devices, so the comparison has something to find."""
    lanes = demo[0]["plans"]["attention-ffn"]["lanes"]

    assert any(all(num > 0 for num in lane["launches"].values()) for lane in lanes)


def test_demo_writes_what_it_names(demo: tuple[dict[str, Any], Path]) -> None:
    """The Perfetto traces, the page and the plan are where the demo says."""
    found, folder = demo

    assert all((folder / path).stat().st_size > 1000 for path in found["files"].values())
    assert json.loads((folder / found["files"]["perfetto"]).read_text())["traceEvents"]
