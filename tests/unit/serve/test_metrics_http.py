"""Metrics: the page that Prometheus reads."""

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from http_factory import MODEL, Scripted, running  # noqa: E402
from tessera.serve.meters import Times  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.records import Finish  # noqa: E402


def samples(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> values of its labels but the model's, sorted by their names -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels: dict[str, Any] = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found.setdefault(sample.name, {})[tuple(labels[name] for name in sorted(labels))] = sample.value
    return found


def test_snapshot_becomes_gauges_and_counters() -> None:
    """What the service is doing is told under vLLM's names."""
    found = samples(Metrics(MODEL, Scripted(running=2).snapshot))

    assert found["tessera:num_requests_running"] == {(): 2}
    assert found["tessera:num_requests_waiting"] == {(): 3}
    assert found["tessera:kv_cache_usage_perc"] == {(): 0.25}
    assert found["tessera:generation_tokens_total"] == {(): 17}
    expected = {("stop",): 2, ("length",): 0, ("abort",): 1, ("error",): 0}
    assert found["tessera:request_success_total"] == expected


def test_devices_links_and_policies_have_series() -> None:
    """Unlike devices show how busy each is, what moves between them, and who decides."""
    found = samples(Metrics(MODEL, Scripted().snapshot))

    assert found["tessera:device_utilization_ratio"] == {("emu:a100",): 0.75, ("emu:l40s",): 0.25}
    assert found["tessera:link_bytes_total"] == {("emu:l40s", "emu:a100"): 12345}
    assert found["tessera:policy_in_force"] == {("throughput",): 1, ("latency",): 0}
    assert found["tessera:policy_decisions_total"][("switch",)] == 1


def test_engine_feeds_the_histograms() -> None:
    """Every observation of the engine is counted once, in the right series."""
    metrics = Metrics(MODEL, Scripted().snapshot)
    metrics.seated(0.2)
    metrics.first_token(10, 0.5)
    metrics.next_tokens([0.1, 0.3])
    metrics.stepped("decode", 0.05)
    metrics.stepped("encode", 0.25)
    metrics.ended(Finish("length", 10, 3), Times(0.2, 0.5, 0.9))
    found = samples(metrics)

    sums = {
        "time_to_first_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.4,
        "request_queue_time_seconds": 0.2,
        "request_prefill_time_seconds": 0.3,
        "request_decode_time_seconds": 0.4,
        "request_time_per_output_token_seconds": 0.2,
        "e2e_request_latency_seconds": 0.9,
        "request_prompt_tokens": 10,
        "request_generation_tokens": 3,
    }
    for name, value in sums.items():
        assert found[f"tessera:{name}_sum"][()] == pytest.approx(value), name
    assert found["tessera:inter_token_latency_seconds_count"] == {(): 2}
    assert found["tessera:step_seconds_count"] == {("decode",): 1, ("encode",): 1}
    assert 1 == metrics.render().count(b"# TYPE tessera:step_seconds histogram")
    buckets = {key: value for key, value in found["tessera:step_seconds_bucket"].items() if "encode" in key}
    assert [0.0, 1.0] == sorted(set(buckets.values()))


def test_metrics_are_served_in_prometheus_format() -> None:
    """GET /metrics parses, with Prometheus's content type."""
    with running(Scripted()) as server:
        answer = httpx.get(f"{server.url}/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert list(text_string_to_metric_families(answer.text))
