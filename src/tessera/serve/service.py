"""Service: answers asks with a served model; the object HTTP, tests and benchmarks use.

`answer` is thread-safe and raises `AskError`, `ServiceBusy` or `ServiceClosing` at once. The caller closes
the stepper after the service.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from tessera.adapt.capability import Capability
from tessera.adapt.controller import Planner
from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.errors import AskError, check_known
from tessera.execute.stepper import DeviceStatus, Stepper
from tessera.ir import ServicePlan
from tessera.serve.answer import ActiveRequest, Answer
from tessera.serve.engine import MAX_WAITING, Engine
from tessera.serve.groups import Policies
from tessera.serve.meters import Meters
from tessera.serve.pictures import PictureInputs
from tessera.serve.records import AUTO, Ask, Counts, DeviceView, Shape, Snapshot
from tessera.serve.rehearse import rated
from tessera.serve.text import Text

GRACE_S = 30.0
# A switch waits for microbatches to empty.
MIN_WINDOW_S = 2.0
# Seconds of step times before costs are judged: replanning takes a core for a while.
COST_S = 30.0


def say(line: str) -> None:
    print(f"tessera: {line}", file=sys.stderr, flush=True)


def _monitor(capabilities: tuple[Capability, ...]) -> Monitor:
    window_s = max(MIN_WINDOW_S, Monitor(capabilities).window_s)
    costs = max(1, math.ceil(COST_S / window_s))
    return Monitor(capabilities, MonitorConfig(window_s=window_s, cost_windows=costs))


class Service:
    """A monitor chooses among policies if `policy` is "auto".

    Without `capabilities` policies are rehearsed; without a `planner` plans stay.
    """

    def __init__(
        self,
        stepper: Stepper,
        policies: Sequence[ServicePlan],
        shape: Shape,
        text: Text,
        *,
        model: str = "",
        capabilities: Sequence[Capability] = (),
        policy: str = AUTO,
        max_waiting: int = MAX_WAITING,
        prefix_caching: bool = True,
        meters: Meters | None = None,
        picture_inputs: PictureInputs | None = None,
        planner: Planner[ServicePlan] | None = None,
        log: Callable[[str], None] = say,
    ) -> None:
        self.text, self.model, self.shape, self._stepper = text, model, shape, stepper
        self._most_tokens = min(
            shape.capacity, *(shape.of_group(g).max_tokens for policy in policies for g in policy.groups)
        )
        names = tuple(policy.policy for policy in policies)
        check_known("policy", policy, (AUTO, *names))
        monitor = None
        if policy == AUTO and (len(names) > 1 or planner is not None):
            monitor = _monitor(tuple(capabilities) or rated(policies, shape))
        self._engine = Engine(
            stepper, policies, shape, max_waiting, meters, picture_inputs, prefix_caching,
            monitor=monitor, planner=planner, log=log,
        )  # fmt: skip
        if policy != AUTO:
            self.switch(policy)
        self._thread = threading.Thread(target=self._engine.run, name="tessera-engine", daemon=True)

    @property
    def policies(self) -> Policies:
        return self._engine.scheduler.policies

    @property
    def policy(self) -> str:
        return self._engine.policy

    def switch(self, policy: str) -> None:
        self._engine.switch(policy)

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stop(GRACE_S if error is None else 0.0)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float = GRACE_S) -> bool:
        """True if all answers finished within the grace."""
        self._engine.close(time.monotonic() + grace_s)
        if self._thread.ident is not None:
            self._thread.join()  # includes the running step, which cannot be cancelled
        self._engine.end_planning()
        return not self._engine.was_cut

    @property
    def failure(self) -> str:
        return self._engine.failure

    def answer(self, ask: Ask, beside: Answer | None = None) -> Answer:
        self._check(ask)
        reader, answer = self.text.reader(ask.prompt if ask.continues else ()), beside or Answer()
        request = ActiveRequest(ask, reader, self.text.end)
        request.buffer.waiter = answer.waiter
        self._engine.accept(request)
        answer.add(request.buffer, lambda: self._engine.cancel(request))
        return answer

    def _check(self, ask: Ask) -> None:
        """Only what depends on the model; `openai.bodies` has checked the rest."""
        shape, most = self.shape, self._most_tokens
        if not ask.prompt:
            raise AskError("the prompt is empty", "Send at least one token.", "prompt")
        total = len(ask.prompt) + ask.max_tokens
        if total > most:
            message = f"{len(ask.prompt)} prompt tokens plus {ask.max_tokens} answer tokens is {total}"
            remedy = f"The maximum is {most}."
            raise AskError(message, remedy, "max_tokens" if len(ask.prompt) < most else "prompt")
        biased = [number for number, _ in ask.sampling.logit_bias]
        by_place = {"prompt": ask.prompt, "stop_token_ids": ask.stop_tokens, "logit_bias": biased}
        for place, tokens in by_place.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < shape.vocab_size:
                remedy = f"Use 0 to {shape.vocab_size - 1}."
                raise AskError("a token id is not in the vocabulary", remedy, place)

    def snapshot(self) -> Snapshot:
        engine = self._engine
        router, meters, controller = engine.scheduler, engine.meters, engine.controller
        microbatches, plan = list(router.microbatches.values()), router.service_plan
        pools = router.every_pool()
        bytes_per_s = {(x.src, x.dst): x.gbps * 1e9 for x in self._stepper.plans[0].cluster.links}
        return Snapshot(
            model=self.model,
            policy=plan.policy,
            policies=tuple(policy.policy for policy in self.policies),
            devices=self._devices(),
            links=tuple(meters.moved(bytes_per_s)),
            running=sum(microbatch.content.num_used for microbatch in microbatches),
            waiting=len(router.queue),
            groups=router.views(),
            expected=plan.expected,
            load=controller.history.view(engine.now_s(), plan.load),
            host_ms=None if meters.host_s is None else 1e3 * meters.host_s,
            pages_used=sum(pool.num_used for pool in pools),
            pages=sum(pool.num_pages - 1 for pool in pools),
            tokens_per_s=meters.tokens_per_s,
            latency=meters.latency,
            up_s=engine.now_s(),
            finished=dict(meters.finished),
            experts=dict(meters.experts),
            decisions=tuple(controller.decisions),
            decided={kind.value: num for kind, num in controller.counts.items()},
            **{count.name: getattr(meters, count.name) for count in fields(Counts)},
        )

    def _devices(self) -> tuple[DeviceView, ...]:
        meters, lost = self._engine.meters, frozenset(self._engine.scheduler.lost)
        busy, memory = meters.busy(), {d.name: d.memory_bytes for d in self._stepper.plans[0].cluster.devices}
        views = []
        for name in dict.fromkeys((*memory, *busy, *sorted(lost))):
            is_lost = name in lost
            now = meters.status.get(name, DeviceStatus("lost" if is_lost else "ready"))
            worker = (now.pid, now.state, now.restarts, meters.losses[name])
            views.append(DeviceView(name, busy.get(name, 0.0), memory.get(name, 0), is_lost, *worker))
        return tuple(views)
