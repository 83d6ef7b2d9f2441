"""Every policy on worker processes behind a socket: Hugging Face's answers, also where workers are killed.

One service has all policies and is switched among them.
"""

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")

from http_factory import serving, wait_until  # noqa: E402
from sampling import examples  # noqa: E402
from tessera.ir import Load  # noqa: E402
from tessera.profile import parse_devices, wire  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.read import Endpoint, ModelCard  # noqa: E402
from tessera.serve.planning import prepare  # noqa: E402
from tessera.serve.policies import POLICIES, SPLITS  # noqa: E402
from tessera.serve.records import ServeSpec  # noqa: E402
from tessera.serve.service import Service  # noqa: E402
from tessera.serve.steps import served  # noqa: E402
from tessera.serve.text import ByteText  # noqa: E402

MODEL, DEVICES = "tiny-llama", ("emu:a100", "emu:l40s")
SPEC = ServeSpec(2, 4, 64, 32, load=Load(24, 24), policies=POLICIES, effort="quick")
NUM, TOKENS = examples(16, 10), examples(24, 12)
LIMIT_S = 60.0
# Kills of the default run; the others are slow tests.
KILLS = (
    ("prefill-decode", 0),
    ("prefill-decode", 1),
    ("prefill-decode-fractional", 1),
    ("layer-pipeline", 0),
)


@dataclass(frozen=True)
class Served:
    service: Service
    client: Any

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/v1/state").raise_for_status().json()
        return found

    def use(self, policy: str) -> None:
        self.service.switch(policy)
        wait_until(lambda: self.state()["policy"] == policy)

    def answer(self, number: int) -> list[list[int]]:
        """Bytes of the tokens of one greedy answer."""
        body = {
            "model": MODEL,
            "messages": messages(number),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
        }
        found = self.client.post("/v1/chat/completions", json=body)
        found.raise_for_status()
        return [token["bytes"] for token in found.json()["choices"][0]["logprobs"]["content"]]

    def answers(self) -> list[list[list[int]]]:
        """All at once."""
        with ThreadPoolExecutor(NUM) as pool:
            return list(pool.map(self.answer, range(NUM)))


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "xyz"[: number % 4] + chr(65 + number)}]


@pytest.fixture(scope="module")
def generated() -> list[list[list[int]]]:
    """What Hugging Face generates, alone."""
    module: Any = served(MODEL, ServeSpec(rows=4, capacity=64, joined=False)).workloads[-1].module
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(module.config), attn_implementation="eager", dtype=torch.float32
    )
    model.load_state_dict(module.state_dict())
    text, found = ByteText(), []
    for number in range(NUM):
        prompt = torch.tensor([text.chat(messages(number))])
        out = model.eval().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append([list(text.token_bytes(int(token))) for token in out[0, prompt.shape[1] :]])
    return found


@pytest.fixture(scope="module")
def http() -> Iterator[Served]:
    """All policies in one pair of workers; none is chosen by a monitor."""
    made = prepare(MODEL, wire(parse_devices(",".join(DEVICES)), ["pcie4"]), SPEC)
    shape, text = made.model.shape, ByteText()
    with (
        made.workers() as stepper,
        Service(
            stepper, made.policies, shape, text, model=MODEL, policy=POLICIES[0], log=lambda line: None
        ) as service,
        serving(
            Endpoint(ModelCard(MODEL, text, shape.max_tokens, shape.vocab_size), service, 1_700_000_000),
            Metrics(MODEL, service.snapshot),
        ) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=32)) as client,
    ):
        yield Served(service, client)


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_hugging_faces_generate(
    http: Served, generated: list[list[list[int]]], policy: str
) -> None:
    http.use(policy)
    before = http.state()["pages_moved"]

    assert generated[0] == http.answer(0)
    assert generated == http.answers()
    state = http.state()
    assert (policy in SPLITS) == (state["pages_moved"] > before)
    assert policy == state["policy"]
    assert state["groups"]


@pytest.mark.parametrize(
    ("policy", "device"),
    [
        pytest.param(name, d, marks=[] if (name, d) in KILLS else [pytest.mark.slow])
        for name in POLICIES
        for d in range(len(DEVICES))
    ],
)
def test_a_killed_worker_changes_no_answer(
    http: Served, generated: list[list[list[int]]], policy: str, device: int
) -> None:
    http.use(policy)
    before = http.state()
    worker = before["devices"][device]

    def kill() -> None:
        meters, until_s = http.service.snapshot, time.monotonic() + LIMIT_S
        while meters().output_tokens < before["output_tokens"] + 20 and time.monotonic() < until_s:
            time.sleep(0.002)
        os.kill(worker["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = http.answers()
    killer.join()

    assert generated == found

    def is_back() -> bool:
        devices = http.state()["devices"]
        restarts = devices[device]["restarts"]
        return restarts > worker["restarts"] and all(d["state"] == "ready" for d in devices)

    wait_until(is_back, LIMIT_S)
