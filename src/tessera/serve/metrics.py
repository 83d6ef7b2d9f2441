"""Metrics for Prometheus: vLLM's names under `tessera:`, and what only unlike devices have.

Gauges and counters are read from the service's snapshot when they are asked for, so that nothing is counted
twice. Histograms are fed by the engine, which sees every token.
Every series has the label model_name; the registry is the service's own, not the process's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tessera import __version__
from tessera.ir import DecisionKind
from tessera.serve.meters import Times
from tessera.serve.records import Finish, Snapshot, StepKind

CONTENT_TYPE = CONTENT_TYPE_LATEST
# vLLM's buckets, with finer ones below for small models.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
# vLLM's words for how an answer ended.
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class Metrics:
    """All series of one service."""

    def __init__(self, model: str, snapshot: Callable[[], Snapshot]) -> None:
        self._model, self._snapshot = model, snapshot
        self.registry = CollectorRegistry(auto_describe=False)

        def made(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            found = Histogram(
                f"tessera:{name}", text, ["model_name"], buckets=tuple(buckets), registry=self.registry
            )
            return found.labels(model)

        self._first_token = made(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S
        )
        self._between = made("inter_token_latency_seconds", "Between two tokens of one answer.", TOKEN_S)
        self._per_token = made(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of one answer.",
            TOKEN_S,
        )
        self._whole = made("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S)
        self._queue = made("request_queue_time_seconds", "Waiting for a row.", REQUEST_S)
        self._prefill = made("request_prefill_time_seconds", "From a row to the first token.", REQUEST_S)
        self._decode = made("request_decode_time_seconds", "From the first token to the last.", REQUEST_S)
        self._prompt = made("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._output = made("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._step = Histogram(
            "tessera:step_seconds",
            "One step of a microbatch.",
            ["model_name", "kind"],
            buckets=TOKEN_S,
            registry=self.registry,
        )
        self.registry.register(self)

    def seated(self, queued_s: float) -> None:
        """A request has a row now."""
        self._queue.observe(queued_s)

    def first_token(self, seconds: float) -> None:
        """Since the request arrived."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: Sequence[float]) -> None:
        """Since the token before, of every answer that a step went on with."""
        for one in seconds:
            self._between.observe(one)

    def stepped(self, kind: StepKind, seconds: float, rows: int) -> None:
        """A step ended."""
        self._step.labels(self._model, kind).observe(seconds)

    def finished(self, finish: Finish, times: Times) -> None:
        """A request has left; what was given up in the queue has no times but the whole."""
        self._whole.observe(times.whole_s)
        self._prompt.observe(finish.prompt_tokens)
        self._output.observe(finish.output_tokens)
        if times.first_token_s is None:
            return
        decode_s = times.whole_s - times.first_token_s
        self._decode.observe(decode_s)
        self._prefill.observe(times.first_token_s - (times.queued_s or 0.0))
        if finish.output_tokens > 1:
            self._per_token.observe(decode_s / (finish.output_tokens - 1))

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry: what the snapshot tells."""
        found = self._snapshot()
        yield from self._load(found)
        yield from self._devices(found)
        yield from self._policies(found)
        info = GaugeMetricFamily("tessera:build_info", "Always 1.", labels=["model_name", "version"])
        info.add_metric([self._model, __version__], 1)
        yield info

    def _load(self, found: Snapshot) -> Iterator[Metric]:
        used = found.rows_used / found.rows if found.rows else 0.0
        yield self._gauge("num_requests_running", "Requests with a row.", found.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", found.waiting)
        yield self._gauge("kv_cache_usage_perc", "Rows in use; 1 means all.", used)
        yield self._gauge("generation_tokens_per_s", "Over the last seconds.", found.tokens_per_s)
        yield self._counter("prompt_tokens", "Tokens of prompts read.", found.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", found.output_tokens)
        yield self._counter("num_requests_retried", "Begun again after a lost device.", found.retried)
        done = CounterMetricFamily(
            "tessera:request_success", "Answers by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, word in REASONS.items():
            done.add_metric([self._model, word], found.finished.get(reason, 0))
        yield done

    def _devices(self, found: Snapshot) -> Iterator[Metric]:
        labels = ["model_name", "device"]
        busy = GaugeMetricFamily(
            "tessera:device_utilization_ratio", "Share of the last seconds with a launch.", labels=labels
        )
        up = GaugeMetricFamily("tessera:device_up", "0 if the device was lost.", labels=labels)
        losses = CounterMetricFamily("tessera:device_losses", "How often the device was lost.", labels=labels)
        restarts = CounterMetricFamily(
            "tessera:device_restarts", "How often its worker was started again.", labels=labels
        )
        for device in found.devices:
            losses.add_metric([self._model, device.name], device.losses)
            restarts.add_metric([self._model, device.name], device.restarts)
            busy.add_metric([self._model, device.name], device.utilisation)
            up.add_metric([self._model, device.name], not device.is_lost)
        ends = ["model_name", "source", "destination"]
        wire = GaugeMetricFamily(
            "tessera:link_utilization_ratio", "Share of the last seconds with a transfer.", labels=ends
        )
        moved = CounterMetricFamily("tessera:link_bytes", "Bytes moved.", labels=ends)
        for source, destination, share, num_bytes in found.links:
            wire.add_metric([self._model, source, destination], share)
            moved.add_metric([self._model, source, destination], num_bytes)
        yield from (busy, up, losses, restarts, wire, moved)

    def _policies(self, found: Snapshot) -> Iterator[Metric]:
        force = GaugeMetricFamily(
            "tessera:policy_in_force", "1 for the policy in force.", labels=["model_name", "policy"]
        )
        for name in found.policies:
            force.add_metric([self._model, name], name == found.policy)
        yield force
        made = CounterMetricFamily(
            "tessera:policy_decisions", "Decisions of the monitor.", labels=["model_name", "kind"]
        )
        for kind in DecisionKind:
            made.add_metric([self._model, kind.value], found.decided.get(kind.value, 0))
        yield made
        yield self._counter("plan_changes", "How often other plans were taken up.", found.plan_changes)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        found = GaugeMetricFamily(f"tessera:{name}", text, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    def _counter(self, name: str, text: str, value: float) -> Metric:
        found = CounterMetricFamily(f"tessera:{name}", text, labels=["model_name"])
        found.add_metric([self._model], value)
        return found
