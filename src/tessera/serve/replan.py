"""rehearse: the rate of plans when served, by the service's own engine over the simulator's stepper.

A plan's own figures are of work units that pass its lanes one after another. In a service a microbatch keeps
its lane while it has requests, and reads prompts and answers together, so its devices wait for one another
unless there are enough microbatches. Rates are modelled, by the plans' costs. Not handled: CPU time between
two steps.

`replanner_of` compares new plans of a running service by rehearsal.
"""

import random
from collections.abc import Sequence

import torch

from tessera.adapt.replan import Replanner
from tessera.execute.offline import Trial, pick
from tessera.execute.stepper import StepCall, Tensors
from tessera.ir import Objective, Plan
from tessera.serve.answer import ActiveRequest
from tessera.serve.engine import Engine
from tessera.serve.planning import Prepared, plan_policies
from tessera.serve.records import Ask, Average, Sampling, Shape
from tessera.serve.text import ByteText
from tessera.simulate.stepper import VirtualStepper

# Rounds of answers that are counted, after one in which the load becomes steady.
COUNTED = 2
GREEDY = Sampling(temperature=0.0)


def replanner_of(prepared: Prepared) -> Replanner:
    """Plans anew as the service was planned; compares for one client if for latency, else for many."""
    shape, half = prepared.model.shape, prepared.model.shape.capacity // 2
    average = Average(min(Average().prompt, half), min(Average().output, half))

    def gain(old: Plan, new: Plan) -> float:
        clients = 1 if old.objective is Objective.LATENCY else None
        before, after = rehearse([old, new], shape, average, clients)
        return after / before

    return Replanner(
        lambda plan, cluster, costs: plan_policies(shape, cluster, plan.unit, costs, (plan.objective,))[0],
        gain,
    )


def rehearse(
    plans: Sequence[Plan], shape: Shape, average: Average, clients: int | None = None
) -> list[float]:
    """Tokens a second of each plan with so many average requests at once, by default as many as fit."""
    clients = clients or shape.microbatches * shape.rows
    return [_rate_per_s(plans, number, shape, average, clients) for number in range(len(plans))]


def best_served(plans: Sequence[Plan], shape: Shape, average: Average) -> tuple[Plan, dict[str, float]]:
    """The plan to serve by, the first unless another is clearly better, and what each was found to give."""
    rates = rehearse(plans, shape, average)
    trials = [Trial(n, plan.policy, rate) for n, (plan, rate) in enumerate(zip(plans, rates, strict=True))]
    return plans[pick(trials).plan], {trial.policy: trial.per_s for trial in trials}


def _rate_per_s(plans: Sequence[Plan], number: int, shape: Shape, average: Average, clients: int) -> float:
    steps = [graph.trace.step for graph in plans[0].graphs]

    def outputs(call: StepCall) -> Tensors:
        return {"next_tokens": torch.zeros(steps[call.step].batch, dtype=torch.int64)}

    stepper, load, text = VirtualStepper(plans, outputs=outputs), random.Random(0), ByteText()
    engine = Engine(stepper, shape, (), 2 * clients, prefix_caching=False)
    engine.scheduler.switch(number)
    waiting: list[ActiveRequest] = []

    def ask(tokens: int) -> None:
        length = load.randint(max(1, average.prompt // 2), average.prompt + average.prompt // 2)
        prompt = (0,) * max(1, min(length, shape.max_tokens - tokens))
        request = ActiveRequest(Ask(prompt, tokens, GREEDY, ignores_end=True), text.reader(), ())
        waiting.append(request)
        engine.submit(request)

    for _ in range(clients):  # rows end one after another from the start, as they do later on
        ask(load.randint(1, average.output))
    marks: list[tuple[float, int]] = []
    finished = 0
    for goal in (clients, (1 + COUNTED) * clients):
        while finished < goal:
            engine.step()
            over = [request for request in waiting if request.is_over]
            for request in over:
                waiting.remove(request)
                ask(average.output)
            finished += len(over)
        marks.append((stepper.now_s(), engine.meters.output_tokens))
    (start_s, before), (stop_s, after) = marks
    return (after - before) / (stop_s - start_s)
