"""PreparedPlanner: makes other plans for a service that runs, from what it was prepared from.

Around devices that fail again and again; and at costs as they were measured (`adapt`), beside the running
plans. There both are rehearsed at the corrected costs; a new plan that is not clearly better is left, and the
old one stays, with costs that are right.

A plan's own figures are those of work units that pass through its lanes one after another. A service is not
like that: a microbatch keeps its lane while it has requests, and reads prompts and answers together, so that
its devices wait for one another unless there are enough of them. So a rehearsal is the service's own engine
under a load, over the simulator's stepper. What is counted is modelled, by the plans' costs. Not handled:
what the CPU does between two steps.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from tessera.adapt.drift import LEAST_GAIN, Factors, widened
from tessera.execute.offline import Trial, pick
from tessera.execute.stepper import StepCall, Tensors
from tessera.ir import Costs, Objective, Plan, verify
from tessera.serve.answer import ActiveRequest
from tessera.serve.engine import Engine, Plans
from tessera.serve.planning import Prepared
from tessera.serve.records import Ask, Average, Sampling, Shape
from tessera.serve.text import ByteText
from tessera.simulate.stepper import VirtualStepper


class PreparedPlanner:
    def __init__(self, prepared: Prepared) -> None:
        self._prepared, half = prepared, prepared.model.shape.capacity // 2
        self._average = Average(min(Average().prompt, half), min(Average().output, half))

    def without(self, lost: Iterable[str]) -> Plans:
        """Planned for the others, and put back among all devices."""
        made = self._prepared.without(sorted(lost))
        whole = self._prepared.plans[0]
        found = tuple(widened(plan, whole.cluster, whole.costs) for plan in made.plans)
        for plan in found:
            verify(plan)
        return found

    def corrected(self, plans: Sequence[Plan], factors: Factors) -> Plans:
        """Each plan, or a better one, with the costs as they were measured."""
        prepared = self._prepared
        costs = factors.apply(prepared.plans[0].unit, plans[0].costs)
        made = prepared.at(costs).plans
        self._prepared = replace(prepared, plans=tuple(replace(x, costs=costs) for x in prepared.plans))
        return tuple(self._better(old, made, costs) for old in plans)

    def _better(self, old: Plan, made: Sequence[Plan], costs: tuple[Costs, ...]) -> Plan:
        new = next((plan for plan in made if plan.objective is old.objective), None)
        if new is not None and new.lanes != old.lanes and self._gain(old, new, costs) >= LEAST_GAIN:
            return replace(new, policy=old.policy)
        return replace(old, costs=costs)

    def _gain(self, old: Plan, new: Plan, costs: tuple[Costs, ...]) -> float:
        """How many times as good a new plan is: for one client if it is for latency, else for many."""
        plans = [replace(plan, costs=costs) for plan in (old, new)]
        clients = 1 if old.objective is Objective.LATENCY else None
        before, after = rehearse(plans, self._prepared.model.shape, self._average, clients)
        return after / before


# Rounds of answers that are counted, after one in which the load becomes steady.
COUNTED = 2
GREEDY = Sampling(temperature=0.0)


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
