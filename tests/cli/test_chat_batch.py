"""`tessera chat` and `tessera batch`: streamed turns, OpenAI's batch format, a run after a kill."""

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import tessera
from commands import answer, call

SMALL = {"seqs": 4, "max_model_len": 256, "effort": "quick"}
KEY = "a-key-of-the-test"
NUM = 24


def request_line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny-llama", "prompt": f"request {number}", "max_tokens": 4, "temperature": 0}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body | more}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class SlowHandler(BaseHTTPRequestHandler):
    """Answers after a while, and counts what it was asked; every third time it is busy first."""

    asked: list[str]
    is_busy = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(0.1)
        kind = type(self)
        kind.is_busy = not kind.is_busy and len(kind.asked) % 3 == 0
        if kind.is_busy:
            self.send(503, {"error": {"message": "starting"}})
        else:
            kind.asked.append(body["prompt"])
            self.send(200, {"id": "cmpl-1", "usage": {"prompt_tokens": 2, "completion_tokens": None}})

    def send(self, status: int, document: dict[str, Any]) -> None:
        raw = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def slow() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    SlowHandler.asked = asked
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with tessera.serve("tiny-llama", devices="cpu", port=0, api_key=[KEY], **SMALL) as made:
        yield made.url


def test_batch_goes_on_after_a_kill(slow: tuple[str, list[str]], tmp_path: Path) -> None:
    """SIGKILL in the middle, a torn line, and a second run: every request has one answer."""
    url, asked = slow
    source, output = (
        write(tmp_path / "in.jsonl", [request_line(n) for n in range(NUM)]),
        tmp_path / "out.jsonl",
    )
    words = ("batch", source, output, "--target", url, "--at-once", "2")
    command = [sys.executable, "-m", "tessera", *map(str, words)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not output.exists() or output.read_bytes().count(b"\n") < 5):
        time.sleep(0.02)
    process.kill()
    process.wait(10)
    before = read(output)
    assert 5 <= len(before) < NUM
    with output.open("a") as torn:
        torn.write('{"id": "batch_req_1", "custom_id": "r2')
    asked.clear()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stderr
    lines = read(output)
    assert sorted(f"r{n}" for n in range(NUM)) == sorted(line["custom_id"] for line in lines)
    assert before == lines[: len(before)]
    assert NUM - len(before) == len(asked)
    said = json.loads(done.stdout)
    assert (NUM, len(before), 0) == (said["requests"], said["done_before"], said["failed"])


def test_batch_ends_when_it_is_interrupted(tmp_path: Path) -> None:
    """At once, however long the server takes to answer."""
    source = write(tmp_path / "in.jsonl", [request_line(n) for n in range(4)])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ("batch", source, tmp_path / "out.jsonl", "--target", url)
        process = subprocess.Popen([sys.executable, "-m", "tessera", *map(str, words)])
        with silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            assert 130 == process.wait(10)


def test_batch_ends_when_the_server_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [request_line(0)])
    url = "http://127.0.0.1:9"
    code, _, err = call("batch", source, tmp_path / "out.jsonl", "--target", url, capsys=capsys)
    assert 2 == code
    assert "cannot reach the server" in err
    assert "" == (tmp_path / "out.jsonl").read_text()


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


MODELS = whole(b'{"data": [{"id": "m"}]}')
CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n"
# Answers to /v1/models and to a request; what chat and batch say.
STRANGE = {
    "a page": (whole(b"<html>"), whole(b"<html>"), "not one of OpenAI's API", "not one of OpenAI's API"),
    "a list": (whole(b"[]"), whole(b"[]"), "not one of OpenAI's API", "not one of OpenAI's API"),
    "another protocol": (
        b"SSH-2.0\r\n",
        b"SSH-2.0\r\n",
        "cannot reach the server",
        "cannot reach the server",
    ),
    "an answer cut off": (MODELS, CUT + b"{", "the answer ended early", "the answer is cut off"),
    "an event cut off": (MODELS, CUT + b'data: {"a', "the answer is cut off", "the answer is cut off"),
}


def read_request(client: socket.socket) -> str:
    """First line of a request, which is read whole: a connection closed before that is reset."""
    with client.makefile("rb") as lines:
        first = lines.readline().decode()
        headers = dict(line.decode().lower().split(": ", 1) for line in iter(lines.readline, b"\r\n"))
        lines.read(int(headers.get("content-length", 0)))
    return first


@pytest.mark.parametrize("name", STRANGE)
def test_a_server_that_answers_strangely_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, answered, said, told = STRANGE[name]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    source = write(tmp_path / "in.jsonl", [request_line(0)])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            for _ in range(3 if models is MODELS else 2):
                with listening.accept()[0] as client:
                    client.sendall(models if "/v1/models" in read_request(client) else answered)

        thread = threading.Thread(target=work)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        chat_code, _, chat_err = call("chat", url, capsys=capsys)
        code, _, err = call("batch", source, tmp_path / "out.jsonl", "--target", url, capsys=capsys)
        thread.join()

    assert (2, 2) == (chat_code, code)
    assert said in chat_err
    assert told in err


