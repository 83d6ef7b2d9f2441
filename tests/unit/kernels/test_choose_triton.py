"""The Triton kernel of tessera::choose without a GPU: run in the PTX interpreter, proved by the analyzer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from choose_factory import KINDS, Given, make_rows
from sampling import examples, some_of
from tessera import flow  # hands the interpreter to capture
from tessera.kernels.choice import Number, Setting
from tessera.kernels.choose_triton import choose
from tessera_ptx import analyze
from triton_ptx import compiled_for, launches_anywhere

assert flow


@pytest.fixture(autouse=True, scope="module")
def anywhere() -> Iterator[None]:
    with launches_anywhere():
        yield


def run(*given: torch.Tensor, **sizes: int) -> Given:
    """What the kernels give."""
    launch: Any = choose
    return launch(*given, **{"block": 256, **sizes})  # type: ignore[no-any-return]


DTYPES = torch.float32, torch.bfloat16
# By rows: one segment of one block, segments of one block, of several, and one of several.
CASES = some_of(
    [(vocab, each, dtype) for vocab, each in ((37, 16), (700, 16), (700, 2), (700, 0)) for dtype in DTYPES],
    [(37, 16, torch.float32), (700, 2, torch.bfloat16)],
)


@pytest.mark.parametrize(("vocab", "each", "dtype"), CASES, ids=str)
def test_the_kernels_choose_what_the_reference_chooses(vocab: int, each: int, dtype: torch.dtype) -> None:
    """Every kind of row: tokens, logprobs and alternatives."""
    num = examples(16, len(KINDS))
    rows = make_rows(num, vocab, dtype=dtype)
    tokens, logprobs, top = run(*rows, programs=each * num)
    expected = torch.ops.tessera.choose(*rows)

    assert torch.equal(expected[0], tokens)
    assert_close(logprobs, expected[1], rtol=0, atol=2e-6)
    assert torch.equal(expected[2], top)


def make_several(num: int) -> Given:
    """Rows of several blocks, whose kernels are compiled for the last case too."""
    return make_rows(num, 700, dtype=torch.bfloat16)


def run_several(rows: Given) -> Given:
    return run(*rows, programs=2 * len(rows[0]))


def test_rows_without_a_finite_logit_get_no_token() -> None:
    """NaN, infinity, and a mask that allows nothing."""
    rows = make_several(8)
    rows[0][0, 7], rows[0][1, 9], rows[0][2, 11] = float("nan"), float("inf"), float("nan")
    rows[5][7] = 0

    tokens = run_several(rows)[0]

    assert [-1, -1, -1] == tokens[:3].tolist()
    assert -1 == int(tokens[7])
    assert torch.equal(torch.ops.tessera.choose(*rows)[0], tokens)


def test_a_forced_token_gets_its_logprob() -> None:
    rows = make_several(8)
    rows[3][1, Number.FORCED], rows[3][1, Number.NUM_TOP] = 12, 3
    tokens, logprobs, _ = run_several(rows)

    assert 11 == int(tokens[1])
    assert_close(logprobs[1, 0], rows[0][1].float().log_softmax(-1)[11])


def test_equal_logits_at_a_limit_stay_together() -> None:
    """No order of blocks decides."""
    rows = make_several(12)
    rows[0][:] = 0.0
    rows[0][:, 100:400] = 1.0
    rows[2][:], rows[3][:] = rows[2][0].clone(), rows[3][0].clone()
    rows[2][:, Setting.SHARPNESS], rows[3][:, Number.TOP_K] = 1.0, 5
    rows[3][:, Number.POSITION] = torch.arange(12)
    found = set(run_several(rows)[0].tolist())

    assert len(found) > 6
    assert all(100 <= token < 400 for token in found)


GIVEN = {"logits", "settings", "numbers", "scratch", "bests"}
ACCESSES: dict[str, tuple[set[str], set[str]]] = {
    "choose_largest": (
        {"logits", "last", "settings", "numbers", "edits", "masks", "scratch"},
        {"scratch", "bests", "places"},
    ),
    "choose_narrow": (GIVEN | {"sums_before", "bounds_before"}, {"sums", "bounds", "lows", "highs"}),
    "choose_limit": (GIVEN | {"sums", "bounds", "lows", "highs"}, {"limits"}),
    "choose_race": (GIVEN | {"limits"}, {"scores", "winners"}),
    "choose_token": (
        {"logits", "settings", "numbers", "bests", "places", "scores", "winners"},
        {"tokens", "logprobs", "top"},
    ),
}


@pytest.mark.parametrize("arch", some_of((80, 90), (90,)))
def test_every_access_is_proved(arch: int) -> None:
    """What is read, what is written, nothing unknown."""
    with compiled_for(arch) as kernels:
        run(*make_rows(2, 20_000, dtype=torch.bfloat16), block=4096, programs=4)
    reports = [analyze(kernel.asm["ptx"])[0] for kernel in kernels]

    assert ACCESSES.keys() == {report.name for report in reports}
    for kernel, report in zip(kernels, reports, strict=True):
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        read, written = ACCESSES[report.name]
        assert (True, ()) == (report.movable, report.why)
        assert {names[a.param] for a in report.accesses if a.read} <= read
        assert {names[a.param] for a in report.accesses if a.write} == written
        assert not any(a.atomic for a in report.accesses)
