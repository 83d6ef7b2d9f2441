"""A model of one's own with a Triton kernel in it: captured, proved, planned and run, without a GPU.

    python examples/own_triton_model.py

Nothing about the model is registered or described: what the kernel reads and writes is proved from the PTX
that Triton compiles it to. Prices are modelled, rates simulated. Without a GPU the kernel runs in the PTX
interpreter, so the last line compares real bits of two worker processes and measures nothing.
"""

import torch

from tessera.capture import record
from tessera.capture.function import workload
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, make_plan, make_unit, price, run_reference
from tessera.ir import Objective, Trace
from tessera.plan import PlanConfig, explain
from tessera.profile import parse_devices, wire

try:
    import triton
    import triton.language as tl
except ImportError:
    raise SystemExit("This example needs Triton: pip install triton") from None

WIDTH = 256


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gate(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out = x * sigmoid(y)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x, y = tl.load(x_ptr + at, mask=inside), tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x * (1 / (1 + tl.exp(-y))), mask=inside)


class Gated(torch.nn.Module):
    """A gated layer: two products, joined by the kernel, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As any module; the kernel is launched by hand."""
        up, wanted = self.up(x), self.gate(x)
        out = torch.empty_like(up)
        gate[(triton.cdiv(out.numel(), 1024),)](up, wanted, out, out.numel(), BLOCK=1024)
        result: torch.Tensor = self.down(out)
        return result


def accesses(trace: Trace) -> str:
    """What was proved of the kernel's first launch."""
    launch = next(launch for launch in trace.launches if "gate" in trace.kernels[launch.kernel].name)
    reads = [access.region.num_bytes for access in launch.accesses if access.read]
    writes = [access.region.num_bytes for access in launch.accesses if access.write]
    return f"the Triton kernel reads {reads} bytes and writes {writes}, proved from its PTX"


@torch.no_grad()
def main() -> None:
    """Captures, proves, plans, runs and compares."""
    torch.manual_seed(0)
    step = workload(torch.nn.Sequential(Gated(), Gated()).eval(), torch.randn(64, WIDTH))
    trace = record(step)
    print(accesses(trace))

    unit = make_unit([trace])
    print(f"{len(trace.launches)} launches, {len(unit.graphs[0].edges)} dependencies")

    cluster = wire(parse_devices("emu:h20,emu:l40s"), ["pcie4"])
    costs = price(unit, cluster)
    print(explain(make_plan(unit, costs, cluster, PlanConfig(Objective.THROUGHPUT, 4))).verdict)

    divided = make_plan(unit, costs, cluster, PlanConfig(Objective.THROUGHPUT, 1, "layer-pipeline"))
    request = UnitRequest([step], step.make_inputs(0), seed=0)
    with WorkerStepper([divided], step.weights()) as stepper:
        (result,) = run_offline(stepper, [request]).results
    (expected,) = run_reference(unit, request).outputs
    equal = all(torch.equal(tensor, result.outputs[0][name]) for name, tensor in expected.items())
    print("on two workers, equal bit for bit" if equal else "DIFFERENT")


if __name__ == "__main__":
    main()
