"""Tessera from Python: answers as the service's, records that notebooks show, and refusals."""

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import tessera
from tessera.errors import TesseraError, UnknownName
from tessera.ir import ServicePlan, load

DEVICES = "emu:a100,emu:l40s"
SMALL = {"seqs": 4, "max_model_len": 256, "effort": "quick"}
# On both devices, without a choice among policies.
BOTH: dict[str, Any] = {"devices": DEVICES, "policy": "data-parallel", **SMALL}
GREEDY = tessera.SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = ["a", "Heterogeneous GPUs", "b" * 60]


@pytest.fixture(scope="module")
def llm() -> Iterator[tessera.LLM]:
    with tessera.LLM("tiny-llama", **BOTH) as made:
        yield made


@pytest.fixture(scope="module")
def found() -> tessera.ModelPlan:
    return tessera.plan("tiny-llama", "emu:a100", load=(64, 16), effort="quick")


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_llm_answers_as_the_service_does(llm: tessera.LLM) -> None:
    answers = llm.generate(PROMPTS, GREEDY)
    with tessera.serve("tiny-llama", port=0, **BOTH) as server:
        body = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0.0}
        served = post(f"{server.url}/v1/completions", body)
    assert [choice["text"] for choice in served["choices"]] == [answer.text for answer in answers]
    assert [8, 8, 8] == [answer.output_tokens for answer in answers]
    assert ["length"] * 3 == [answer.finish_reason for answer in answers]


def test_llm_takes_tokens_chats_and_keywords(llm: tessera.LLM) -> None:
    by_text = llm.generate("a", max_tokens=4, temperature=0.0)
    assert by_text[0].text == llm.generate([[256, 97]], max_tokens=4, temperature=0.0)[0].text
    talk = [{"role": "user", "content": "hello"}]
    one, two = llm.chat(talk, GREEDY), llm.chat([talk, talk], GREEDY)
    assert [one[0].text] * 2 == [answer.text for answer in two]


def test_llm_works_inside_an_event_loop(llm: tessera.LLM) -> None:
    async def cell() -> str:
        return llm.generate(["a"], GREEDY)[0].text

    assert llm.generate(["a"], GREEDY)[0].text == asyncio.run(cell())


def test_llm_refuses_in_one_line(llm: tessera.LLM) -> None:
    with pytest.raises(TesseraError, match="maximum context length is"):
        llm.generate(["a"], max_tokens=10_000)
    with pytest.raises(UnknownName, match=r"unknown sampling parameter 'maxtokens'; known: .*max_tokens"):
        llm.generate(["a"], maxtokens=4)
    with pytest.raises(TesseraError, match="sampling is given twice"):
        llm.generate(["a"], GREEDY, max_tokens=4)
    with pytest.raises(UnknownName, match=r"unknown option 'max_len'; known: .*max_model_len"):
        tessera.LLM("tiny-llama", max_len=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqs": 0}, r"--seqs.* greater than or equal to 1"),
        ({"seqs": 1.5}, r"--seqs.* valid integer"),
        ({"effort": "hard"}, r"--effort.* 'hard' is not one of 'full', 'quick'"),
        ({"tpot_ms": 5.0}, "--tpot-ms: needs --output-tokens"),
        ({"memory": "cpu"}, "--memory: it must be DEVICE=SIZE, got 'cpu'"),
        ({"plan": "/nope.plan"}, r"--plan.*'/nope.plan' does not exist"),
        ({"rendezvous": "127.0.0.1:1", "rank": 1}, "--rank: only rank 0 answers requests"),
    ],
)
def test_options_of_a_service_are_checked_as_on_the_command_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TesseraError, match=message):
        tessera.LLM("tiny-llama", devices="cpu", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load": 64}, r"load: must be a Load or \(prompt tokens, answer tokens\), got 64"),
        ({"load": (-1, 16)}, r"--prompt-tokens.* greater than or equal to 1"),
        ({"load": tessera.Load(64, 16, spread="odd")}, "unknown spread of lengths 'odd'; known: fixed"),
        ({"load": tessera.Load(64, 16, lengths=((0, 1),))}, "lengths: must be pairs of tokens"),
        ({"objective": "speed"}, "'speed' is not one of 'throughput'"),
        ({"launches": "odd"}, "'odd' is not one of 'compiled', 'eager'"),
    ],
)
def test_a_plan_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TesseraError, match=message):
        tessera.plan("tiny-llama", DEVICES, **arguments)


