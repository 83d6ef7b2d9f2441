"""Modelled prices agree with what is measured in public, and say how sure they are; no tables are asked."""

import importlib
import math
import time
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest

from profile_factories import TraceMaker, attention_trace, emulated, estimate, gemm_trace, unary_trace
from tessera.errors import TesseraError
from tessera.ir import Arg, Costs, Device, DeviceKind, Source, Trace, View, verify
from tessera.profile import GPUS, Gpu, OpClass, coverage, notes
from tessera.profile.counts import Work
from tessera.profile.fitted import fitted_rows, price_many
from tessera.profile.measured import combine

PAIR = emulated("a100", "l40s")


def modelled(trace: Trace, devices: tuple[Device, ...]) -> Costs:
    """Prices without tables, whether or not they are installed."""
    return estimate(trace, devices, tables=False)


def times(trace: Trace, *gpus: str) -> list[float]:
    """The first launch on each GPU."""
    costs = modelled(trace, emulated(*gpus))
    return [costs.us(0, i) for i in range(len(gpus))]


def fp32(arg: Arg) -> Arg:
    """The same tensor, twice as wide."""
    return msgspec.structs.replace(arg, dtype="float32") if isinstance(arg, View) else arg


def test_large_bf16_gemms_are_not_slower_on_the_a100() -> None:
    """The A100 sustains 244 TFLOP/s and the L40S 197, though the data sheets say the opposite."""
    a100, l40s = times(gemm_trace(8192, 8192, 8192), "a100", "l40s")

    assert a100 == pytest.approx(2 * 8192**3 / 244e6, rel=0.12)
    assert l40s == pytest.approx(2 * 8192**3 / 197e6, rel=0.12)


def test_cold_decode_attention_is_twice_as_slow_on_the_l40s() -> None:
    """Over KV caches beyond 256 MB the measured ratio is 1.96 to 2.22 at the quartiles."""
    a100, l40s = times(attention_trace(64, 8, 1, 4096), "a100", "l40s")

    assert 1.9 < l40s / a100 < 2.3


def test_compute_bound_fp32_gemms_are_faster_on_the_l40s() -> None:
    """KernelBench: a 4096-cubed fp32 product took 7.24 ms on an A100 and 2.75 ms on an L40S."""
    a100, l40s = times(gemm_trace(4096, 4096, 4096, "float32"), "a100", "l40s")

    assert a100 == pytest.approx(7240, rel=0.15)
    assert l40s == pytest.approx(2750, rel=0.15)


def test_streaming_kernels_match_times_that_no_fit_saw() -> None:
    """KernelBench: scaling 16384 x 4096 fp32 took 294 us on an A100, 802 us on an L40S, launch taken off."""
    a100, l40s = times(unary_trace("aten.mul.Scalar", 16384 * 4096), "a100", "l40s")

    assert a100 == pytest.approx(294, rel=0.05)
    assert l40s == pytest.approx(802, rel=0.05)


def test_long_prompts_cost_about_alike_on_a100_and_l40s() -> None:
    """The measured ratio for prompts of 3072 tokens and more is 0.87 to 1.14."""
    a100, l40s = times(attention_trace(4, 32, 4096, 4096, True), "a100", "l40s")

    assert 0.85 < l40s / a100 < 1.2


def test_weights_stream_at_the_measured_rates() -> None:
    """One row through a 16384 x 16384 bf16 matrix runs near the sustained rate of each measured GPU."""
    for spec in (g for g in GPUS.values() if g.effective):
        assert spec.effective is not None
        (us,) = times(gemm_trace(1, 16384, 16384), spec.name)
        assert us == pytest.approx(2 * 16384**2 / (spec.effective.weights_gbps * 1e3), rel=0.17)


@pytest.mark.parametrize("spec", GPUS.values(), ids=lambda g: g.name)
def test_every_class_is_priced_on_every_gpu(spec: Gpu) -> None:
    """No class is free, impossible, or without an error."""
    for op in OpClass:
        cost = price_many([Work(op, "float32", 1e9, 1 << 20)], spec.name)[0]
        assert cost.us > 0.5 or op is OpClass.ALLOCATION
        assert 0 < cost.rel_error < 1.6 or op is OpClass.ALLOCATION


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "int8"])
def test_every_dtype_is_priced(dtype: str) -> None:
    """GEMMs of any dtype have a finite price on every GPU."""
    for spec in GPUS.values():
        assert 0 < times(gemm_trace(64, 64, 64, dtype), spec.name)[0] < 1e6


