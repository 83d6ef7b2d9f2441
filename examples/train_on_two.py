"""A training step on two emulated GPUs: parameters equal bit for bit to plain PyTorch training.

    python examples/train_on_two.py

The step (forward, backward, AdamW) is captured once; its parameters, moments and step counts are state, each
kept on the device that updates it. Run one step before the capture: an optimiser makes its state then. The
devices compute on CPU workers, so this shows that a divided step trains alike; it measures no GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera import flow
from tessera.capture import record
from tessera.capture.function import workload
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Objective
from tessera.plan import PlanConfig
from tessera.profile import parse_devices, wire

STEPS, WIDTH, BATCH = 5, 256, 32


@dataclass(frozen=True)
class Training:
    """One request: a step run over and over, each time on data of its own."""

    start: Mapping[str, Tensor]
    data: list[tuple[Tensor, Tensor]]

    def state(self) -> Mapping[str, Tensor]:
        """Parameters and the optimiser's state before the first step."""
        return self.start

    def inputs(self, step: int, run: int, last: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The data of one step."""
        return dict(zip(("x", "y"), self.data[run], strict=True))


def main() -> None:
    """Trains plainly and on two workers, and compares."""
    torch.set_num_threads(1)  # as a worker has: the order of a parallel sum depends on the number of threads
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(STEPS + 1)]
    train(*data.pop())

    step = workload(train, *data[0])
    unit = flow.make_unit([record(step)], [STEPS])
    cluster = wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"])
    config = PlanConfig(Objective.LATENCY, 1, "layer-pipeline")
    plan = flow.make_plan(unit, flow.price(unit, cluster), cluster, config)
    placed = plan.lanes[0].placement.devices[0]
    print(f"{placed.count(0)} launches on {cluster.devices[0].name}, {placed.count(1)} on the other")

    with WorkerStepper([plan], step.weights()) as stepper:
        (result,) = run_offline(stepper, [Training(step.make_state(0), data)]).results
    for x, y in data:
        loss = train(x, y)
    same = all(
        torch.equal(parameter.detach().reshape(-1), result.state[f"model.{name}"].view(torch.float32))
        for name, parameter in model.named_parameters()
    )
    print(
        f"loss after {STEPS} steps: {loss:.6f} in plain PyTorch, {result.outputs[-1]['output']:.6f} divided"
    )
    print("parameters equal bit for bit" if same else "DIFFERENT")


if __name__ == "__main__":
    main()
