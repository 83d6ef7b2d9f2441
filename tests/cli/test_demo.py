"""`tessera demo`: the main job, from model to verified bits."""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sampling import is_whole
from tessera.cli import _main
from tessera.cli.demo import FULL, PROMPTS, plan_full
from tessera.cli.plan_load import curve, load_figures


class Here:
    """In place of a second process, which imports torch first: its work is done when it is asked for."""

    def __init__(self, *given: Any) -> None:
        pass

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *given: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> SimpleNamespace:
        """As an executor does."""
        return SimpleNamespace(result=lambda: work(*given))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run of the demo, which looks at one batch of the large model."""
    folder = tmp_path_factory.mktemp("demo")
    few = replace(FULL, batch=48, microbatches=2)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        patch.setattr("tessera.cli.demo.FULL", few)
        patch.setattr("tessera.cli.demo.PROMPTS", PROMPTS[:3])
        if not is_whole():
            patch.setattr("tessera.cli.demo.ProcessPoolExecutor", Here)
        assert 0 == _main(["demo", "--json", "--tokens", "4", "--effort", "quick"])
    return json.loads(out.getvalue()), folder


def test_demo_is_verified(demo: tuple[dict[str, Any], Path]) -> None:
    """Tokens, logits and state of every request equal the reference run's, under both policies."""
    found, _ = demo

    assert found["verified"] is True
    assert ["emu:a100", "emu:l40s"] == found["devices"]


def test_demo_has_a_headline(demo: tuple[dict[str, Any], Path]) -> None:
    """What a large model gains on two unlike cards, with the limit that all keep to and the source."""
    found = demo[0]["headline"]

    assert ("llama-3-8b", ["emu:h20", "emu:l40s"]) == (found["model"], found["devices"])
    assert "simulated on modelled costs" == found["source"]
    assert all(option["tpot_ms"] <= found["tpot_ms"] for option in found["baselines"].values())
    assert found["best_baseline"] in found["baselines"]
    assert 1.0 <= found["ratio_to_best_baseline"] <= found["ratio_to_data_parallel"]


@pytest.mark.slow
def test_the_headline_is_a_gain_with_every_policy_at_its_own_best() -> None:
    """Of data-parallel a fifth, of the best coarser policy a twentieth; and the curve ends with it."""
    full = plan_full(FULL)
    found = load_figures(full)

    assert found.ratio_to_data_parallel is not None
    assert found.ratio_to_data_parallel >= 1.2
    assert found.ratio_to_best_baseline is not None
    assert found.ratio_to_best_baseline >= 1.05
    assert curve(full)[-1].endswith(f"+ {found.tokens_per_s:,.0f}")


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
