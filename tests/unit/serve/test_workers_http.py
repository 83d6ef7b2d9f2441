"""A service on worker processes behind a real socket, whose workers are all killed."""

import os
import signal
import time
from typing import Any

import httpx

from http_factory import listening
from tessera.cli.serve_options import ServeConfig
from tessera.cli.start import started
from tessera.profile import parse_devices, wire

# Within so long it answers again.
LIMIT_S = 30.0
ASK = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_a_service_whose_workers_are_all_killed_answers_again() -> None:
    """Also where the first replacement is killed while it starts: the same tokens, and both devices there."""
    cluster = wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"])
    config = ServeConfig(
        microbatches=2, seqs=2, max_model_len=48, max_batch_tokens=16, effort="quick", plan_cache=False
    )
    with (
        started("tiny-llama", cluster, config) as ready,
        listening(ready.app) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT_S) as client,
    ):
        before = answer(client)
        _wait_until_ready(client)
        pids = {d["pid"] for d in devices(client)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os.kill(_replacement(client, pids), signal.SIGKILL)
        killed_s = time.monotonic()

        assert before == answer(client)
        assert time.monotonic() - killed_s < LIMIT_S
        _wait_until_ready(client)
        assert time.monotonic() - killed_s < LIMIT_S
        assert ["emu:a100", "emu:l40s"] == [d["name"] for d in devices(client)]
        assert all(d["restarts"] >= 1 and d["pid"] not in pids for d in devices(client))


def answer(client: httpx.Client) -> Any:
    """The text of one completion."""
    found = client.post("/v1/completions", json={"model": "tiny-llama", **ASK})
    found.raise_for_status()
    return found.json()["choices"][0]["text"]


def devices(client: httpx.Client) -> list[dict[str, Any]]:
    """As the state shows them."""
    found: list[dict[str, Any]] = client.get("/v1/state").raise_for_status().json()["devices"]
    return found


def _wait_until_ready(client: httpx.Client) -> None:
    """The state is looked at now and then; it is what it was at the last look."""
    until_s = time.monotonic() + LIMIT_S
    while any(d["state"] != "ready" or not d["pid"] for d in devices(client)):
        assert time.monotonic() < until_s, "a device did not come back"
        time.sleep(0.05)


def _replacement(client: httpx.Client, old: set[int]) -> int:
    """The process of the first new worker, as soon as there is one."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        new = [d["pid"] for d in devices(client) if d["pid"] and d["pid"] not in old]
        if new:
            return int(new[0])
    raise AssertionError("no worker was started again")
