"""Outlines: compiled steps without code, kept and shipped, so that plans need not compile."""

from dataclasses import replace
from pathlib import Path

import pytest

from profile_factories import unary_trace
from tessera.analyze import build_graph
from tessera.capture import outlines
from tessera.flow import ANCHORS, at_anchors, choose_launches
from tessera.ir import Origin, Step, Trace
from tessera.ir.graph import StepFamily
from tessera.profile import works

DECODE = Step("llama-3-8b", "decode", ANCHORS[0], 1280)
STRANGE = Step("nobodys-model", "decode", 2, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tessera" / "outlines"


def shipped(step: Step) -> Trace:
    """An outline that comes with the package."""
    found = outlines.find(step)
    assert found is not None
    return found


def test_the_package_has_the_usual_llama() -> None:
    """A decode of few launches, none of them with code."""
    found = shipped(DECODE)

    assert 350 < len(found.launches) < 450
    assert any(k.origin is Origin.TRITON for k in found.kernels)
    assert not any(k.ptx or k.source for k in found.kernels)


def test_outlines_of_two_batches_give_every_other() -> None:
    """Without code they differ in sizes only; the work of a batch between lies between."""
    low, high = (build_graph(shipped(replace(DECODE, batch=batch))) for batch in ANCHORS[:2])
    between = StepFamily((low, high)).at(replace(DECODE, batch=40))

    def total(trace: Trace) -> int:
        return sum(work.num_bytes for work in works(trace))

    assert 40 == between.trace.step.batch
    assert total(low.trace) < total(between.trace) < total(high.trace)


def test_a_step_is_compiled_once(cache: Path) -> None:
    """The second time it is read."""
    calls = []

    def compiled(step: Step) -> Trace:
        calls.append(step)
        return unary_trace("aten.neg.default", 64)

    first, second = (outlines.find_or_make(STRANGE, compiled) for _ in range(2))

    assert first == second
    assert [STRANGE] == calls
    assert [outlines.name_of(STRANGE)] == [p.name for p in cache.iterdir()]


def test_a_broken_outline_is_made_again(cache: Path) -> None:
    """Half a file is none."""
    outlines.find_or_make(STRANGE, lambda step: unary_trace("aten.neg.default", 64))
    (cache / outlines.name_of(STRANGE)).write_bytes(b"\x1f\x8b\x08")

    assert outlines.find(STRANGE) is None


def test_compiled_launches_are_taken_where_they_are_known() -> None:
    """Llama at the usual lengths needs no compiler."""
    assert (True, "") == choose_launches(at_anchors([DECODE]), "")
    assert (False, "") == choose_launches(at_anchors([DECODE]), "eager")


def test_without_triton_eager_launches_are_taken_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the remedy."""
    monkeypatch.setattr(outlines, "can_compile", lambda: False)
    is_compiled, why = choose_launches(at_anchors([STRANGE]), "compiled")

    assert not is_compiled
    assert "Triton is not installed" in why


def test_unknown_steps_are_compiled_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a minute, so it is not done unasked; the line says how."""
    monkeypatch.setattr(outlines, "can_compile", lambda: True)

    assert choose_launches(at_anchors([STRANGE]), "compiled")[0]
    assert "--launches compiled" in choose_launches(at_anchors([STRANGE]), "")[1]
