"""Plans between two starts of a service."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from serving_factory import toy_policies
from tessera.cli.start import lines_of
from tessera.ir import Load
from tessera.profile import parse_devices, wire
from tessera.serve import planning
from tessera.serve.pages import steady
from tessera.serve.planning import MAX_KEPT, KeptModel, Prepared, find, keep, key_of, prepare
from tessera.serve.records import ServeSpec, Shape
from tessera.serve.steps import served

MODEL = KeptModel(Shape(1, 2, 32, (2, 8), 64, 258), {"w": torch.ones(64)})
FOUND = Prepared(MODEL, toy_policies(["data-parallel", "latency"]), scale=2.5)


def not_built() -> NoReturn:
    raise AssertionError("a model that was kept is not built")


def found(name: str, folder: Path) -> Prepared | None:
    return find(name, folder, not_built, ServeSpec())


def is_alike(one: Prepared | None) -> bool:
    """The same as was kept."""
    assert one is not None
    whole = (one.policies, one.scale, one.model.shape)
    return whole == (FOUND.policies, 2.5, MODEL.shape)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    keep("name", FOUND, tmp_path)
    assert is_alike(found("name", tmp_path))
    assert found("other", tmp_path) is None


def test_a_changed_byte_means_made_again(tmp_path: Path) -> None:
    """Also a file that was cut short, and those of another model."""
    keep("name", FOUND, tmp_path)
    other = replace(FOUND, model=replace(MODEL, tensors={"w": torch.zeros(64)}))
    keep("other", other, tmp_path)
    rng = random.Random(2)
    path = tmp_path / "name"
    whole, theirs = path.read_bytes(), (tmp_path / "other").read_bytes()
    at = [0, len(whole) // 2, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))]
    flipped = [whole[:n] + bytes([whole[n] ^ 1 << rng.randrange(8)]) + whole[n + 1 :] for n in at]
    for raw in (*flipped, whole[:-10], b"", theirs):
        path.write_bytes(raw)
        assert found("name", tmp_path) is None
    path.write_bytes(whole)
    assert is_alike(found("name", tmp_path))
    shutil.copy(tmp_path / "other", tmp_path / "third")
    assert found("third", tmp_path) is None


def test_a_folder_that_cannot_be_written_is_done_without_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    keep("name", FOUND, tmp_path / "file")
    assert capsys.readouterr().err.count("warning:") == 1
    assert found("name", tmp_path / "file") is None


def test_no_more_than_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(MAX_KEPT + 2):
        keep(str(number), FOUND, tmp_path)
        os.utime(tmp_path / str(number), (number, number))
    assert len(list(tmp_path.iterdir())) == MAX_KEPT
    assert found("0", tmp_path) is None
    assert is_alike(found(str(MAX_KEPT + 1), tmp_path))


def test_plans_have_another_name_when_a_file_of_the_model_changes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = key_of((str(tmp_path),), "sizes")
    assert before == key_of((str(tmp_path),), "sizes")
    assert before != key_of((str(tmp_path),), "other sizes")
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert before != key_of((str(tmp_path),), "sizes")


@pytest.mark.parametrize(("most_bytes", "then"), [(1 << 30, []), (0, ["building tiny-llama"])])
def test_a_second_start_plans_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, then: list[str]
) -> None:
    """And serves by the very plans and weights of the first; a small model is not even built."""
    monkeypatch.setattr(planning, "MAX_WEIGHT_BYTES", most_bytes)
    cluster = wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"])
    policies = ("data-parallel",)
    spec = ServeSpec(
        rows=2, capacity=32, max_batch_tokens=8, load=Load(8, 4), policies=policies, effort="quick"
    )
    said: list[list[str]] = [[], []]
    first, second = (prepare("tiny-llama", cluster, spec, kept=tmp_path, advance=s.append) for s in said)
    assert "planning and rehearsing" in said[0]
    assert said[1] == then
    assert second.policies == first.policies
    assert second.model.shape == first.model.shape
    weights, again = first.model.weights(), second.model.weights()
    assert {n: t.stride() for n, t in again.items()} == {n: t.stride() for n, t in weights.items()}
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_model_that_sees_is_built_at_every_start() -> None:
    assert KeptModel.of(served("tiny-qwen2.5-vl", ServeSpec(microbatches=1, rows=1, capacity=64))) is None


def test_a_little_more_or_less_memory_finds_the_same_plans() -> None:
    assert 0.96 * 139e9 < steady(139e9) <= 139e9
    assert steady(139e9) == steady(139e9 - 2**20)
    assert steady(139e9) != steady(100e9)


def test_what_was_chosen_is_said_in_three_lines(tmp_path: Path) -> None:
    cluster = wire(parse_devices("emu:a100"), ["pcie4"])
    spec = ServeSpec(microbatches=1, rows=2, capacity=32, max_batch_tokens=8, load=Load(8, 4))
    prepared = prepare("tiny-llama", cluster, spec)
    chosen, expected, more = lines_of(prepared)
    figures = prepared.policies[0].expected
    assert figures is not None
    assert "single: mixed on emu:a100, 1 x 2 sequences" in chosen
    assert f"{figures.tokens_per_s:,.0f} tokens/s" in expected
    assert "a100 adds" in more
