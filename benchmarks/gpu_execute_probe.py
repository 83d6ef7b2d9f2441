"""Small experiments on the building blocks of execution on a GPU; used by gpu_execute.py."""

from typing import Any

import torch

from tessera.execute import driver
from tessera.execute.cuda.device import cut
from tessera.execute.cuda.pace import RECORD_WORDS, Chain, Hold, PaceKernel
from tessera.ir import Kernel, Origin
from tessera.kernels.launch import PtxKernel

LAUNCHES = 20

# out[block] = the SM it ran on, after about 20 us, so that blocks spread over all SMs they may use.
SMID = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry where_am_i(.param .u64 out)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %smid;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd1, %rd1, %rd2;
    mov.u64 %rd3, %globaltimer;
    add.u64 %rd3, %rd3, 20000;
WAIT:
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p1, %rd4, %rd3;
    @%p1 bra WAIT;
    st.global.u32 [%rd1], %r2;
    ret;
}
"""


def slices_of_storage() -> dict[str, Any]:
    """A slice of a storage is the same memory."""
    whole = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    part = whole.untyped_storage()[512:1024]
    torch.empty(0, dtype=torch.uint8, device="cuda").set_(part, 0, (512,), (1,)).fill_(7)
    return {"offset": part.data_ptr() - whole.data_ptr(), "ones": int((whole == 7).sum())}


def _replay_us(graph: Any, times: int = 9) -> float:
    found: list[float] = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) * 1e3)
    return sorted(found)[len(found) // 2]


def _dilated(chains: list[tuple[Chain, Any, list[int]]], records: torch.Tensor) -> Any:
    """A graph in which each stream does its launches, each dilated to so many nanoseconds."""
    x = torch.ones(1 << 18, device="cuda")
    origin = driver.new_stream(0)
    graph = torch.cuda.CUDAGraph()
    row = 0
    with torch.cuda.graph(graph, stream=origin, capture_error_mode="thread_local"):
        for _, stream, _ in chains:  # all fork before any joins, else one waits for the other
            stream.wait_stream(origin)
        for chain, stream, targets in chains:
            with torch.cuda.stream(stream):
                for target in targets:
                    chain.enter(records[row], Hold(target))
                    x.add(1.0)
                    row += 1
                chain.settle()
        for _, stream, _ in chains:
            origin.wait_stream(stream)
    return graph


def _word() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cuda")


def dilated_times() -> dict[str, Any]:
    """One stream, launches of 5 to 400 us: what a launch took on average, start to end of the graph."""
    pace_kernel, found = PaceKernel(), {}
    for target in (5, 10, 20, 50, 100, 400):
        records = torch.zeros(LAUNCHES, RECORD_WORDS, dtype=torch.int64, device="cuda")
        chain = Chain(pace_kernel, _word())
        graph = _dilated([(chain, driver.new_stream(0), [target * 1000] * LAUNCHES)], records)
        whole = _replay_us(graph)
        late = (records[:, 2] - records[:, 1]).float()
        found[str(target)] = {
            "us a launch": round(whole / LAUNCHES, 2), "whole us": round(whole, 1),
            "ended late by ns, mean and worst": [round(float(late.mean())), int(late.max())],
        }  # fmt: skip
    return found


def dilated_pair() -> dict[str, Any]:
    """Two streams at once: devices of their own overlap, one device is passed one at a time."""
    pace_kernel, found = PaceKernel(), {}
    places = torch.zeros(3, dtype=torch.int64, device="cuda")
    for name, words in (
        ("two devices", (_word(), _word())),
        ("one device", (_word(),) * 2),
        ("one device, one first", (places,) * 2),
    ):
        records = torch.zeros(2 * LAUNCHES, RECORD_WORDS, dtype=torch.int64, device="cuda")
        chains = [
            (Chain(pace_kernel, words[0], 0), driver.new_stream(0), [23_000] * LAUNCHES),
            (Chain(pace_kernel, words[1], 1), driver.new_stream(0), [21_000] * LAUNCHES),
        ]
        whole = _replay_us(_dilated(chains, records))
        ends = [int(r[:, 1].max() - records[:, 0].min()) / 1e3 for r in records.split(LAUNCHES)]
        found[name] = {"us": round(whole, 1), "each ended at": [round(us, 1) for us in ends]}
    return {**found, "alone, us": [23 * LAUNCHES, 21 * LAUNCHES]}


def _where(kernel: PtxKernel, stream: Any) -> set[int]:
    out = torch.full((2000,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        kernel((2000, 1, 1), [out])
    torch.cuda.synchronize()
    return set(out.tolist())


def _smid_kernel() -> PtxKernel:
    return PtxKernel(Kernel("where_am_i", Origin.PTX, ptx=SMID, signature=(("out", "*u32"),)), (32,))


def parts_with_unused_sms() -> dict[str, Any]:
    """Parts that leave SMs over."""
    kernel, parts = _smid_kernel(), cut(0, [64, 32])
    found = [_where(kernel, part.stream()) for part in parts]
    return {"used": [len(s) for s in found], "shared": len(found[0] & found[1])}


def priorities_are_kept() -> dict[str, Any]:
    """Two streams of one part with equal work: by priority one ends half way, else both at the end."""
    kernel, (part, _), found = _smid_kernel(), cut(0, [64, 32]), {}
    least, greatest = driver.priorities(0)
    out = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    for name, levels in (("equal", (least, least)), ("first goes first", (greatest, least))):
        streams = [part.stream(level) for level in levels]
        graphs = []
        for stream in streams:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream, capture_error_mode="thread_local"):
                for _ in range(20):
                    kernel((20_000, 1, 1), [out])
        start, stops = torch.cuda.Event(enable_timing=True), []
        torch.cuda._sleep(2_000_000)
        start.record()
        for stream, graph in zip(streams, graphs, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                graph.replay()
                stops.append(torch.cuda.Event(enable_timing=True))
                stops[-1].record()
        torch.cuda.synchronize()
        found[name] = [round(start.elapsed_time(stop), 2) for stop in stops]
    return {"range": [least, greatest], "ended after ms": found}


def partitions_are_disjoint() -> dict[str, Any]:
    """On which SMs kernels of two partitions run."""
    kernel = _smid_kernel()
    parts = cut(0, [100, 32])
    found = [_where(kernel, part.stream()) for part in parts]
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    wanted, equal = a @ a, []
    torch.cuda.synchronize()
    for part in parts:
        with torch.cuda.stream(part.stream()):
            got = a @ a
        torch.cuda.synchronize()
        equal.append(bool(torch.equal(wanted, got)))
    return {
        "asked": [p.num_sms for p in parts], "used": [len(s) for s in found],
        "shared": len(found[0] & found[1]), "whole card": len(_where(kernel, driver.new_stream(0))),
        "products have equal bits": equal,
    }  # fmt: skip
