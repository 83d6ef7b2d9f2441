"""Two machines with different GPUs: is it worth joining them, and does it work?

    python examples/two_unlike_boxes.py

First the question, for Llama 3 8B on an H20 in one machine and an L40S in the other, joined by InfiniBand. No
GPU and no weights are needed; every figure is modelled and simulated. Then the proof, with a small model: two
worker processes that pass tensors on over TCP, as between machines, against the model itself. To go on with
two machines, docs/cluster.md: `tessera serve` with --rendezvous on one, `tessera worker` on the other.
"""

import torch

from tessera.capture import record_step
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import make_plan, make_unit, price, requests_of, run_reference
from tessera.ir import Cluster, Load, Objective, Step
from tessera.plan import QUICK, PlanConfig
from tessera.plan.service import compared
from tessera.planning import ServedSteps, make_service_plan
from tessera.profile import parse_devices, wire
from tessera.serve.rehearse import rehearse


def is_it_worth_it(cluster: Cluster) -> None:
    """Requests of 1,024 + 256 tokens to Llama 3 8B: the plan and other policies, each at its own best."""
    steps = ServedSteps("llama-3-8b", cluster, is_compiled=True)
    plan = make_service_plan(steps, Load(1024, 256, tpot_ms=50.0), rehearse, QUICK)
    answer = compared(plan)
    for option in (*answer.baselines, answer.chosen):
        batches = ", ".join(f"{batch} on {device}" for device, batch in option.batch.items())
        print(
            f"{option.policy:>25} {option.tokens_per_s:7,.0f} tokens/s at {option.tpot_ms:.0f} ms: {batches}"
        )


def does_it_work(cluster: Cluster) -> bool:
    """Four decodes of a small model, attention on one worker and the rest on the other."""
    unit = make_unit([record_step(Step("tiny-llama", "decode", batch=8, context=64))])
    config = PlanConfig(Objective.THROUGHPUT, 2, "attention-ffn")
    plan = make_plan(unit, price(unit, cluster), cluster, config)
    asked = requests_of(plan, 4)
    with WorkerStepper([plan], asked.weights, transport="host") as stepper:
        results = run_offline(stepper, asked.work).results
    expected = [run_reference(plan.unit, request) for request in asked.work]
    return all(
        torch.equal(output[name], result.outputs[run][name])
        for model, result in zip(expected, results, strict=True)
        for run, output in enumerate(model.outputs)
        for name in output
    )


def main() -> None:
    """Asks, then tries."""
    cluster = wire(parse_devices("emu:h20,emu:l40s"), ["ib200"])
    is_it_worth_it(cluster)
    print("over TCP, equal bit for bit" if does_it_work(cluster) else "DIFFERENT")


if __name__ == "__main__":
    main()
