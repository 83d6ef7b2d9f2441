"""`tessera serve`: one command from a model to an endpoint, and how it refuses."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs openai")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from tessera.cli import _main  # noqa: E402

DEVICES = "emu:a100,emu:l40s"
# Seconds to the first answer where nothing is kept: twice what a machine takes that does nothing else.
MAX_START_S = 35.0
COMMAND = (sys.executable, "-m", "tessera", "serve")


@dataclass
class Started:
    """A server in a process of its own."""

    process: "subprocess.Popen[str]"
    said: dict[str, Any]
    # CPU seconds of the process and its workers, until it said where it listens.
    cpu_s: float

    @property
    def url(self) -> str:
        return str(self.said["url"])


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and those that it started."""
    tick = os.sysconf("SC_CLK_TCK")
    total, waiting = 0.0, [pid]
    while waiting:
        number = waiting.pop()
        words = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, words[11:15])) / tick
        for task in Path(f"/proc/{number}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
    return total


@pytest.fixture(scope="module")
def server() -> Iterator[Started]:
    words = (
        "tiny-llama",
        "--devices",
        DEVICES,
        "--port",
        "0",
        "--seqs",
        "4",
        "--max-model-len",
        "256",
        "--effort",
        "quick",
        "--json",
    )
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    yield Started(process, said, cpu_s(process.pid))
    if process.poll() is None:
        process.terminate()
    process.wait(30)


def test_first_line_says_where_it_is(server: Started) -> None:
    """With --json one line has the address, the devices, the policies and the sizes."""
    assert server.said["model"] == "tiny-llama"
    assert server.said["devices"] == DEVICES.split(",")
    assert server.said["policy"] in server.said["policies"]
    assert (server.said["microbatches"], server.said["seqs"], server.said["max_model_len"]) == (2, 4, 256)


def test_it_starts_soon(server: Started) -> None:
    """From the command to its first line it takes no longer than promised, or computes no longer."""
    assert min(server.said["seconds"], server.cpu_s) < MAX_START_S


def test_it_answers_curl(server: Started) -> None:
    """A plain request from the shell is answered."""
    body = '{"model": "tiny-llama", "prompt": "hello", "max_tokens": 5}'
    words = [
        "curl",
        "-sS",
        f"{server.url}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        pytest.skip("needs curl")

    assert json.loads(answer)["usage"]["completion_tokens"] <= 5


def test_official_client_streams(server: Started) -> None:
    """OpenAI's client streams from the command's server, in pieces."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny-llama",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=12,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )

    assert chunks[-1].choices[0].finish_reason == "length"
    assert len(chunks) > 3


def test_official_client_gets_a_form_and_a_call(server: Started) -> None:
    """From two devices: an answer that follows its schema, and a tool that is called with its arguments."""
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "now"}}]
    options: dict[str, Any] = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hi"}]}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        said = client.chat.completions.create(**options, response_format=form).choices[0]
        called = client.chat.completions.create(**options, tools=tools, tool_choice="required").choices[0]

    trip = json.loads(said.message.content or "")
    assert (trip.keys(), said.finish_reason) == ({"city", "days"}, "stop")
    assert len(trip["city"]) <= 9
    assert trip["days"] in (1, 2, 3)
    calls = called.message.tool_calls or []
    assert {("now", "{}")} == {(call.function.name, call.function.arguments) for call in calls}


def test_metrics_and_plan_tell_of_both_devices(server: Started) -> None:
    """/metrics parses, and /v1/plan says what each device runs in each step."""
    families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
    busy = [f for f in families if f.name == "tessera:device_utilization_ratio"]
    assert {s.labels["device"] for s in busy[0].samples} == set(DEVICES.split(","))
    plan = httpx.get(f"{server.url}/v1/plan", timeout=60).json()
    assert [p["policy"] for p in plan["plans"]] == server.said["policies"]
    steps = plan["plans"][0]["groups"][0]["steps"]
    assert [step["step"] for step in steps] == ["tokens-4", "tokens-32", "tokens-128"]
    assert all(sum(step["launches"].values()) > 0 for step in steps)


def test_sigterm_ends_in_good_order(server: Started) -> None:
    """Told to stop it ends with 0, and the port is free again."""
    server.process.send_signal(signal.SIGTERM)

    assert server.process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that is refused."""
    assert _main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    return line


def test_unknown_model_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no model is answered with those that are."""
    assert "known: " in (line := complaint(capsys, "tiny-lama", "--port", "0"))
    assert "tiny-llama" in line


def test_port_in_use_is_said_before_anything_slow(capsys: pytest.CaptureFixture[str]) -> None:
    """Another program's port is refused at once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = complaint(capsys, "tiny-llama", "--port", str(taken.getsockname()[1]))

    assert "the port is in use" in line


def test_missing_extra_names_the_line_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra the command says how to get it."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)

    assert 'pip install "tessera-gpu[serve]"' in complaint(capsys, "tiny-llama")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--seqs", "0"), "Invalid value for '--seqs'"),
        (("--max-batch-tokens", "0"), "Invalid value for '--max-batch-tokens'"),
        (("--memory-share", "1.5"), "Invalid value for '--memory-share'"),
        (("--policy", "fastest"), "unknown policy 'fastest'; known: attention-ffn, auto"),
        (("--plan", __file__, "--seqs", "4"), "--seqs: is in the plan"),
        (
            ("--output-tokens", "9", "--plan", __file__),
            "--output-tokens: is in the plan",
        ),
        (("--api-key", "short"), "--api-key: a key needs"),
        (("--devices", "emu:nothing"), "nothing"),
        (("--drain", "-1"), "--drain"),
        (("--host", "no.such.host.invalid"), "there is no such address"),
    ],
)
def test_wrong_options_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str], expected: str
) -> None:
    """Each mistake is told with its option or its value."""
    assert expected in complaint(capsys, "tiny-llama", "--port", "0", *words)


def test_open_address_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Listening to the world without a key is allowed, and said."""
    assert _main(["serve", "no-model", "--host", "0.0.0.0", "--port", "0"]) == 2

    assert "warning: everyone who reaches 0.0.0.0" in capsys.readouterr().err
