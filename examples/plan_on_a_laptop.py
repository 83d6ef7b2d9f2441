"""Where should each kernel run? Asked on a machine that has none of the GPUs in question.

    python examples/plan_on_a_laptop.py

Records one prefill and one decode of a small model on the CPU, prices every launch for an A100 and an L40S
from fitted models, plans, and prints what the plan says about itself. All times are modelled; nothing is
measured, and no worker is started.
"""

from tessera.analyze import build_graph
from tessera.capture import build, record
from tessera.ir import Objective, Step, WorkUnit
from tessera.plan import PlanConfig, explain, solve
from tessera.profile import estimate, make_cluster, parse_devices
from tessera.simulate import SteadyRates

PROMPT, NEW_TOKENS = 64, 32


def main() -> None:
    """Capture, price, plan, explain."""
    steps = (
        Step("tiny-llama", "prefill", batch=1, context=PROMPT, reserve=NEW_TOKENS),
        Step("tiny-llama", "decode", batch=1, context=PROMPT + NEW_TOKENS),
    )
    graphs = tuple(build_graph(record(build(step))) for step in steps)
    unit = WorkUnit(graphs, counts=(1, NEW_TOKENS))

    cluster = make_cluster(parse_devices("emu:a100,emu:l40s"), link="pcie4")
    costs = tuple(estimate(graph.trace, cluster.devices) for graph in graphs)
    rates = SteadyRates()  # simulated, on a virtual clock; `glance` is a quicker look
    plan = solve(unit, costs, cluster, PlanConfig(Objective.THROUGHPUT, slots=4), rates, rates.glance)

    why = explain(plan)
    print(f"{unit.num_launches} launches, {len(plan.lanes)} lanes")
    for device in why.devices:
        print(f"{device.name}: {device.utilisation:.0%} busy (modelled)")
    for baseline in plan.baselines:
        rate = baseline.throughput_per_s
        print(f"{baseline.name}: {f'{rate:.0f}/s (simulated)' if rate else 'does not apply'}")
    print(f"this plan: {plan.simulated_per_s:.0f}/s (simulated), bound {plan.bound_per_s:.0f}/s (modelled)")
    print(why.verdict)


if __name__ == "__main__":
    main()