def test_never_faster_than_the_memory_allows() -> None:
    """No kernel beats its data sheet's bandwidth or arithmetic."""
    for spec in GPUS.values():
        (us,) = times(unary_trace("aten.relu.default", 1 << 28), spec.name)
        assert us > 2 * 4 * (1 << 28) / (spec.memory_gbps * 1e3)
        (us,) = times(gemm_trace(8192, 8192, 8192, "float32"), spec.name)
        assert us > 2 * 8192**3 / (spec.fp32_tflops * 1e6)


def test_tiny_kernels_cost_the_floor() -> None:
    """Below a few kilobytes, size hardly matters, and the floor is what tables show."""
    small, smaller = (times(gemm_trace(n, n, n), "a100", "l40s") for n in (16, 1))

    assert small == pytest.approx(smaller, rel=0.06)
    assert 1.8 < small[1] < small[0] < 6.0


def test_the_last_wave_costs_a_full_one() -> None:
    """A row more than fills the 108 SMs of an A100 with tiles makes a GEMM far dearer than its operations."""
    full, spilt = (times(gemm_trace(m, 1152, 16384), "a100")[0] for m in (12 * 256, 12 * 256 + 1))

    assert spilt > 1.1 * full


def test_many_short_sequences_cost_decode_attention_more_than_one_long() -> None:
    """The same KV cache cut into 256 sequences takes longer, as it does in every table."""
    one, many = (times(attention_trace(n, 8, 1, 32768 // n), "h200")[0] for n in (1, 256))

    assert many > 1.5 * one


@pytest.mark.parametrize("gpu_name", ["a100", "l40s", "h20", "mi300x"])
def test_more_work_never_costs_less(gpu_name: str) -> None:
    """Prices rise with every dimension."""
    gemms = [times(gemm_trace(m, 4096, 4096), gpu_name)[0] for m in (1, 16, 256, 4096)]
    decodes = [times(attention_trace(8, 8, 1, n), gpu_name)[0] for n in (16, 256, 4096)]

    assert gemms == sorted(gemms)
    assert decodes == sorted(decodes)


def test_zero_size_launches_are_priced_at_the_floor_and_named() -> None:
    """An empty launch costs the least of its class, and the reader is told which it was."""
    trace = unary_trace("aten.relu.default", 0)
    (us,) = times(trace, "a100")

    assert us == pytest.approx(times(unary_trace("aten.relu.default", 1), "a100")[0], rel=1e-3)
    assert any(
        "zero-size" in line and "0 (aten.relu.default)" in line for line in notes(trace, PAIR, tables=None)
    )


def test_unknown_operators_are_priced_wider_and_named() -> None:
    """An operator nobody listed is not free, has a wide error, and is named."""
    trace = unary_trace("aten.never_heard_of.default", 1 << 20)
    cost = modelled(trace, PAIR).costs[0][0]

    assert (Source.CLASS, True, True) == (cost.source, cost.us > 3.0, cost.rel_error >= 0.5)
    assert any("aten.never_heard_of.default" in line for line in notes(trace, PAIR, tables=None))


def test_a_measured_gpu_is_fitted_and_an_unmeasured_one_is_not() -> None:
    """The source tells a fit from a loan, and the loan's error is larger."""
    own, lent = modelled(gemm_trace(4096, 4096, 4096), emulated("h200", "h20")).costs[0]

    assert (Source.FITTED, Source.CLASS) == (own.source, lent.source)
    assert lent.rel_error > own.rel_error


def test_errors_are_those_of_the_held_out_rows() -> None:
    """The expected error of a long GEMM joins that on rows the fit did not see and that between stacks."""
    fit = next(f for f in fitted_rows().fits if (f.gpu, f.op, f.family) == ("a100", OpClass.GEMM, "f16"))

    expected = math.hypot(fit.long_error, fit.spread)
    assert expected == modelled(gemm_trace(4096, 4096, 4096), PAIR).costs[0][0].rel_error


def test_bf16_on_a_gpu_without_bf16_units_is_dear_and_doubtful() -> None:
    """A T4 computes bf16 as fp32: slower than fp16, and marked as a guess."""
    half = modelled(gemm_trace(2048, 2048, 2048, "float16"), emulated("t4")).costs[0][0]
    brain = modelled(gemm_trace(2048, 2048, 2048), emulated("t4")).costs[0][0]

    assert brain.us > 4 * half.us
    assert (Source.FITTED, Source.CLASS) == (half.source, brain.source)


def test_every_fit_states_its_data_and_error() -> None:
    """A row without data, held-out rows or a plausible error cannot be in the table."""
    assert len(fitted_rows().fits) > 40
    for fit in fitted_rows().fits:
        assert fit.data
        assert fit.num_held_out >= 8
        assert 0 < fit.mean_error < 0.25
        assert 0 < fit.params.em <= 0.95
        assert 0 < fit.params.ec <= 1.0


def test_the_six_measured_gpus_have_all_three_tables() -> None:
    """GEMM, prefill and decode attention in bf16 are fitted, not guessed, with long kernels within 21 %."""
    table = {(f.gpu, f.op) for f in fitted_rows().fits if f.family == "f16" and f.long_error < 0.21}
    wanted = {"a100", "l40s", "h100", "h200", "b200", "rtx-pro-6000"}

    assert {(g, op) for g in wanted for op in (OpClass.GEMM, OpClass.PREFILL, OpClass.DECODE)} <= table


def test_the_class_model_was_judged_on_gpus_it_did_not_see() -> None:
    """Each fitted class but those of one GPU has leave-one-out errors."""
    judged = {(x.gpu, x.op, x.family) for x in fitted_rows().left_out}

    assert {(f.gpu, f.op, f.family) for f in fitted_rows().fits if "ec" not in f.assumed} == judged


def test_coverage_names_every_class_of_a_gpu() -> None:
    """What `tessera gpus` shows: each class with its source and a sentence."""
    listed = coverage("l40s")

    assert {c.op for c in listed} == set(OpClass) - {OpClass.ALLOCATION}
    assert all(c.why and 0 < c.rel_error < 2 for c in listed)


def test_notes_name_what_a_gpu_was_never_measured_in() -> None:
    """The A100's attention was timed in 16 bits only, and a reader of fp32 prices is told so."""
    trace = attention_trace(1, 8, 64, 64)
    single = Trace(
        trace.step,
        trace.kernels,
        tuple(replace(b, size_bytes=2 * b.size_bytes) for b in trace.buffers),
        tuple(replace(x, args=tuple(fp32(a) for a in x.args)) for x in trace.launches),
        (),
    )

    (only,) = notes(trace, PAIR, tables=None)
    assert "public tables are not installed" in only
    assert any(
        "a100: no measurements of prefill in fp32" in line for line in notes(single, PAIR, tables=None)
    )


def test_only_emulated_devices_are_priced() -> None:
    """A CPU has no price without measuring it."""
    cpu = Device("cpu", DeviceKind.CPU, "", 1 << 30)

    with pytest.raises(TesseraError, match="cpu was not measured, and no model knows it"):
        combine(gemm_trace(1, 1, 1), (cpu,), {})


def test_costs_belong_to_their_trace() -> None:
    """The price list carries the digest of what it priced, and passes its verifier."""
    trace = gemm_trace(8, 8, 8)
    costs = modelled(trace, PAIR)

    verify(costs)
    assert (trace.digest, PAIR) == (costs.trace_digest, costs.devices)


def test_ten_thousand_launches_take_a_second() -> None:
    """A full-size step is priced while one waits."""
    make = TraceMaker()
    x, w, y = make.tensor((8, 64)), make.tensor((64, 64)), make.tensor((8, 64))
    for _ in range(3_300):
        make.launch("aten.mm.default", (x, w), y)
        make.launch("aten.add.Tensor", (x, y), y)
        make.launch("aten._softmax.default", (x, 1, False), y)
    trace = make.done()
    assert trace.digest
    start = time.process_time()
    costs = modelled(trace, PAIR)

    assert 9_900 == len(costs.costs)
    assert time.process_time() - start < 1


def test_launches_are_counted_once_for_all_cards_and_priced_once_a_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal cards have equal columns."""
    module = importlib.import_module("tessera.profile.estimate")
    counted = Mock(wraps=module.works)
    priced = Mock(wraps=module.price_works)
    monkeypatch.setattr(module, "works", counted)
    monkeypatch.setattr(module, "price_works", priced)
    costs, _ = combine(gemm_trace(64, 64, 64), emulated("a100", "l40s", "a100", "l40s"), {})

    assert (1, 2) == (counted.call_count, priced.call_count)
    assert all(row[:2] == row[2:] for row in costs.costs)
