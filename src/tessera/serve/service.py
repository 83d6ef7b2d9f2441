"""Service: answers asks with a served model. The one object that HTTP, tests and benchmarks talk to.

    with Service(stepper, text) as service:
        async for event in service.answer(ask): ...

`answer` may be called from any thread and read on any event loop; it refuses at once what cannot be served,
with AskError, ServiceBusy or ServiceClosing. The stepper belongs to the caller, who closes it after the
service; so do those that `replace` makes.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from tessera.adapt import Capability, Hands, Live, Monitor, MonitorConfig
from tessera.errors import AskError, UnknownName
from tessera.execute.serving import Shape, Stepper
from tessera.ir import Plan
from tessera.serve.admission import width_of
from tessera.serve.capability import capabilities_of
from tessera.serve.engine import Engine, Replace
from tessera.serve.meters import Observer
from tessera.serve.outlet import Answer
from tessera.serve.records import Ask, DeviceView, Snapshot
from tessera.serve.rows import Request
from tessera.serve.sampling import check_sampling
from tessera.serve.state import EngineConfig
from tessera.serve.text import Text

AUTO = "auto"
# Seconds that answers in progress get when a service is left.
GRACE_S = 30.0
# A switch waits for slots to empty, and emulated devices are slower than their plans say: no haste.
MIN_WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """What a service takes, and how it decides."""

    # A policy's name; "auto": as the monitor says, where there are several and it is known what they can do.
    policy: str = AUTO
    max_waiting: int = 1024


DEFAULT = ServiceConfig()


class Service:
    """Use it in a `with` statement, or `start` and `stop` it."""

    def __init__(
        self,
        stepper: Stepper,
        text: Text,
        *,
        model: str = "",
        plans: Sequence[Plan] = (),
        capabilities: Sequence[Capability] = (),
        config: ServiceConfig = DEFAULT,
        observer: Observer | None = None,
        replace: Replace | None = None,
    ) -> None:
        self.text, self.model, self.plans = text, model, tuple(plans)
        if config.policy not in (AUTO, *stepper.policies):
            raise UnknownName("policy", config.policy, (AUTO, *stepper.policies))
        widths = tuple(width_of(plan) for plan in plans)
        self._engine = Engine(stepper, text.end, EngineConfig(config.max_waiting, widths), observer, replace)
        self._begun_s = time.monotonic()
        self._monitor: Monitor | None = None
        if config.policy != AUTO:
            self._switch(config.policy)
        elif len(stepper.policies) > 1:
            self._watch(tuple(capabilities) or capabilities_of(plans, stepper.shape.rows))
        self._thread = threading.Thread(target=self._engine.run, name="tessera-engine", daemon=True)

    def _watch(self, capabilities: Sequence[Capability]) -> None:
        if not capabilities:
            return
        self._monitor = Monitor(capabilities)
        if self._monitor.window_s < MIN_WINDOW_S:
            self._monitor = Monitor(capabilities, MonitorConfig(window_s=MIN_WINDOW_S))
        clock = lambda: time.monotonic() - self._begun_s  # noqa: E731
        self._engine.live = Live(self._monitor, Hands(self._switch), clock)

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop(GRACE_S if error is None else 0.0)

    def start(self) -> None:
        """From now on requests are answered."""
        self._thread.start()

    def stop(self, grace_s: float = GRACE_S) -> bool:
        """Refuses what comes, finishes what it has taken, but for no longer than this; True if it could."""
        self._engine.close(time.monotonic() + grace_s)
        if self._thread.ident is not None:
            # A step that runs is waited for: nobody can take it back.
            self._thread.join()
        if self._engine.live is not None:
            self._engine.live.__exit__(None, None, None)
        return not self._engine.was_cut

    @property
    def shape(self) -> Shape:
        """Of the stepper in use."""
        return self._engine.state.stepper.shape

    @property
    def failure(self) -> str:
        """Why nothing is served any more; empty: it is."""
        return self._engine.state.failure

    def answer(self, ask: Ask) -> Answer:
        """Takes an ask; its pieces and its finish come by iterating. Closing the answer cancels it."""
        self._check(ask)
        request = Request(ask, self.text.reader(), self.text.end)
        self._engine.submit(request)
        return Answer(request.outlet, lambda: self._engine.cancel(request))

    def _check(self, ask: Ask) -> None:
        shape = self.shape
        if not ask.prompt:
            raise AskError("there is nothing to read", "Send at least one token.", "prompt")
        if ask.max_tokens < 1:
            raise AskError(f"{ask.max_tokens} tokens are no answer", "Ask for at least 1.", "max_tokens")
        total = len(ask.prompt) + ask.max_tokens
        if total > shape.capacity:
            message = f"{len(ask.prompt)} tokens of prompt and {ask.max_tokens} of answer are {total}"
            remedy = f"This service has room for {shape.capacity}."
            raise AskError(message, remedy, "max_tokens" if len(ask.prompt) < shape.capacity else "prompt")
        if not 0 <= min(ask.prompt) <= max(ask.prompt) < shape.vocab_size:
            raise AskError("a token is not in the vocabulary", f"Use 0 to {shape.vocab_size - 1}.", "prompt")
        if "" in ask.stop:
            raise AskError("an empty stop string would end every answer", "Leave it out.", "stop")
        if not 0 <= ask.min_tokens <= ask.max_tokens:
            message = f"at least {ask.min_tokens} and at most {ask.max_tokens} tokens"
            raise AskError(message, "Use 0 up to max_tokens.", "min_tokens")
        check_sampling(ask.sampling)

    def _switch(self, name: str) -> None:
        """For the monitor: slots that are opened from now on follow this policy."""
        state = self._engine.state
        if name in state.stepper.policies:
            state.policy = state.stepper.policies.index(name)

    def snapshot(self) -> Snapshot:
        """What the service is doing now; from any thread."""
        state, meters = self._engine.state, self._engine.meters
        slots, shape = list(state.slots.values()), state.stepper.shape
        used = sum(slot.num_used for slot in slots)
        live = self._engine.live
        return Snapshot(
            model=self.model,
            policy=state.stepper.policies[state.policy],
            policies=state.stepper.policies,
            devices=self._devices(),
            links=tuple(meters.moved(self._bytes_per_s())),
            running=used,
            waiting=self._engine.num_waiting,
            rows_used=used,
            rows=shape.slots * shape.rows,
            prompt_tokens=meters.prompt_tokens,
            output_tokens=meters.output_tokens,
            tokens_per_s=meters.tokens_per_s,
            finished=dict(meters.finished),
            retried=meters.retried,
            decisions=() if live is None else tuple(live.decisions),
            decided={} if self._monitor is None else {k.value: n for k, n in self._monitor.counts.items()},
        )

    def _devices(self) -> tuple[DeviceView, ...]:
        busy, lost = self._engine.meters.busy(), frozenset(self._engine.state.lost)
        memory = {d.name: d.memory_bytes for plan in self.plans for d in plan.cluster.devices}
        names = list(dict.fromkeys((*memory, *busy, *sorted(lost))))
        return tuple(DeviceView(n, busy.get(n, 0.0), memory.get(n, 0), n in lost) for n in names)

    def _bytes_per_s(self) -> dict[tuple[str, str], float]:
        return {(x.src, x.dst): x.gbps * 1e9 for plan in self.plans for x in plan.cluster.links}
