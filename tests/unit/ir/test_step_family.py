"""Traces at batches that were not recorded."""

from dataclasses import replace
from pathlib import Path

import pytest

from kept_traces import recorded
from tessera.analyze import build_graph
from tessera.capture import outlines, record_sizes
from tessera.errors import MismatchError
from tessera.flow import LoadSteps, anchors_of
from tessera.ir import Step, Trace
from tessera.ir.graph import StepFamily, widened
from tessera.planning import ServedSteps
from tessera.profile import parse_devices, wire
from tessera.profile.measured import combine

# Their batches and lengths are those of other tests, so that few are recorded.
STEPS = (
    Step("tiny-llama", "prefill", 1, 16, reserve=4),
    pytest.param(Step("tiny-gpt-oss", "decode", 1, 16), marks=pytest.mark.slow),
    pytest.param(Step("tiny-mamba", "decode", 1, 16), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.model}-{step.kind}")
def test_the_trace_at_a_third_batch_is_the_one_that_is_recorded(step: Step) -> None:
    """Between the two recordings and beyond them, to the byte."""
    low, high, between = (build_graph(recorded(replace(step, batch=batch), "fake")) for batch in (8, 48, 16))
    family = StepFamily((low, high))

    assert between == family.at(replace(step, batch=16))
    assert low == StepFamily((between, high)).at(replace(step, batch=8))
    assert high is family.at(replace(step, batch=48))


def test_recordings_that_differ_in_more_than_numbers_are_refused() -> None:
    """The place of the first difference is said."""
    low, high = (build_graph(recorded(Step("tiny-llama", "decode", batch, 20), "fake")) for batch in (8, 48))
    other = replace(high, trace=replace(high.trace, launches=high.trace.launches[:-1]))

    with pytest.raises(
        MismatchError, match=r"recorded differently at other sizes \(batch 16\): trace\.launches"
    ):
        StepFamily((low, other)).at(replace(low.trace.step, batch=16))


def test_a_planned_batch_that_is_recorded_otherwise_is_planned_again_as_it_is_recorded() -> None:
    """One row often is: models have their own ways for it."""

    def record(step: Step) -> Trace:
        trace = recorded(step, "fake")
        return replace(trace, num_views=99) if step.batch == 1 else trace

    steps = LoadSteps([Step("tiny-llama", "decode", 1, 20)], [1], (8, 48), record=record)

    assert not steps.matches_recording(steps.at(1))
    assert steps.at(1).graphs[0].trace.num_views == 99
    assert steps.matches_recording(steps.at(1))


@pytest.mark.parametrize(
    "model",
    [
        "tiny-llama",
        pytest.param("tiny-gpt-oss", marks=pytest.mark.slow),
    ],
)
def test_a_served_step_is_known_at_every_size(model: str) -> None:
    """Tokens, sequences, pages and length are its sizes; a sixth recording is what they give."""
    steps = ServedSteps(model, wire(parse_devices("emu:h20,emu:l40s"), ["pcie4"]))
    other = steps.step(200, 40, 16_384, 300)
    (recorded_other,) = record_sizes([other])

    assert build_graph(recorded_other) == steps.family.at(other)
    costs, _ = combine(recorded_other, steps.cluster.devices, {})
    price = steps.price(200, 40, 300)
    assert price.total_us(1) == pytest.approx(costs.total_us(1))
    assert 0 < price.temporary_bytes


def test_a_size_that_is_analyzed_less_exactly_is_interpolated_from_too() -> None:
    """Compilers divide a launch otherwise from some size on, and the part of a buffer that it reads is not
    found: at all sizes it reads the whole then.
    """
    low, high = (recorded(Step("tiny-llama", "decode", batch, 20), "fake") for batch in (8, 48))
    parts = [replace(a, region=replace(a.region, item_bytes=4)) for a in low.launches[0].accesses]
    assert parts[0].region.start == 0
    exact = replace(low, launches=(replace(low.launches[0], accesses=tuple(parts)), *low.launches[1:]))

    family = StepFamily(tuple(map(build_graph, widened([exact, high]))))

    launch = family.at(replace(low.step, batch=16)).trace.launches[0]
    sizes = [buffer.size_bytes for buffer in family.at(replace(low.step, batch=16)).trace.buffers]
    assert [access.region.num_bytes for access in launch.accesses] == [
        sizes[a.buffer] for a in launch.accesses
    ]
    assert all(access.read for access in launch.accesses)


def test_a_size_that_no_recording_varies_is_refused() -> None:
    low, high = (build_graph(recorded(Step("tiny-llama", "decode", batch, 20), "fake")) for batch in (8, 48))

    with pytest.raises(MismatchError, match="no recording varies"):
        StepFamily((low, high)).at(replace(low.trace.step, batch=16, context=24))


@pytest.mark.parametrize("fewer", [{16: 1}, {16: 1, 48: 2}], ids=str)
def test_sizes_that_compile_otherwise_are_not_interpolated_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fewer: dict[int, int]
) -> None:
    """Compilers choose other launches for few rows, and for many; the next two alike serve all sizes."""
    made = []

    def compiled(step: Step) -> Trace:
        made.append(step.batch)
        trace = recorded(step, "fake")
        number = len(trace.launches) - fewer.get(step.batch, 0)
        whole = number == len(trace.launches)
        return trace if whole else replace(trace, launches=trace.launches[:number], outputs=())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tessera.flow.record_compiled", compiled)
    asked = Step("tiny-llama", "decode", 1, 20)
    steps = LoadSteps([asked], [1], is_compiled=True)

    sizes = [16, 48, 64, 128][: len(fewer) + 2]
    assert sizes == made
    number = len(steps.at(64).graphs[0].trace.launches)
    assert number == len(steps.at(32).graphs[0].trace.launches)
    assert number == len(steps.at(16).graphs[0].trace.launches) + 1
    for batch in fewer:
        (tmp_path / "tessera" / "outlines" / outlines.name_of(replace(asked, batch=batch))).unlink()
    assert tuple(sizes[-2:]) == anchors_of(asked)
    assert number == len(LoadSteps([asked], [1], is_compiled=True).at(16).graphs[0].trace.launches)
    assert sizes == made
