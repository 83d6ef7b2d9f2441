"""Service: answers asks with a served model. The one object that HTTP, tests and benchmarks talk to.

    with Service(stepper, shape, text) as service:
        async for event in service.answer(ask): ...

`answer` may be called from any thread and read on any event loop; it refuses at once what cannot be served,
with AskError, ServiceBusy or ServiceClosing. The stepper belongs to the caller, who closes it after the
service. Every loss of a device, its return and every change of plans is one line of the log, a decision in
the snapshot and a count in the metrics.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import TracebackType

from tessera.adapt.capability import Capability
from tessera.adapt.live import Decisions, Hands, Live
from tessera.adapt.monitor import Action, Monitor, MonitorConfig
from tessera.errors import AskError, UnknownName
from tessera.execute.stepper import DeviceStatus, Stepper
from tessera.ir import Decision, DecisionKind, Plan
from tessera.kernels import PAGE
from tessera.serve.answer import ActiveRequest, Answer
from tessera.serve.engine import MAX_WAITING, Engine, Planner, capabilities_of
from tessera.serve.meters import Meters
from tessera.serve.records import Ask, Counts, DeviceView, Shape, Snapshot
from tessera.serve.sequences import SequenceBatch
from tessera.serve.sight import Sight
from tessera.serve.text import Text

AUTO = "auto"
# Seconds that answers in progress get when a service is left.
GRACE_S = 30.0
# A switch waits for microbatches to empty, and emulated devices are slower than their plans say: no haste.
MIN_WINDOW_S = 2.0
# Times of steps are collected for so long before costs are judged: planning takes a core for a while.
COST_S = 30.0


def say(line: str) -> None:
    print(f"tessera: {line}", file=sys.stderr, flush=True)


class Service:
    """Use it in a `with` statement, or `start` and `stop` it.

    policy          "auto": as the monitor says, where there are several and it is known what they can do
    prefix_caching  False: what sequences have in common is read anew for each of them
    capabilities    what the stepper's plans can do, where they do not say it themselves
    planner         makes other plans while it runs; None: there are none
    log             hears one line for everything that happens to devices and plans
    """

    def __init__(
        self,
        stepper: Stepper,
        shape: Shape,
        text: Text,
        *,
        model: str = "",
        capabilities: Sequence[Capability] = (),
        policy: str = AUTO,
        max_waiting: int = MAX_WAITING,
        prefix_caching: bool = True,
        meters: Meters | None = None,
        sight: Sight | None = None,
        planner: Planner | None = None,
        log: Callable[[str], None] = say,
    ) -> None:
        self.text, self.model, self.shape = text, model, shape
        self._stepper, self._planner, self._log = stepper, planner, log
        policies = self._policies()
        if policy not in (AUTO, *policies):
            raise UnknownName("policy", policy, (AUTO, *policies))
        more = (sight, prefix_caching)
        self._engine = Engine(stepper, shape, text.end, max_waiting, meters, *more, planner, self._note)
        self._begun_s = time.monotonic()
        self._decisions = Decisions()
        # Made in the background, not in force yet.
        self._made: tuple[Plan, ...] = ()
        self._is_started = False
        if policy != AUTO:
            self._switch(policy)
        elif len(policies) > 1 or planner is not None:
            self._watch(tuple(capabilities) or capabilities_of(stepper.plans, shape.rows))
        self._thread = threading.Thread(target=self._engine.run, name="tessera-engine", daemon=True)

    def _watch(self, capabilities: Sequence[Capability]) -> None:
        if not capabilities:
            return
        monitor = Monitor(capabilities)
        window_s = max(MIN_WINDOW_S, monitor.window_s)
        costs = max(1, math.ceil(COST_S / window_s))
        monitor = Monitor(capabilities, MonitorConfig(window_s=window_s, cost_windows=costs))
        several = len(self._stepper.plans[0].cluster.devices) > 1
        is_planned = self._planner is not None and several
        hands = Hands(self._switch, self._replan if is_planned else None, self._adopt)
        self._engine.live = Live(monitor, hands, self._clock_s, self._decisions)

    def _clock_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _policies(self) -> tuple[str, ...]:
        return tuple(plan.policy for plan in self._stepper.plans)

    # What the monitor has done, on any thread.

    def _switch(self, name: str) -> None:
        """Microbatches that are opened from now on follow this policy."""

        def switch() -> None:
            if name in self._policies():
                self._engine.scheduler.switch(self._policies().index(name))

        self._engine.post(switch) if self._is_started else switch()

    def _replan(self, action: Action) -> Sequence[Capability]:
        assert self._planner is not None, "only what can be planned is"
        assert action.factors is not None, "a replan comes with factors"
        self._made = self._planner.corrected(self._engine.keeper.plans, action.factors)
        return capabilities_of(self._made, self.shape.rows)

    def _adopt(self) -> str:
        made, old = self._made, self._engine.keeper.plans
        num = sum(new.lanes != plan.lanes for new, plan in zip(made, old, strict=True))
        why = f"costs are corrected; {num} of {len(made)} plans are new"
        self._engine.post(lambda: self._engine.keeper.adopt(made, ""))
        self._log(why)
        return why

    def _note(self, kind: DecisionKind, line: str) -> None:
        """Something happened to devices or plans; on the engine's thread."""
        if not line:  # plans of the monitor, which it has told itself
            return
        self._log(line)
        live = self._engine.live
        if kind is DecisionKind.ADOPT and live is not None:
            live.adopted(capabilities_of(self._stepper.plans, self.shape.rows), line)
            self._switch(live.policy)
            return
        policy = self._engine.scheduler.plan.policy
        self._decisions.add(Decision(self._clock_s(), kind, policy, line))

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop(GRACE_S if error is None else 0.0)

    def start(self) -> None:
        self._is_started = True
        self._thread.start()

    def stop(self, grace_s: float = GRACE_S) -> bool:
        """Refuses what comes, finishes what it has taken, but for no longer than this; True if it could."""
        self._engine.close(time.monotonic() + grace_s)
        if self._thread.ident is not None:
            # A step that runs is waited for: nobody can take it back.
            self._thread.join()
        self._engine.keeper.close()
        if self._engine.live is not None:
            self._engine.live.__exit__(None, None, None)
        return not self._engine.was_cut

    @property
    def failure(self) -> str:
        """Why nothing is served any more; empty: it is."""
        return self._engine.failure

    def answer(self, ask: Ask) -> Answer:
        """Takes an ask; its pieces and its finish come by iterating. Closing the answer cancels it."""
        self._check(ask)
        request = ActiveRequest(ask, self.text.reader(), self.text.end)
        self._engine.submit(request)
        return Answer(request.buffer, lambda: self._engine.cancel(request))

    def _check(self, ask: Ask) -> None:
        """Refuses what this model cannot answer; what no model can, `openai.bodies` has refused."""
        shape = self.shape
        if not ask.prompt:
            raise AskError("there is nothing to read", "Send at least one token.", "prompt")
        total = len(ask.prompt) + ask.max_tokens
        if total > shape.max_tokens:
            message = f"{len(ask.prompt)} tokens of prompt and {ask.max_tokens} of answer are {total}"
            remedy = f"This service has room for {shape.max_tokens}."
            raise AskError(message, remedy, "max_tokens" if len(ask.prompt) < shape.max_tokens else "prompt")
        biased = [number for number, _ in ask.sampling.logit_bias]
        for place, tokens in (
            ("prompt", ask.prompt),
            ("stop_token_ids", ask.stop_tokens),
            ("logit_bias", biased),
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < shape.vocab_size:
                raise AskError("a token is not in the vocabulary", f"Use 0 to {shape.vocab_size - 1}.", place)

    def snapshot(self) -> Snapshot:
        scheduler, meters, shape = self._engine.scheduler, self._engine.meters, self.shape
        contents = [microbatch.content for microbatch in list(scheduler.microbatches.values())]
        pools = [content.pool for content in contents if isinstance(content, SequenceBatch)]
        bytes_per_s = {(x.src, x.dst): x.gbps * 1e9 for x in self._stepper.plans[0].cluster.links}
        return Snapshot(
            model=self.model,
            policy=scheduler.plan.policy,
            policies=self._policies(),
            devices=self._devices(),
            links=tuple(meters.moved(bytes_per_s)),
            running=sum(content.num_used for content in contents),
            waiting=len(scheduler.queue),
            pages_used=sum(pool.num_used for pool in pools),
            pages=shape.microbatches * (shape.pool_tokens // PAGE - 1),
            tokens_per_s=meters.tokens_per_s,
            latency=meters.latency,
            up_s=self._clock_s(),
            finished=dict(meters.finished),
            decisions=tuple(self._decisions.latest),
            decided={kind.value: num for kind, num in self._decisions.counts.items()},
            **{count.name: getattr(meters, count.name) for count in fields(Counts)},
        )

    def _devices(self) -> tuple[DeviceView, ...]:
        meters, lost = self._engine.meters, frozenset(self._engine.scheduler.lost)
        busy, memory = meters.busy(), {d.name: d.memory_bytes for d in self._stepper.plans[0].cluster.devices}
        found = []
        for name in dict.fromkeys((*memory, *busy, *sorted(lost))):
            is_lost = name in lost
            now = meters.status.get(name, DeviceStatus("lost" if is_lost else "ready"))
            worker = (now.pid, now.state, now.restarts, meters.losses[name])
            found.append(DeviceView(name, busy.get(name, 0.0), memory.get(name, 0), is_lost, *worker))
        return tuple(found)
