"""Attention of a few queries: priced as it was timed, kernel by kernel."""

from pathlib import Path

import pytest
from scripts.fit_streams import SPLIT, fit, timed, work_of

from profile_factories import attention_trace
from tessera.profile import works
from tessera.profile.corrections import packaged
from tessera.profile.estimate import price_works

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def us(case: str, kernel: str, gpu: str = "h200") -> float:
    """The price of one launch of Llama 3 8B."""
    (cost,) = price_works([work_of(case, kernel, 4)], gpu, None)
    return cost.us


@pytest.mark.parametrize("kernel", ["efficient", "masked", "cudnn", "flash", "paged"])
def test_every_timed_launch_is_priced_within_a_tenth(kernel: str) -> None:
    """Launches of the committed measurements, from 8 to 128 sequences of 576 to 8,192 keys."""
    rows = timed(RESULTS)[kernel]
    costs = price_works([work for work, _ in rows], "h200", None)

    assert all(abs(cost.us / us - 1) < 0.1 for cost, (_, us) in zip(costs, rows, strict=True))


@pytest.mark.parametrize(("batch", "timed_us"), [(8, 29), (32, 58), (64, 108), (128, 207)])
def test_few_and_many_sequences_are_priced_alike_well(batch: int, timed_us: float) -> None:
    """A decode of Llama 3 8B at context 1,088; a model by bytes alone was 1.81 to 0.88 of these."""
    assert timed_us == pytest.approx(us(f"decode {batch} x 1088", "masked"), rel=0.05)


def test_blocks_that_do_not_fill_a_wave_take_as_long_as_those_that_do() -> None:
    """The memory-efficient kernel has a block for every sequence and head, and splits no keys."""
    half, full = us("decode 8 x 4096", "efficient"), us("decode 16 x 4096", "efficient")

    assert full < 1.15 * half


def test_kernels_that_split_keys_fill_the_gpu() -> None:
    """Eight sequences: the kernel over pages is faster than one that gives each head one block."""
    assert us("decode 8 x 4096", "paged") < 0.5 * us("decode 8 x 4096", "efficient")


@pytest.mark.parametrize("gpu", ["l40s", "a100", "b200"])
def test_on_other_chips_a_kernel_reaches_no_more_than_was_measured_there(gpu: str) -> None:
    """What a kernel gains on one GPU is not carried over, and the price is less sure."""
    work = work_of("decode 256 x 4096", "paged", 4)
    by_pages, by_tables = price_works([work, work_of("decode 256 x 4096", "unknown", 4)], gpu, None)
    (own,) = price_works([work], "h200", None)

    assert by_pages.us > 0.95 * by_tables.us
    assert by_pages.rel_error > 0.25 > own.rel_error


def test_the_mask_tells_cudnn_kernels_apart() -> None:
    """A decode names its kernel; prompts have factors."""
    (prompt,) = works(attention_trace(1, 8, 256, 256))

    assert not any(term.endswith("_stream") for term, _ in prompt.overhead)


def test_the_numbers_are_what_the_script_fits() -> None:
    """corrections.json is not edited by hand, and is not older than its rows."""
    for kernel, rows in timed(RESULTS).items():
        found, known = fit(rows, kernel in SPLIT), packaged().kernels[kernel]

        assert (found.floor, found.chain) == pytest.approx((known.floor, known.chain), rel=0.03)
