"""tessera verify: legal orders agree, broken ones do not, and a wrong trace is caught."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from sampling import one_of_each, some_of
from tessera.capture import build, record, record_step
from tessera.cli import _main
from tessera.ir import Buffer, BufferKind, Step, Trace, save

# The smallest request of each family and step.
FAMILIES = [
    ("tiny-llama", "prefill"),
    ("tiny-llama", "decode"),
    ("tiny-gpt-oss", "decode"),
    ("tiny-mamba", "prefill"),
    ("tiny-mamba", "decode"),
    ("tiny-qwen2.5-vl", "encode"),
    ("tiny-qwen2.5-vl", "prefill"),
    ("tiny-sd3.5", "denoise"),
]
# Commands and workers of other tests run Llama.
SAMPLE = some_of(one_of_each(FAMILIES, lambda row: row[0]), FAMILIES[3:])


def call(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `tessera verify`, in this process."""
    code = _main(["verify", *(str(w) for w in words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a hand-written step with every kind of hazard."""
    path = tmp_path_factory.mktemp("verify") / "slices.trace"
    save(record(build(Step("slices_model:step", "decode", 1, 1))), path)
    return path


def necessities(document: dict[str, Any]) -> dict[str, str]:
    """Class of edges -> whether it is shown to be needed."""
    return {row["hazard"]: row["necessary"] for row in document["classes"]}


def broken(trace: Trace, kernel: str) -> Trace:
    """The trace as if one kernel's reads had been missed by capture."""
    launches = tuple(
        dataclasses.replace(x, accesses=tuple(a for a in x.accesses if not a.read))
        if kernel in trace.kernels[x.kernel].name
        else x
        for x in trace.launches
    )
    return dataclasses.replace(trace, launches=launches)


@pytest.mark.parametrize(("model", "kind"), SAMPLE)
def test_the_tiny_model_of_a_family_holds(
    model: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All legal orders equal the model's own run; every class of edges that occurs is needed or implied."""
    path = tmp_path / "tiny.trace"
    save(record(build(Step(model, kind, 1, 6))), path)

    code, out, err = call(path, "--orders", "3", "--json", capsys=capsys)
    found = json.loads(out)

    assert 0 == code, err
    assert found["verified"] is True
    assert (3, 3) == (found["legal"]["orders"], found["legal"]["equal"])
    assert "yes" == necessities(found)["RAW"]


def test_every_class_of_the_slices_is_necessary(slices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RAW, WAR and WAW occur, and orders without any of them come out different."""
    _, out, _ = call(slices, "--json", capsys=capsys)

    assert {"RAW": "yes", "WAR": "yes", "WAW": "yes"} == necessities(json.loads(out))


def test_the_same_seed_gives_the_same_answer(slices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Orders come from the seed alone."""
    runs = [json.loads(call(slices, "--seed", "3", "--json", capsys=capsys)[1]) for _ in range(2)]
    for run in runs:
        del run["seconds"]

    assert runs[0] == runs[1]


def test_the_table_names_every_class(slices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People read a row a class and one sentence."""
    code, out, _ = call(slices, capsys=capsys)

    assert 0 == code
    assert all(word in out for word in ("RAW", "WAR", "WAW", "20 of 20 orders on shared memory"))


def test_a_trace_with_missed_reads_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capture that overlooks what a kernel reads gives a graph that some order breaks."""
    path = tmp_path / "broken.trace"
    save(broken(record(build(Step("slices_model:step", "decode", 1, 1))), "sum"), path)

    code, out, err = call(path, "--json", capsys=capsys)

    assert 2 == code
    assert json.loads(out)["verified"] is False
    assert "orders differ from the model's own run" in err


def test_a_trace_that_lacks_a_launch_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the trace's own order does not give the model's results, the message says so and names them."""
    trace = record(build(Step("tiny-llama", "decode", 1, 6, seed=1)))
    path = tmp_path / "cut.trace"
    save(dataclasses.replace(trace, launches=trace.launches[:-1]), path)

    code, _, err = call(path, "--orders", "1", capsys=capsys)

    assert 2 == code
    assert "in the trace's own order the launches do not give what the model gives: next_tokens differ" in err


def test_a_capture_for_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of fake tensors cannot be run here, and the message says what can."""
    path = tmp_path / "fake.trace"
    save(record_step(Step("tiny-llama", "decode", 1, 6), "fake"), path)

    code, _, err = call(path, capsys=capsys)

    assert 2 == code
    assert "--device cpu" in err


def test_a_full_size_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The size and the remedy are named before anything is built."""
    trace = record(build(Step("slices_model:step", "decode", 1, 1)))
    huge = dataclasses.replace(trace, buffers=(*trace.buffers, Buffer("w", BufferKind.WEIGHT, 16 << 30)))
    path = tmp_path / "huge.trace"
    save(huge, path)

    code, _, err = call(path, capsys=capsys)

    assert 2 == code
    assert "17.2 GB of weights" in err
    assert "tiny" in err


def test_a_call_that_was_captured_in_a_program_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to build the model from, so it cannot be called."""
    path = tmp_path / "call.trace"
    save(tessera.capture(torch.nn.Linear(4, 4), torch.ones(2, 4)), path)
    code, _, err = call(path, capsys=capsys)

    assert 2 == code
    assert "'Linear' was captured in a program, so the model itself cannot be called" in err


def test_no_orders_prove_nothing(slices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A count below one is a mistake."""
    code, _, err = call(slices, "--orders", "0", capsys=capsys)

    assert 2 == code
    assert "--orders" in err


def test_a_fake_trace_that_names_no_device_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of its launches says so, but the trace does."""
    path = tmp_path / "fake.trace"
    save(record_step(Step("tiny-mamba", "decode", 1, 6), "fake"), path)
    code, _, err = call(path, capsys=capsys)

    assert 2 == code
    assert "captured on fake" in err
