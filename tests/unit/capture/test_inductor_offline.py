"""Inductor's launches recorded without a GPU: complete, proved, and right when they are run."""

import functools
import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from inductor_factory import WIDTH, Block, Cpu, random_order, trace, workload
from sampling import num_layers
from tessera.analyze import build_graph
from tessera.capture import Workload, build
from tessera.capture.fake import on_device
from tessera.capture.inductor import alike, cut, record_inductor, record_inductor_offline, trace_step
from tessera.capture.offline import offline
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Hazard, Origin, Step, Trace, load, save
from tessera.profile import works


@functools.cache
def program_order() -> tuple[dict[str, torch.Tensor], Cpu]:
    """The trace run on the CPU as recorded."""
    cpu = Cpu(trace())
    return cpu.run(range(len(trace().launches))), cpu


def small() -> Workload:
    """A block alone."""
    block = Block().eval()
    return replace(
        workload(),
        module=block,
        call=lambda inputs, state: {"y": block(inputs["x"])},
        make_inputs=lambda seed: {"x": torch.ones(2, WIDTH)},
        make_state=lambda seed: {},
    )


def triton_launches() -> list[int]:
    """Launches with PTX."""
    return [i for i in range(len(trace().launches)) if trace().kernel_of(i).origin is Origin.TRITON]


def test_the_step_is_triton_kernels_and_library_calls() -> None:
    """Fused kernels with PTX, grid and block; matrix products as operators."""
    names = {k.name for k in trace().kernels}

    assert len(triton_launches()) >= 2
    assert all(".entry" in trace().kernel_of(i).ptx for i in triton_launches())
    assert all(trace().launches[i].grid and trace().launches[i].block for i in triton_launches())
    assert any(name.startswith(("aten.mm", "aten.addmm", "aten.bmm")) for name in names)


def test_running_the_launches_gives_what_the_program_gives() -> None:
    """PTX compiled for a GPU that is not there, run in the interpreter, agrees with eager torch."""
    found, _ = program_order()
    state = workload().make_state(0)
    wanted = workload().run(workload().make_inputs(0), state)

    assert torch.allclose(wanted["scores"], found["scores"], atol=1e-5)
    remembered = found["seen"].view(torch.float32).view(state["seen"].shape)
    assert torch.allclose(state["seen"], remembered, atol=1e-5)


def test_proved_accesses_cover_the_bytes_really_touched() -> None:
    """Every Triton launch and buffer, read and written."""
    _, cpu = program_order()
    for index in triton_launches():
        for buffer, touched in cpu.touched[index].items():
            for mask, flag in ((touched.read, "read"), (touched.write, "write")):
                covered = np.zeros(mask.shape, bool)
                for access in trace().launches[index].accesses:
                    if access.buffer == buffer and getattr(access, flag):
                        covered[access.region.start : access.region.stop] = True
                assert not (mask & ~covered).any(), (index, buffer, flag)


def test_kernels_that_do_not_wait_for_one_another_are_one_launch() -> None:
    """Two sizes, each the input of a product of its own."""
    together = trace().launches[triton_launches()[-2]]

    assert 2 == len({a.buffer for a in together.accesses if a.write})


def test_nothing_is_immovable() -> None:
    """Every kernel of the step is proved."""
    assert [] == [x.immovable for x in trace().launches if x.immovable]


def test_any_order_that_respects_the_graph_gives_the_same_bits() -> None:
    """Dependencies found in PTX and schemas are enough."""
    wanted, _ = program_order()
    graph, rng = build_graph(trace()), random.Random(0)
    for _ in range(5):
        found = Cpu(trace()).run(random_order(graph, rng))
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_an_order_that_ignores_true_dependencies_does_not() -> None:
    """The check above can fail."""
    wanted, _ = program_order()
    graph, rng = build_graph(trace()), random.Random(0)
    results = [Cpu(trace()).run(random_order(graph, rng, Hazard.RAW)) for _ in range(3)]

    assert not all(torch.equal(wanted[name], found[name]) for found in results for name in wanted)


def test_state_is_written_in_place() -> None:
    """The row that is remembered goes into the state's own memory."""
    (state,) = trace().buffers_of(BufferKind.STATE)

    assert any(a.buffer == state and a.write for x in trace().launches for a in x.accesses)


def test_a_launch_belongs_to_the_module_of_its_own_weight() -> None:
    """The last matrix product is the output layer's."""
    assert "out" in {x.scope for x in trace().launches}


def test_the_trace_survives_its_file(tmp_path: Path) -> None:
    """PTX, source, signature and constants are all there after loading."""
    save(trace(), tmp_path / "t.trace")

    assert trace() == load(Trace, tmp_path / "t.trace")


