"""A GPU that cannot hold the model, and its host: workers of both kinds, and answers as `generate` gives."""

import asyncio
import copy
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from measured_factory import FakeTimer
from packed_factory import generated, write_folder
from serving_factory import GREEDY, read, wait_for
from tessera import flow
from tessera.capture.divide import experts_of
from tessera.cli.start import lines_of
from tessera.errors import PlanInfeasible
from tessera.ir import BufferKind, Load, Trace, units
from tessera.plan.host import host_placements
from tessera.plan.problem import build
from tessera.planning import read_frequencies
from tessera.profile import cap_memory, parse_devices, wire
from tessera.serve.app import state_document
from tessera.serve.planning import Prepared, prepare
from tessera.serve.policies import ServicePlanner
from tessera.serve.records import Ask, ServeSpec
from tessera.serve.service import Service
from tessera.serve.steps import served
from tessera.serve.text import ByteText

MODEL, CARD, HOST = "tiny-gpt-oss", "emu:l40s", "cpu"
# The host computes about as quickly as the link fetches: each has a part.
GBPS, LAUNCH_US = 0.5, 20.0
SPEC = ServeSpec(microbatches=1, rows=4, capacity=96, max_batch_tokens=16, effort="quick")


def host_us(trace: Trace, launch: int) -> float:
    """By the weights' bytes, whatever machine this is."""
    read = {access.buffer for access in trace.launches[launch].accesses}
    weights = read.intersection(trace.buffers_of(BufferKind.WEIGHT))
    return LAUNCH_US + sum(trace.buffers[buffer].size_bytes for buffer in weights) / (GBPS * 1e3)


def prepared(model: str, memory: str, folder: Path) -> Prepared:
    """Its host's launches are not timed on this machine's CPU, now or earlier."""
    cluster = wire(cap_memory(parse_devices(f"{CARD},{HOST}"), [f"{CARD}={memory}"]))
    links = tuple(replace(link, fetch_gbps=GBPS) for link in cluster.links)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "make_timer", lambda trace, device: FakeTimer(partial(host_us, trace), mhz=None))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return prepare(model, replace(cluster, links=links), SPEC)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared(MODEL, "2.5MB", tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    rng = random.Random(7)
    prompts = [tuple(rng.randrange(256) for _ in range(rng.randrange(3, 40))) for _ in range(6)]
    return [Ask(prompt, 20, GREEDY, ignores_end=True) for prompt in prompts]


@pytest.fixture(scope="module")
def wanted(asks: list[Ask]) -> list[list[int]]:
    """What Hugging Face generates."""
    module: Any = served(MODEL, ServeSpec(rows=4, capacity=96, joined=False)).workloads[-1].module
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(module.config), attn_implementation="eager", dtype=torch.float32
    )
    model.load_state_dict(module.state_dict())
    found = []
    for ask in asks:
        prompt = torch.tensor([ask.prompt])
        given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": ask.max_tokens}
        out: Any = model.eval().generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **given)
        found.append(out[0, len(ask.prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def service(made: Prepared) -> Iterator[Service]:
    shape = made.model.shape
    with (
        made.workers() as stepper,
        Service(stepper, made.policies, shape, ByteText(), planner=made.planner) as running,
    ):
        yield running


def test_experts_are_on_both_devices_within_memory(made: Prepared) -> None:
    plan = made.policies[0].plans[0]
    assert made.policies[0].policy == "kernel-level"
    placed = plan.lanes[0].placement.devices[-1]
    assert {0, 1} == {placed[launch] for launch in experts_of(plan.graphs[-1].trace)}
    _, expected, larger = lines_of(made)
    assert "tokens/s" in expected
    assert "cannot hold all weights" in larger
    size_of = {buffer.name: buffer.size_bytes for buffer in plan.graphs[-1].trace.buffers}
    fetched = sum(size_of[name] for name, _ in plan.lanes[0].placement.fetched)
    assert 0 < fetched
    assert f"{units.size(fetched)} are fetched in every step" in larger


def test_a_small_host_has_what_the_gpu_cannot_hold_and_refusals_name_launches(made: Prepared) -> None:
    plan = made.policies[0].plans[0]

    def placed(size: int) -> set[int]:
        card, host = plan.cluster.devices
        cluster = replace(plan.cluster, devices=(card, replace(host, memory_bytes=size)))
        costs = tuple(replace(each, devices=cluster.devices) for each in plan.costs)
        return set(host_placements(build(plan.unit, costs, cluster), 1)[0].devices[-1])

    weights = sum(b.size_bytes for b in plan.graphs[-1].trace.buffers if b.kind is BufferKind.WEIGHT)
    assert {0, 1} == placed(round(0.8 * weights))
    with pytest.raises(PlanInfeasible, match=r"cpu would hold .* and has .* tessera.grouped_part"):
        placed(weights // 4)


def test_answers_are_those_of_generate_and_both_devices_work(
    service: Service, asks: list[Ask], wanted: list[list[int]]
) -> None:
    async def crowd() -> list[list[int]]:
        return [told.numbers for told in await asyncio.gather(*(read(service, ask) for ask in asks))]

    assert wanted == wait_for(crowd())
    busy = {device.name: device.utilisation for device in service.snapshot().devices}
    assert all(busy[name] > 0 for name in (CARD, HOST))


def test_state_tells_how_often_experts_are_chosen(service: Service, tmp_path: Path) -> None:
    """The answer of /v1/state is a file for --expert-frequencies."""
    wait_for(read(service, Ask((1, 2, 3), 8, GREEDY, ignores_end=True)))
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state_document(service.snapshot())))
    frequencies = read_frequencies(path)
    assert {"model.layers.0.mlp.experts"} <= frequencies.keys()
    assert all(len(rows) == 8 and sum(rows) > 0 for rows in frequencies.values())


@pytest.mark.parametrize("killed", [CARD, HOST])
def test_a_killed_worker_costs_no_request(
    service: Service, asks: list[Ask], wanted: list[list[int]], killed: str
) -> None:
    async def crowd() -> list[list[int]]:
        before = service.snapshot().output_tokens
        answers = asyncio.gather(*(read(service, ask) for ask in asks))
        while service.snapshot().output_tokens < before + 10:
            await asyncio.sleep(0.002)
        pid = next(device.pid for device in service.snapshot().devices if device.name == killed)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return [told.numbers for told in await answers]

    assert wanted == wait_for(crowd())


def test_another_load_keeps_the_placement_of_a_full_gpu(
    made: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = made.planner
    assert planner is not None
    monkeypatch.delattr(ServicePlanner, "plans")
    learned = planner.learned(made.policies, Load(8, 80))
    assert [policy.load for policy in learned] == [Load(8, 80)] * len(made.policies)


def test_packed_experts_are_on_both_devices_and_answer_as_dequantised(
    asks: list[Ask], tmp_path: Path
) -> None:
    model = write_folder(tmp_path, "mxfp4", "gpt_oss", intermediate=512, layers=1)
    made = prepared(str(tmp_path), "0.4MB", tmp_path)
    plan = made.policies[0].plans[0]
    placed = plan.lanes[0].placement.devices[-1]
    assert {0, 1} == {placed[launch] for launch in experts_of(plan.graphs[-1].trace)}
    with made.workers() as stepper, Service(stepper, made.policies, made.model.shape, ByteText()) as running:
        found = [wait_for(read(running, ask)).numbers for ask in asks[:2]]
        told = running.snapshot()
    assert [generated(model, list(ask.prompt), ask.max_tokens) for ask in asks[:2]] == found
    assert all(device.utilisation > 0 for device in told.devices)
    assert told.experts
