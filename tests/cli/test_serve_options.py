"""Options of `tessera serve`: files and environment, vLLM's names, TLS, proxies, logs and traces."""

import asyncio
import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import typer

import tessera
from commands import call, used
from tessera.cli import app
from tessera.cli.serve_options import INSTEAD
from tessera.errors import TesseraError

SMALL = {"seqs": 4, "max_model_len": 256, "effort": "quick"}
KEY = "a-key-of-the-test"
COMMANDS: Any = typer.main.get_command(app)


def parsed(*words: str) -> dict[str, Any]:
    """The values that `tessera serve` would run with."""
    settings = {"auto_envvar_prefix": "TESSERA_SERVE"}
    values = dict(COMMANDS.commands["serve"].make_context("serve", list(words), **settings).params)
    values.pop("config")
    return values


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    more = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*words.split(), *more], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def server(certificate: tuple[Path, Path]) -> Iterator[str]:
    """Over HTTPS, under a path, behind a proxy."""
    cert, key = certificate
    options = {"tls_cert": cert, "tls_key": key, "root_path": "/llm", "forwarded_allow_ips": "127.0.0.1"}
    with tessera.serve("tiny-llama", devices="cpu", port=0, api_key=[KEY], **SMALL, **options) as made:
        yield made.url


def get(url: str, certificate: Path, **headers: str) -> tuple[int, str]:
    trusted = ssl.create_default_context(cafile=str(certificate))
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=30, context=trusted
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_https_answers(server: str, certificate: tuple[Path, Path]) -> None:
    assert server.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    body = json.dumps({"prompt": "a", "max_tokens": 4, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{server}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30, context=trusted) as answer:
        assert 4 == json.load(answer)["usage"]["completion_tokens"]
    with pytest.raises(OSError, match=r"timed out|reset|closed|invalid|RemoteDisconnected|EOF"):
        urllib.request.urlopen(f"{server.replace('https', 'http')}/health", timeout=5)


def test_root_path_is_stripped_or_not(server: str, certificate: tuple[Path, Path]) -> None:
    """A proxy may pass the prefix on; open paths need no key either way, others do."""
    cert = certificate[0]
    for prefix in ("", "/llm"):
        assert 200 == get(f"{server}{prefix}/health", cert)[0]
        assert 401 == get(f"{server}{prefix}/v1/models", cert)[0]
        assert 200 == get(f"{server}{prefix}/v1/models", cert, Authorization=f"Bearer {KEY}")[0]
        status, page = get(f"{server}{prefix}/", cert)
        assert 200 == status
        assert '"/v1/' not in page


def test_config_file_equals_the_options(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: tiny-llama\ndevices: emu:a100,emu:l40s\nport: 9000\napi-key: [aaaaaaaa, bbbbbbbb]\n"
        "gpu_memory_utilization: 0.8\nprefix-caching: false\nmax-num-seqs: 16\nlog_json: true\ndrain: 5\n"
    )
    words = "tiny-llama --devices emu:a100,emu:l40s --port 9000 --api-key aaaaaaaa --api-key bbbbbbbb "
    words += "--memory-share 0.8 --no-prefix-caching --seqs 16 --log-json --drain 5"
    assert parsed(*words.split()) == parsed("--config", str(path))
    assert 9001 == parsed("--config", str(path), "--port", "9001")["port"]


def test_one_value_of_an_option_that_may_be_repeated_needs_no_list(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("link: pcie5\napi-key: aaaaaaaa\n")
    values = parsed("tiny-llama", "--config", str(path))
    assert (["pcie5"], ["aaaaaaaa"]) == (values["link"], values["api_key"])


def test_environment_comes_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 9000\nseqs: 4\n")
    monkeypatch.setenv("TESSERA_SERVE_PORT", "9001")
    monkeypatch.setenv("TESSERA_API_KEY", "cccccccc")
    values = parsed("tiny-llama", "--config", str(path))
    assert (9001, 4, ["cccccccc"]) == (values["port"], values["seqs"], values["api_key"])
    assert 9002 == parsed("tiny-llama", "--port", "9002")["port"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown option '--prot'; did you mean --port?"),
        ("tensor_parallel_size: 2", "Name the devices, and the planner divides the model"),
        ("- 1", "not a mapping of options"),
        ("port: 1\nhost: x\nport: 3\n", "serve.yaml:3: 'port' is given twice. Leave one of them."),
        ("max-model-len: 64\nmax_model_len: 32\n", "serve.yaml:2: 'max_model_len' is given twice"),
        ("a: [", "cannot read the configuration: while parsing a flow node expected"),
        ("port: many", "Invalid value for '--port'"),
    ],
)
def test_config_file_is_checked(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    code, _, err = call("serve", "tiny-llama", "--config", path, capsys=capsys)
    assert 2 == code
    assert message in err


@pytest.mark.parametrize("how", ["--config", "TESSERA_SERVE_CONFIG", "Python"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpot_ms: 5", "--tpot-ms: needs --output-tokens"),
        ("plan: PLAN\nmicrobatches: 3", "--microbatches: is in the plan"),
        ("plan: PLAN\noutput_tokens: 3", "--output-tokens: is in the plan"),
    ],
)
def test_conditions_between_options_hold_in_config_files(
    how: str,
    text: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text.replace("PLAN", str(path)))
    if how == "Python":
        with pytest.raises(TesseraError, match=message):
            tessera.serve("tiny-llama", config=path)
        return
    if how == "TESSERA_SERVE_CONFIG":
        monkeypatch.setenv(how, str(path))
    code, _, err = call(
        "serve", "tiny-llama", *(["--config", path] if how == "--config" else []), capsys=capsys
    )
    assert 2 == code
    assert message in err


def test_values_of_a_config_file_count_as_given(tmp_path: Path) -> None:
    """A limit from the file and the answers that it needs from the command line, or the other way round."""
    path = tmp_path / "serve.yaml"
    path.write_text("tpot_ms: 5\n")
    with pytest.raises(TesseraError, match="unknown kind of device 'none'"):
        tessera.serve("tiny-llama", "none", config=path, output_tokens=3)
    path.write_text("output_tokens: 3\n")
    with pytest.raises(TesseraError, match="unknown kind of device 'none'"):
        tessera.serve("tiny-llama", "none", config=path, tpot_ms=5)


def test_vllm_names_mean_the_same() -> None:
    theirs = "--max-num-seqs 4 --max-num-batched-tokens 64 --gpu-memory-utilization 0.5 --max-model-len 99"
    ours = "--seqs 4 --max-batch-tokens 64 --memory-share 0.5 --max-model-len 99"
    more = (" --no-enable-prefix-caching --served-model-name x", " --no-prefix-caching --served-model-name x")
    pair = [parsed("m", *(words + one).split()) for words, one in zip((theirs, ours), more, strict=True)]
    assert pair[0] == pair[1]


@pytest.mark.parametrize("option", [name for name in INSTEAD if name.startswith("--")])
def test_other_options_of_vllm_are_answered(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call("serve", "tiny-llama", option, "2", capsys=capsys)
    assert 2 == code
    assert INSTEAD[option].rstrip(".") in err


def test_an_adapter_has_a_name_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of two models of one name could not be asked."""
    (tmp_path / "adapter_config.json").write_text("{}")
    words = ["--devices", "cpu", "--port", "0", "--lora", f"tiny-llama={tmp_path}"]

    code, _, said = call("serve", "tiny-llama", *words, capsys=capsys)
    assert (2, True) == (code, "the model's own name 'tiny-llama'" in said)


def test_adapters_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TesseraError, match="--lora: 'x' is given twice"):
        tessera.serve("tiny-llama", devices="cpu", port=0, lora=[f"x={tmp_path}", f"x={tmp_path}"])
    with pytest.raises(TesseraError, match=r"--lora: it must be NAME=FOLDER with an adapter_config\.json"):
        tessera.serve("tiny-llama", devices="cpu", port=0, lora=["x=/nowhere"])


def test_near_names_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        ("serve", "m", "--prot", "1"): "unknown option '--prot'; did you mean --port?",
        ("plan", "m", "--device", "emu:a100"): "unknown option '--device'; did you mean --devices?",
        ("serv",): "unknown command 'serv'; did you mean serve?",
    }.items():
        assert message in call(*words, capsys=capsys)[2]


def test_wrong_certificates_are_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "x.pem").write_text("not a certificate")
    with pytest.raises(TesseraError, match="cannot use the certificate"):
        tessera.serve("tiny-llama", devices="cpu", port=0, tls_cert=tmp_path / "x.pem", tls_key=key)
    with pytest.raises(TesseraError, match="a certificate goes with its key"):
        tessera.serve("tiny-llama", devices="cpu", port=0, tls_cert=cert)
    with pytest.raises(TesseraError, match="--root-path must begin with /"):
        tessera.serve("tiny-llama", devices="cpu", port=0, root_path="llm/")


def test_logs_are_json() -> None:
    """The access log and the service's own lines."""

    def use(said: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{said['url']}/health", headers={"X-Forwarded-For": "9.9.9.9"})
        urllib.request.urlopen(request, timeout=30).close()

    words = ("serve", "tiny-llama", "--devices", "cpu", "--port", 0, "--effort", "quick", "--seqs", 2)
    more = ("--log-json", "--access-log", "--forwarded-allow-ips", "127.0.0.1", "--json")
    _, err = used(use, *words, *more)
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    access = next(line for line in lines if line.get("logger") == "uvicorn.access")
    assert ("GET", "/health", 200) == (access["method"], access["path"], access["status"])
    assert access["client"].startswith("9.9.9.9")
    assert {"time", "level", "message"} <= access.keys()


def test_traces_have_a_span_per_request() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra 'otel'")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tessera.serve.tracing import TraceMiddleware

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    async def send(event: Any) -> None:
        pass

    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    scope = {"type": "http", "method": "POST", "headers": [(b"traceparent", parent)]}
    middleware = TraceMiddleware(inner, provider.get_tracer("test"), "tiny-llama")
    for path in ("/llm/v1/chat/completions", "/health"):
        asyncio.run(middleware(scope | {"path": path}, send, send))  # type: ignore[arg-type]
    (span,) = exporter.get_finished_spans()
    assert "POST /v1/chat/completions" == span.name
    assert 0x0AF7651916CD43DD8448EB211C80319C == span.context.trace_id
    attributes = dict(span.attributes or {})
    assert 200 == attributes["http.response.status_code"]
    assert "tiny-llama" == attributes["gen_ai.request.model"]
    assert ["first byte"] == [event.name for event in span.events]


def test_traces_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI

    from tessera.serve.tracing import add_traces

    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with ExitStack() as stack, pytest.raises(TesseraError, match=r'pip install "tessera-gpu\[otel\]"'):
        add_traces(FastAPI(), "m", "http://127.0.0.1:4318/v1/traces", stack)