def test_a_plan_is_for_the_lengths_of_its_load() -> None:
    load = tessera.Load(64, 16, spread="geometric", lengths=((96, 24), (32, 8)))
    assert load == tessera.plan("tiny-llama", "emu:a100", load, effort="quick").planned.plan.load  # type: ignore[union-attr]


def test_options_that_a_simulation_does_not_use_are_refused(found: tessera.ModelPlan) -> None:
    with pytest.raises(TesseraError, match="--requests: a service plan without --arrivals runs at full load"):
        found.simulate(requests=3)
    with pytest.raises(TesseraError, match="--lengths: needs --arrivals"):
        found.simulate(lengths="uniform:32,8")


def test_wrong_prompts_are_refused_with_their_place(llm: tessera.LLM) -> None:
    with pytest.raises(TesseraError, match="prompts: must be a list, got NoneType"):
        llm.generate(None)  # type: ignore[arg-type]
    with pytest.raises(TesseraError, match=r"prompts: .* Put the tokens of one prompt into a list"):
        llm.generate([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TesseraError, match="params: must be SamplingParams, got dict"):
        llm.generate("a", {"max_tokens": 1})  # type: ignore[arg-type]
    with pytest.raises(TesseraError, match="cannot be written as JSON"):
        llm.generate("a", temperature=float("nan"))
    with pytest.raises(TesseraError, match="prompt 1 of 3: This model's maximum context length"):
        llm.generate(["a", "b" * 1000, "c"], max_tokens=2)


def test_a_closed_llm_says_so() -> None:
    with tessera.LLM("tiny-llama", devices="cpu", max_requests=2, **SMALL) as closed:
        assert 5 == len(closed.generate(["a"] * 5, max_tokens=1))
    with pytest.raises(TesseraError, match="this LLM is closed"):
        closed.generate("a")


# No `if __name__ == "__main__"`, and nothing is closed.
SCRIPT = f"""
import multiprocessing, tessera, torch
from tessera.compile import backend
llm = tessera.LLM("tiny-llama", devices="cpu", **{SMALL!r})
print(llm.generate(["a"], max_tokens=4, temperature=0.0)[0].output_tokens)
model = torch.nn.Linear(8, 8)
fn = torch.compile(model, backend=backend, options={{"devices": "emu:a100"}})
with torch.no_grad():
    print(torch.equal(fn(torch.ones(2, 8)), model(torch.ones(2, 8))))
print(*(p.pid for p in multiprocessing.active_children()))
"""


def test_a_script_ends_the_workers_of_an_llm_and_of_a_compiled_function(tmp_path: Path) -> None:
    """Workers do not import the script that started them, and end with it."""
    script = tmp_path / "batch.py"
    script.write_text(SCRIPT)
    with tessera.LLM("tiny-llama", devices="cpu", **SMALL):
        pass  # its plans are kept: the program needs no libraries that build models
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (0, ["4", "True"]) == (done.returncode, done.stdout.splitlines()[:2]), done.stderr
    assert "Traceback" not in done.stderr
    pids = done.stdout.splitlines()[2].split()
    assert 2 == len(pids)
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_plan_is_a_record(found: tessera.ModelPlan, tmp_path: Path) -> None:
    figures = found.figures
    assert figures.tokens_per_s > 0
    assert figures.policy in repr(found)
    assert "<pre" in found._repr_html_()
    assert figures.policy in found._repr_html_()
    path = found.save(tmp_path / "tiny.plan")
    assert load(ServicePlan, path) == found.planned.plan


def test_plan_simulates_and_explains(found: tessera.ModelPlan) -> None:
    played = found.simulate()
    assert played.ratio_to_plan == pytest.approx(1.0, rel=0.05)  # type: ignore[union-attr]
    assert "tokens" in played._repr_html_()
    assert found.explain().notes


def test_packages_are_still_packages() -> None:
    import tessera.plan as planning

    assert planning is sys.modules["tessera.plan"]
    assert planning.FULL is not planning.QUICK
    assert {"LLM", "SamplingParams", "plan", "serve", "capture", "CudaKernel"} <= set(dir(tessera))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tessera.nothing


def test_no_process_is_left(llm: tessera.LLM) -> None:
    before = len(multiprocessing.active_children())
    with tessera.LLM("tiny-llama", devices="cpu", **SMALL):
        assert len(multiprocessing.active_children()) > before
    assert before == len(multiprocessing.active_children())
