"""Divided products: same values, weights of parts, and when a model is divided."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from packed_factory import write_folder
from tessera.capture import Workload, build, record
from tessera.capture.divide import (
    GROUPED,
    JOINS,
    PLAIN,
    DivideConfig,
    divide,
    division_for,
    experts_of,
)
from tessera.execute.memory import copied, part_of, whole_of
from tessera.execute.reference import InOrder
from tessera.ir import BufferKind, Step, Trace, View
from tessera.profile import cap_memory, parse_devices, wire, works
from tessera.profile.cpus import CPUS, price_on_cpu


@cache
def recorded(model: str) -> tuple[Workload, Trace]:
    """A call of a built-in model."""
    workload = build(Step(model, "call", 2, 8))
    return workload, record(workload)


def run(trace: Trace, workload: Workload) -> dict[str, torch.Tensor]:
    order = InOrder([trace], workload.weights(), torch.device("cpu"))
    return dict(order(0, workload.make_inputs(0), dict(workload.make_state(0))))


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("model", ["tiny-gpt-oss", "tiny-llama"])
def test_a_divided_model_has_the_values_of_the_whole_one(model: str, parts: int) -> None:
    workload, trace = recorded(model)
    divided = divide(trace, DivideConfig(parts, plain_bytes=0))
    assert len(divided.launches) > len(trace.launches)
    names = {trace.kernels[x.kernel].name for x in trace.launches if x not in divided.launches}
    assert names <= {*PLAIN, *GROUPED}, "others are not changed"
    torch.set_num_threads(1)
    whole, own = run(trace, workload), run(divided, workload)
    for name, tensor in whole.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-5)


def test_experts_divided_give_the_same_bits() -> None:
    workload, trace = recorded("tiny-gpt-oss")
    divided = divide(trace, DivideConfig(4))
    whole, own = run(trace, workload), run(divided, workload)
    assert all(torch.equal(whole[name], own[name]) for name in whole)
    experts = experts_of(divided)
    assert sorted({first for _, first, _ in experts.values()}) == [0, 2, 4, 6]
    sizes = [sum(b.size_bytes for b in t.buffers if b.kind is BufferKind.WEIGHT) for t in (trace, divided)]
    assert sizes[0] == sizes[1], "every weight is in one part"


def test_parts_of_a_weight_are_its_bytes() -> None:
    weight = torch.arange(24, dtype=torch.int16).view(4, 6)

    def part(name: str) -> list[int]:
        return [int(n) for n in copied(part_of(name, {"w": weight})).flatten().view(torch.int16)]

    assert whole_of("w[4:8/12]") == "w"
    assert part("w[4:8/12]") == weight[:, 2:4].flatten().tolist()
    assert part("w[0:24/48]") == weight[:2].flatten().tolist()
    assert part("w[0:24/48,4x3]") == weight[:2].view(4, 3).t().flatten().tolist()


def test_16_bit_experts_are_kept_by_rows_of_outputs() -> None:
    step = Step("tiny-gpt-oss", "call", 2, 8)
    workload = build(step)
    workload.module.bfloat16()
    trace = record(workload)
    divided = divide(trace, DivideConfig(4))
    weights = [divided.launches[number].args[1] for number in experts_of(divided)]
    assert all(isinstance(view, View) and view.stride[1] == 1 for view in weights)
    inputs, state = workload.make_inputs(0), workload.make_state(0)
    whole, own = (
        dict(InOrder([one], workload.weights(), torch.device("cpu"))(0, dict(inputs), dict(state)))
        for one in (trace, divided)
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(own[name], tensor, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("method", "family"), [("mxfp4", "gpt_oss"), ("gptq", "qwen3_moe")])
def test_packed_experts_divided_give_the_same_bits(method: str, family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, method, family)
    step = Step(str(tmp_path), "call", 2, 8)
    workload = build(step)
    trace = record(workload)
    divided = divide(trace, DivideConfig(3))
    names = [divided.kernel_of(number).name for number in experts_of(divided)]
    assert names == ["tessera.packed_part.default"] * (3 * 2 * 2)
    assert {num for _, _, num in experts_of(divided).values()} == {1, 2}
    whole, own = run(trace, workload), run(divided, workload)
    assert all(torch.equal(whole[name], own[name]) for name in whole)
    sizes = [sum(b.size_bytes for b in t.buffers if b.kind is BufferKind.WEIGHT) for t in (trace, divided)]
    assert sizes[0] == sizes[1], "every weight is in one part"


def test_prices_follow_the_expected_rows_and_experts() -> None:
    trace = record(build(Step("tiny-gpt-oss", "call", 1, 1)))
    often = {x.scope: [7, 1, 0, 0, 0, 0, 0, 0] for x in trace.launches}
    even, hot = (divide(trace, DivideConfig(4), f) for f in (None, often))
    parts = list(experts_of(even))[:4]
    assert len({works(even)[n].num_bytes for n in parts}) == 1
    sizes = [works(hot)[n].num_bytes for n in parts]
    assert sizes[0] > works(even)[parts[0]].num_bytes > sizes[1] == sizes[2]


def test_a_join_moves_the_rows_of_its_part() -> None:
    """On a CPU; its result is the last part's own."""
    trace = divide(record(build(Step("tiny-gpt-oss", "call", 2, 8))), DivideConfig(4))
    names = [kernel.name for kernel in trace.kernels]
    joins = [n for n in range(len(trace.launches)) if names[trace.launches[n].kernel] == JOINS[0]]
    work, (into, part, *_) = works(trace)[joins[0]], trace.launches[joins[0]].args
    assert isinstance(into, View)
    assert isinstance(part, View)
    size = trace.buffers[part.buffer].size_bytes
    assert work.num_bytes + work.cpu_bytes == 2 * size // 4
    assert {a.buffer for a in trace.launches[joins[0]].accesses if a.write} == {into.buffer}


def test_packed_parts_are_priced_by_the_codes_of_chosen_experts(tmp_path: Path) -> None:
    """A CPU also pays for the numbers that it writes out."""
    write_folder(tmp_path, "mxfp4", "gpt_oss")
    trace = divide(record(build(Step(str(tmp_path), "call", 1, 1))), DivideConfig(2))
    number = next(iter(experts_of(trace)))
    work, part = works(trace)[number], trace.launches[number]
    codes = part.args[1]
    assert isinstance(codes, View)
    size = codes.num_elements * 4
    # Two tokens' choices, evenly: of two experts each is chosen in 1 - (3/4)^2.
    assert 2 * 7 / 16 * size / 2 < work.num_bytes < 1.2 * size
    assert work.cpu_bytes > 4 * work.num_bytes
    spec = CPUS["cpu-xeon-8480"]
    assert price_on_cpu(work, spec).us > price_on_cpu(replace(work, cpu_bytes=0), spec).us


def test_a_model_is_divided_only_beside_a_host_and_where_it_does_not_fit() -> None:
    trace = record(build(Step("tiny-gpt-oss", "call", 1, 1)))
    devices = parse_devices("emu:l40s,emu:cpu-xeon-8480")
    small = cap_memory(devices, ["emu:l40s=2MB"])
    assert division_for(wire(devices, ["pcie4"]), [trace]) is None
    assert division_for(wire(small, ["pcie4"]), [trace]) == DivideConfig(plain_bytes=250_000)
    assert division_for(wire(small[:1], ["pcie4"]), [trace]) is None
    two = (small[0], replace(small[0], name="emu:l40s#1"))
    assert division_for(wire(two, ["pcie4"]), [trace]) is None