def test_chat_takes_text_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no text come as halves of pairs."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi \udcff\n"))
    monkeypatch.setattr("tessera.cli.chat.ApiClient.model", lambda client: "m")
    code, _, err = call("chat", "http://127.0.0.1:9", capsys=capsys)

    assert 2 == code
    assert "standard input: the message is no UTF-8 text" in err


@pytest.mark.parametrize("text", ["a note without a newline", '{"custom_id": "r0"}\n', "[1]\n"])
def test_batch_changes_no_file_that_holds_no_answers(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", [request_line(0)]), tmp_path / "out.jsonl"
    output.write_text(text)
    code, _, err = call("batch", source, output, "--target", "http://127.0.0.1:9", capsys=capsys)
    assert (2, text) == (code, output.read_text())
    assert "the file holds other lines than answers" in err


@pytest.mark.parametrize(
    ("output", "message"), [("/dev/null", "not a regular file"), ("/nope/out.jsonl", "cannot write: No such")]
)
def test_batch_refuses_a_place_that_cannot_be_written(
    output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [request_line(0)])
    code, _, err = call("batch", source, output, "--target", "http://127.0.0.1:9", capsys=capsys)
    assert 2 == code
    assert f"{output}: {message}" in err


def test_batch_takes_the_address_of_a_server_without_its_scheme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [request_line(0)])
    _, _, err = call("batch", source, tmp_path / "out.jsonl", "--target", "127.0.0.1:9", capsys=capsys)
    assert "http://127.0.0.1:9: cannot reach the server" in err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([request_line(0), request_line(0)], "in.jsonl:2: custom_id 'r0' appears twice"),
        (
            [request_line(0) | {"url": "/v1/files"}],
            "in.jsonl:1: not a request of OpenAI's batch format: Invalid enum value '/v1/files' - at `$.url`",
        ),
        (
            [{"custom_id": "a"}],
            "in.jsonl:1: not a request of OpenAI's batch format: Object missing required field `url`",
        ),
        ([request_line(0) | {"custom_id": 5}], "Expected `str`, got `int` - at `$.custom_id`"),
        ([request_line(0, temperature=float("nan"))], "JSON is malformed: invalid character"),
        ([request_line(0, stream=True)], "a batch does not stream"),
        ([request_line(0), request_line(1, model="x")], "the requests name 2 models"),
        ([], "the file has no request"),
    ],
)
def test_batch_refuses_at_the_line(
    lines: list[dict[str, Any]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", lines)
    code, _, err = call("batch", source, tmp_path / "out.jsonl", capsys=capsys)
    assert 2 == code
    assert message in err


def test_batch_refuses_what_is_nested_too_deeply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"body": {"a": ' + "[" * 100_000)
    code, _, err = call("batch", source, tmp_path / "out.jsonl", capsys=capsys)
    assert 2 == code
    assert "maximum recursion depth exceeded" in err


def test_batch_of_a_server(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers and refusals of single requests are lines; the URL may have OpenAI's /v1."""
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": talk}
    lines = [request_line(0), chat, request_line(1, max_tokens=10_000)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    words = ("batch", source, output, "--target", f"{server}/v1", "--api-key", KEY)
    said = answer(*words, capsys=capsys)
    by_name = {line["custom_id"]: line["response"] for line in read(output)}
    assert (3, 1) == (said["requests"], said["failed"])
    assert [200, 200, 400] == [by_name[name]["status_code"] for name in ("r0", "c", "r1")]
    assert "assistant" == by_name["c"]["body"]["choices"][0]["message"]["role"]
    assert 3 == answer(*words, capsys=capsys)["done_before"]


def test_batch_serves_the_requests_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.jsonl", [request_line(n) for n in range(3)]), tmp_path / "out.jsonl"
    said = answer("batch", source, output, "--devices", "cpu", "--effort", "quick", capsys=capsys)
    assert (3, 0, 12) == (said["requests"], said["failed"], said["output_tokens"])


def test_chat_keeps_the_conversation(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand more\n/reset\nhello\n/exit\nnever\n"))
    options = ("--api-key", KEY, "--temperature", "0", "--max-tokens", "5")
    code, out, err = call("chat", server, *options, "--json", capsys=capsys)
    turns = [json.loads(line) for line in out.splitlines()]
    assert (0, 3) == (code, len(turns)), err
    assert turns[0] == turns[2]
    assert {"length"} == {turn["finish_reason"] for turn in turns}

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    code, out, _ = call("chat", server, *options, capsys=capsys)
    assert (0, turns[0]["content"] + "\n") == (code, out)


def test_chat_says_why(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TESSERA_API_KEY", raising=False)
    code, _, err = call("chat", server, capsys=capsys)
    assert 2 == code
    assert "This server needs a key" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 2000))
    code, _, err = call("chat", server, "--api-key", KEY, capsys=capsys)
    assert 2 == code
    assert "maximum context length is" in err
