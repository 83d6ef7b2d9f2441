"""rehearse: modelled rates of plans when served, by the service's engine over the simulator's stepper.

A plan's own figures assume work units that pass its lanes one after another. In a service a microbatch keeps
its lane while it has requests and mixes prompts with answers, so devices wait unless there are enough
microbatches. Not handled: CPU time between steps.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from tessera.execute.offline import Trial, pick
from tessera.execute.stepper import StepCall, Tensors
from tessera.ir import Plan
from tessera.serve.answer import ActiveRequest
from tessera.serve.engine import Engine
from tessera.serve.records import Ask, Average, Sampling, Shape
from tessera.serve.text import ByteText
from tessera.simulate.arrivals import make_lengths
from tessera.simulate.stepper import VirtualStepper

# Counted rounds of answers, after one warm-up round.
COUNTED = 2
GREEDY = Sampling(temperature=0.0)


def lengths_of(average: Average, num: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    prompts, outputs = make_lengths(f"uniform:{average.prompt},{average.output}", num, seed)
    return cycle(zip(prompts, outputs, strict=True))


def rehearse(
    plans: Sequence[Plan], shape: Shape, average: Average, clients: int | None = None
) -> list[float]:
    """Tokens/s of each plan with this many average requests at once; default: as many as fit."""
    clients = clients or shape.microbatches * shape.rows
    return [_rate_per_s(plans, number, shape, average, clients) for number in range(len(plans))]


def best_served(plans: Sequence[Plan], shape: Shape, average: Average) -> tuple[Plan, dict[str, float]]:
    """The plan to serve by, with all rates; the first unless another is clearly better."""
    rates = rehearse(plans, shape, average)
    trials = [Trial(n, plan.policy, rate) for n, (plan, rate) in enumerate(zip(plans, rates, strict=True))]
    return plans[pick(trials).plan], {trial.policy: trial.per_s for trial in trials}


def _rate_per_s(plans: Sequence[Plan], number: int, shape: Shape, average: Average, clients: int) -> float:
    steps = [graph.trace.step for graph in plans[0].graphs]

    def outputs(call: StepCall) -> Tensors:
        return {"next_tokens": torch.zeros(steps[call.step].batch, dtype=torch.int64)}

    stepper, text = VirtualStepper(plans, outputs=outputs), ByteText()
    first, lengths = random.Random(0), lengths_of(average, (1 + COUNTED) * clients)
    engine = Engine(stepper, shape, (), 2 * clients, prefix_caching=False)
    engine.scheduler.switch(number)
    waiting: list[ActiveRequest] = []

    def ask(is_first: bool = False) -> None:
        length, tokens = next(lengths)
        if is_first:  # answers end staggered from the start, as in steady state
            tokens = first.randint(1, tokens)
        tokens = min(tokens, shape.max_tokens - 1)
        prompt = (0,) * min(length, shape.max_tokens - tokens)
        request = ActiveRequest(Ask(prompt, tokens, GREEDY, ignores_end=True), text.reader(), ())
        waiting.append(request)
        engine.submit(request)

    for _ in range(clients):
        ask(is_first=True)
    marks: list[tuple[float, int]] = []
    finished = 0
    for goal in (clients, (1 + COUNTED) * clients):
        while finished < goal:
            engine.step()
            over = [request for request in waiting if request.is_over]
            for request in over:
                waiting.remove(request)
                ask()
            finished += len(over)
        marks.append((stepper.now_s(), engine.meters.output_tokens))
    (start_s, before), (stop_s, after) = marks
    return (after - before) / (stop_s - start_s)
