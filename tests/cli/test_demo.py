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
from tessera.cli.demo import FULL, plan_full
from tessera.cli.plan_model import model_figures


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
    """One run of the demo."""
    folder = tmp_path_factory.mktemp("demo")
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        patch.setattr("tessera.cli.demo.NUM_REQUESTS", 3)
        patch.setattr("tessera.cli.demo.FULL", replace(FULL, prompt_tokens=128, output_tokens=16))
        if not is_whole():
            patch.setattr("tessera.cli.demo.ProcessPoolExecutor", Here)
        assert 0 == _main(["demo", "--json", "--tokens", "4", "--effort", "quick"])
    return json.loads(out.getvalue()), folder


def test_demo_is_verified(demo: tuple[dict[str, Any], Path]) -> None:
    """Tokens, logits and state of every request equal the reference run's."""
    found, _ = demo

    assert found["verified"] is True
    assert ["emu:a100", "emu:l40s"] == found["devices"]


def test_demo_serves_requests_whose_pages_move(demo: tuple[dict[str, Any], Path]) -> None:
    """One device reads prompts, the other answers, with the tokens of the model itself."""
    served = demo[0]["service"]

    assert served["verified"] is True
    assert {"prompts", "answers"} == {group["role"] for group in served["groups"]}
    assert served["pages_moved"] >= served["requests"] == 3
    assert 3 * 5 == served["tokens"]


def test_demo_has_a_headline(demo: tuple[dict[str, Any], Path]) -> None:
    """What a load of a large model gains on two unlike cards, with the limit that all keep to."""
    found = demo[0]["headline"]

    assert "rehearsed on modelled costs" == found["source"]
    assert {"emu:h20", "emu:l40s"} == set(found["memory"])
    assert all(option["tpot_ms"] <= FULL.tpot_ms for option in found["baselines"].values())
    assert found["best_baseline"] in found["baselines"]
    assert 1.0 <= found["ratio_to_best_baseline"] <= found["ratio_to_data_parallel"]


@pytest.mark.slow
def test_the_headline_is_a_gain_with_every_policy_at_its_own_best() -> None:
    """A quarter over data-parallel, a twentieth over the best other policy."""
    found = model_figures(plan_full(FULL))

    assert found.ratio_to_data_parallel is not None
    assert found.ratio_to_data_parallel >= 1.25
    assert found.ratio_to_best_baseline is not None
    assert found.ratio_to_best_baseline >= 1.05


def test_demo_really_divides_the_model(demo: tuple[dict[str, Any], Path]) -> None:
    """The divided plan uses both devices, so the comparison has something to find."""
    lanes = demo[0]["plans"]["attention-ffn"]["lanes"]

    assert any(all(num > 0 for num in lane["launches"].values()) for lane in lanes)


def test_demo_writes_what_it_names(demo: tuple[dict[str, Any], Path]) -> None:
    """The Perfetto traces, the page and the plans are where the demo says."""
    found, folder = demo

    assert all((folder / path).stat().st_size > 1000 for path in found["files"].values())
    assert json.loads((folder / found["files"]["perfetto"]).read_text())["traceEvents"]
