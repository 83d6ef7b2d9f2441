"""Prometheus metrics: vLLM's names under `tessera:`, and those of heterogeneous devices."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tessera import __version__
from tessera.ir import DecisionKind
from tessera.ir.files import packaged
from tessera.serve.meters import Meters, Times
from tessera.serve.records import Finish, Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Name -> help text and vLLM's buckets, with finer ones below for small models.
HISTOGRAMS = packaged("serve", "histograms.json", dict[str, tuple[str, tuple[float, ...]]])
# vLLM's words.
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}

# (kind, name, help text, further labels, values by label)
Family = tuple[type[Gauge] | type[Counter], str, str, tuple[str, ...], Mapping[Any, float]]


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._sum = (*bounds, math.inf), 0.0
        self._counts = [0] * len(self._bounds)

    def add(self, values: Sequence[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += sum(values)

    def put(self, family: HistogramMetricFamily, *labels: str) -> None:
        names = (*map(str, map(float, self._bounds[:-1])), "+Inf")
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class Metrics(Meters):
    def __init__(self, model: str, snapshot: Callable[[], Snapshot]) -> None:
        super().__init__()
        self._model, self._snapshot = model, snapshot
        self.registry = CollectorRegistry(auto_describe=False)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._steps: dict[str, Histogram] = {}
        self.registry.register(self)

    def _observe(self, name: str, *values: float) -> None:
        self._histograms[name].add(values)

    def seated(self, queued_s: float) -> None:
        self._observe("request_queue_time_seconds", queued_s)

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        super().first_token(prompt_tokens, seconds)
        self._observe("time_to_first_token_seconds", seconds)

    def next_tokens(self, seconds: Sequence[float]) -> None:
        super().next_tokens(seconds)
        self._observe("inter_token_latency_seconds", *seconds)

    def stepped(self, kind: str, seconds: float) -> None:
        self._steps.setdefault(kind, Histogram(HISTOGRAMS["inter_token_latency_seconds"][1])).add((seconds,))

    def ended(self, finish: Finish, times: Times) -> None:
        """A request cancelled in the queue has only a total time."""
        super().ended(finish, times)
        self._observe("e2e_request_latency_seconds", times.whole_s)
        self._observe("request_prompt_tokens", finish.prompt_tokens)
        self._observe("request_generation_tokens", finish.output_tokens)
        if times.first_token_s is None:
            return
        decode_s = times.whole_s - times.first_token_s
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_prefill_time_seconds", times.first_token_s - (times.queued_s or 0.0))
        if finish.output_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode_s / (finish.output_tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for name, (text, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"tessera:{name}", text, labels=["model_name"])
            self._histograms[name].put(family, self._model)
            yield family
        labels, text = ["model_name", "kind"], "One step of a microbatch."
        steps = HistogramMetricFamily("tessera:step_seconds", text, labels=labels)
        for step, histogram in list(self._steps.items()):
            histogram.put(steps, self._model, step)
        yield steps
        for kind, name, text, more, values in _families(self._snapshot()):
            gauge = kind(f"tessera:{name}", text, labels=["model_name", *more])
            for words, value in values.items():
                gauge.add_metric([self._model, *words], value)
            yield gauge


def _families(now: Snapshot) -> list[Family]:
    used = now.pages_used / now.pages if now.pages else 0.0
    rate = now.expected.tokens_per_s if now.expected else 0.0
    switch_s = 1e-3 * (now.last_switch_ms or 0.0)
    devices = {(device.name,): device for device in now.devices}
    ends = ("source", "destination")
    reasons = {(word,): float(now.finished.get(reason, 0)) for reason, word in REASONS.items()}
    decided = {(kind.value,): float(now.decided.get(kind.value, 0)) for kind in DecisionKind}
    alone: list[tuple[type[Gauge] | type[Counter], str, str, float]] = [
        (Gauge, "num_requests_running", "Requests in a microbatch.", now.running),
        (Gauge, "num_requests_waiting", "Requests in the queue.", now.waiting),
        (Gauge, "kv_cache_usage_perc", "Pages in use; 1 means all.", used),
        (Gauge, "generation_tokens_per_s", "Over the last seconds.", now.tokens_per_s),
        (Gauge, "expected_tokens_per_s", "Modelled rate of the policy at full load.", rate),
        (Counter, "prompt_tokens", "Tokens of prompts read.", now.prompt_tokens),
        (Counter, "generation_tokens", "Tokens generated.", now.output_tokens),
        (Gauge, "num_pages_used", "Pages in use.", now.pages_used),
        (Counter, "prefix_cache_queries", "Tokens of started sequences.", now.prefix_queries),
        (Counter, "prefix_cache_hits", "Tokens found in cached pages.", now.prefix_hits),
        (Counter, "num_preemptions", "Sequences preempted because pages ran out.", now.preemptions),
        (Counter, "num_requests_retried", "Restarted after a lost device.", now.retried),
        (Counter, "plan_changes", "Changes of plans.", now.plan_changes),
        (Counter, "pages_moved", "Pages moved to another group.", now.pages_moved),
        (Counter, "evictions", "Sequences moved to another device in place of preemption.", now.evictions),
        (Counter, "policy_switches", "Changes of policy.", now.switches),
        (Gauge, "policy_switch_seconds", "Time of the last change of policy.", switch_s),
    ]
    return [
        *((kind, name, text, (), {(): value}) for kind, name, text, value in alone),
        (Counter, "request_success", "Answers by how they ended.", ("finished_reason",), reasons),
        (Gauge, "device_utilization_ratio", "Share of the last seconds with a launch.", ("device",),
            {key: device.utilisation for key, device in devices.items()}),
        (Gauge, "device_up", "0 if the device was lost.", ("device",),
            {key: not device.is_lost for key, device in devices.items()}),
        (Counter, "device_losses", "Losses of the device.", ("device",),
            {key: device.losses for key, device in devices.items()}),
        (Counter, "device_restarts", "Restarts of its worker.", ("device",),
            {key: device.restarts for key, device in devices.items()}),
        (Gauge, "link_utilization_ratio", "Share of the last seconds with a transfer.", ends,
            {(source, destination): share for source, destination, share, _ in now.links}),
        (Counter, "link_bytes", "Bytes moved.", ends,
            {(source, destination): num_bytes for source, destination, _, num_bytes in now.links}),
        (Gauge, "policy_in_force", "1 for the policy in force.", ("policy",),
            {(name,): name == now.policy for name in now.policies}),
        (Counter, "policy_decisions", "Decisions of the monitor.", ("kind",), decided),
        (Gauge, "build_info", "Always 1.", ("version",), {(__version__,): 1}),
    ]  # fmt: skip
