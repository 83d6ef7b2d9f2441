"""Kernels that load pointers from tables: resolved at each launch, run where the buffers are."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.capture.function import workload
from tessera.errors import CaptureError
from tessera.execute.reference import Replay
from tessera.ir import Trace

CODE = (Path(__file__).resolve().parents[3] / "corpus" / "ptx" / "sm_80" / "serving.ptx").read_text()
DIM = 16


def addresses(tensors: Any) -> torch.Tensor:
    """A table of the tensors."""
    return torch.tensor([t.data_ptr() for t in tensors])


class Adapters(torch.nn.Module):
    """Adds a row of one of three adapters to each token; `table` holds their addresses."""

    def __init__(self, is_listed: bool = False) -> None:
        super().__init__()
        self.adapters = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(DIM)) for _ in range(3)])
        self.register_buffer("table", addresses(self.adapters))
        self.kernel, self.is_listed = tessera.CudaKernel(CODE, "adapter_rows"), is_listed

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """out[i] = 2 x[i] + x[i] * adapter[which[i]]."""
        out = x * 2
        table = list(self.adapters) if self.is_listed else self.table
        self.kernel[x.shape[0], 32](out, x, table, which, DIM)
        return out + 1


class Caches(torch.nn.Module):
    """Copies pages in two caches that it holds, named in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.randn(4, DIM))
        self.register_buffer("second", torch.randn(4, DIM))
        self.register_buffer("table", addresses([self.first, self.second]))
        self.kernel = tessera.CudaKernel(CODE, "copy_pages")

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """The first cache after its pages were copied."""
        self.kernel[(2, pairs.shape[0]), 32](self.table, pairs, DIM)
        return self.get_buffer("first") * 1


def touched(trace: Trace, launch: int) -> dict[str, tuple[bool, bool]]:
    """Read and write flags of a launch by buffer."""
    return {trace.buffers[a.buffer].name: (a.read, a.write) for a in trace.launches[launch].accesses}


WHICH = torch.tensor([0, 2, -1, 1], dtype=torch.int32)


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_launch_names_the_buffers_behind_its_table(is_listed: bool) -> None:
    """It is movable, reads every adapter, and the table itself is no buffer of the trace."""
    trace = tessera.capture(Adapters(is_listed), torch.randn(4, DIM), WHICH)
    found = touched(trace, 1)

    assert "" == trace.launches[1].immovable
    assert {f"adapters.{k}": (True, False) for k in range(3)}.items() <= found.items()
    assert "table" not in {buffer.name for buffer in trace.buffers}


def test_a_trace_runs_with_its_buffers_elsewhere() -> None:
    """Whoever runs it writes a table of the addresses that the adapters have there."""
    model, x = Adapters(), torch.randn(4, DIM)
    trace = tessera.capture(model, x, WHICH)
    rows = torch.stack(list(model.adapters))[WHICH.clamp(min=0).long()].detach()
    elsewhere = {f"adapters.{k}": adapter.detach().clone() for k, adapter in enumerate(model.adapters)}
    inputs = {"x": x, "which": WHICH}
    with torch.no_grad():
        for adapter in model.adapters:
            adapter.zero_()
    found = Replay(trace, elsewhere, inputs, {}).run_in_program_order().outputs["output"]

    assert torch.allclose(1 + 2 * x + torch.where(WHICH[:, None] < 0, 0, x * rows), found, atol=1e-6)


def test_what_is_written_behind_a_table_is_state() -> None:
    """The caches are changed by nobody but the kernel, through addresses of where they lay before."""
    model, pairs = Caches(), torch.tensor([[0, 3]])
    step = workload(model, pairs)
    before = {name: tensor.clone() for name, tensor in step.make_state(0).items()}
    after = {name: tensor.clone() for name, tensor in before.items()}
    output = step.run({"pairs": pairs}, after)["output"]

    assert {"first", "second"} == set(before)
    assert all(torch.equal(before[name][0], after[name][3]) for name in before)
    assert torch.equal(after["first"], output)
    assert {"first": (True, True), "second": (True, True)}.items() <= touched(
        tessera.capture(model, pairs), 0
    ).items()


def test_a_table_of_the_request_is_refused() -> None:
    """Another request has other addresses."""
    model = Adapters()

    def call(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        model.kernel[4, 32](out, x, table, WHICH, DIM)
        return out

    with pytest.raises(CaptureError, match=r"table of addresses in argument 2 .* depends on the request"):
        tessera.capture(call, addresses(model.adapters), torch.randn(4, DIM))


def test_an_entry_that_leads_nowhere_makes_the_launch_immovable_by_name() -> None:
    """A tensor that is gone, of an adapter that no token of this call takes."""
    model = Adapters()
    model.get_buffer("table")[1] = 1 << 50
    trace = tessera.capture(lambda x: model(x, torch.full_like(WHICH, -1)), torch.randn(4, DIM))
    reason = next(launch.immovable for launch in trace.launches if launch.grid)

    assert "reads through pointers loaded from parameter 2" in reason
    assert re.search(r"argument 2 is not known: its entry \d is not an address in a tensor", reason)