def test_what_is_not_proved_is_immovable_and_may_touch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a proof a launch stays where it is, with the reason."""
    monkeypatch.setattr("tessera.capture.recorder.triton_accesses", lambda *_: ((), "no proof"))
    made = record_inductor_offline(small())
    launches = [x for x in made.launches if made.kernels[x.kernel].origin is Origin.TRITON]

    assert launches
    assert all("no proof" in x.immovable for x in launches)
    accesses = [a for x in launches for a in x.accesses]
    assert all(a.read and a.region.num_bytes == made.buffers[a.buffer].size_bytes for a in accesses)


def test_the_make_believe_ends() -> None:
    """After a recording torch and Triton know of no GPU that is not there."""
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    made = record_inductor_offline(small())

    assert Origin.TRITON in {kernel.origin for kernel in made.kernels}
    assert "tessera" not in CachingAutotuner.run.__module__
    assert not PyCodeCache.modules_no_attr, "kernels without handles"
    assert not CompiledTritonKernels._cache
    assert "tessera" not in torch.cuda.set_device.__module__


def test_a_step_that_is_not_on_a_gpu_is_refused() -> None:
    """The recording on a GPU says what to do."""
    with pytest.raises(CaptureError, match="on_device"):
        record_inductor(workload())


def test_blocks_that_are_alike_are_compiled_once() -> None:
    """The second and third of four blocks are alike; the fourth has another number in it."""
    with offline() as mode:
        given = tuple(on_device(t) for t in (workload().weights(), *workload().request(0)))
        regions = cut(trace_step(workload(), given, mode))
    reading, first, second, third, fourth, last = [region.key for region in regions]

    assert second == third
    assert 5 == len({reading, first, second, fourth, last})


@pytest.mark.slow
def test_a_full_size_decode_needs_no_memory() -> None:
    """32 GB of state at batch 256: the 32 layers are three kinds of region, and nothing is allocated."""
    with torch.device("meta"):
        full = build(Step("llama-3-8b", "decode", 256, 1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with offline() as mode:
        given = tuple(on_device(t) for t in (full.weights(), full.make_inputs(0), full.make_state(0)))
        regions = cut(trace_step(full, given, mode))
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert (33, 3) == (len(regions), len({region.key for region in regions}))
    assert 32 << 30 <= sum(t.nbytes for t in given[2].values())
    assert grown_kb < 1 << 20


def test_arguments_that_share_memory_are_unlike_those_that_do_not() -> None:
    """Code compiled for two tensors is not used for two views of one."""
    one, other = torch.ones(4), torch.ones(4)

    assert alike([one, one]) != alike([one, other])
    assert alike([one, other]) == alike([other, one])


def test_memory_written_behind_a_block_is_made_in_the_same_region() -> None:
    """A block that begins between a tensor's making and its last write is not cut off there."""

    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.blocks
            x = first(x)
            kept = x * 2
            made: torch.Tensor = second(x)
            return made + kept.add_(1)

    module = Late().eval()
    late = replace(workload(), module=module, call=lambda inputs, state: {"y": module(inputs["x"])})
    with offline() as mode:
        given = tuple(on_device(t) for t in (late.weights(), {"x": torch.ones(2, 32)}, {}))
        regions = cut(trace_step(late, given, mode))
    made = [
        {n.target for n in r.module.graph.nodes}
        for r in regions
        if any(n.target is torch.ops.aten.mul.Tensor and n.args[1] == 2 for n in r.module.graph.nodes)
    ]

    assert [True] == [torch.ops.aten.add_.Tensor in targets for targets in made]


@pytest.mark.slow  # by default a step of tokens is proved, below
def test_the_tiny_llama_is_proved_and_has_fewer_launches_than_eager() -> None:
    """A decode layer is a handful of fused kernels, its matrix products and one attention call."""
    made = record_inductor_offline(build(Step("tiny-llama", "decode", 2, 16)))
    attention = [
        i for i in range(len(made.launches)) if made.kernel_of(i).name.startswith("aten._scaled_dot")
    ]

    assert num_layers() == len(attention)
    assert len(made.launches) <= num_layers() * 18
    assert [] == [x.immovable for x in made.launches if x.immovable]


@functools.cache
def compiled_tokens(model: str, tokens: int) -> Trace:
    """A served step over a pool of pages that is larger than what it writes."""
    with torch.device("meta"):
        step = build(Step(model, "tokens", 4, tokens, reserve=4096))
    return record_inductor_offline(step)


@pytest.mark.parametrize(
    ("model", "tokens"), [("tiny-llama", 16), pytest.param("tiny-mamba", 4, marks=pytest.mark.slow)]
)
def test_steps_of_tokens_are_proved_and_write_their_state_in_place(model: str, tokens: int) -> None:
    """One attention launch a layer; pages and rows are written by kernels with known accesses."""
    found = compiled_tokens(model, tokens)
    names = [found.kernel_of(i).name for i in range(len(found.launches))]
    state = set(found.buffers_of(BufferKind.STATE))
    written = {a.buffer for launch in found.launches for a in launch.accesses if a.write}

    num = num_layers() if model == "tiny-llama" else 0
    assert num == names.count("tessera.paged_attention.default")
    assert state <= written
    assert not [launch.immovable for launch in found.launches if launch.immovable]


def test_pages_are_priced_by_what_is_written_to_them() -> None:
    """The kernel that writes keys and values does more, and names no sizes."""
    found = compiled_tokens("tiny-llama", 16)
    pages = {n for n in found.buffers_of(BufferKind.STATE) if found.buffers[n].name.startswith("keys")}
    writes = [
        number
        for number, launch in enumerate(found.launches)
        if any(access.write and access.buffer in pages for access in launch.accesses)
    ]
    size = min(found.buffers[number].size_bytes for number in pages)

    assert len(pages) == len(writes)
    assert max(works(found)[number].num_bytes for number in writes) < size / 4
