"""Options of a service, for the command line, configuration files and Python."""

import difflib
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tessera.cli.capture import RandomWeights
from tessera.cli.output import FILE, PER_TOKEN, TO_FIRST, excludes, limit_ms, needs, option
from tessera.cli.plan import LinkOption, MemoryOption
from tessera.cli.plan_model import EffortOption, FrequenciesOption, MemoryShareOption, frequencies_of
from tessera.cli.remote import MeetingOptions
from tessera.cli.run import TransportOption
from tessera.errors import TesseraError, by_name, check_known, extra_module
from tessera.ir import MEMORY_SHARE, Cluster, Load
from tessera.ir.files import packaged, read_text
from tessera.profile import cap_memory, parse_devices

if TYPE_CHECKING:
    from tessera.serve.limits import HttpLimits
    from tessera.serve.records import ServeSpec

# Weights may take this share of the GPUs before the CPU is taken in.
HELD_SHARE = 0.85
MIN_KEY_CHARS = 8
# Likeness of names from which one is suggested.
NEAR = 0.7
# vLLM's options without meaning here, and what does their work.
INSTEAD = packaged("cli", "instead.json", dict[str, str])

PLANNED = excludes("plan", "is in the plan")
NEEDS_LOAD: dict[str, Any] = {"min": 1e-3, "callback": needs("output_tokens")}
POLICY_HELP = (
    "auto, single, data-parallel, prefill-decode, prefill-decode-fractional, attention-ffn, layer-pipeline, "
    "kernel-level or latency."
)
DEVICES_HELP = "Devices, such as cpu, emu:a100,emu:l40s, cuda:0,cpu or away:a100:2."
CONFIG_HELP = "YAML file with options by name, as `port: 8000`; options and TESSERA_SERVE_NAME come first."

DevicesOption = Annotated[
    str | None, option(DEVICES_HELP, default="this machine's GPUs, its CPU if they cannot hold the model")
]
KeyOption = Annotated[str, option("Key of the server, or @FILE.", envvar="TESSERA_API_KEY")]
MaxModelLen = Annotated[
    int | None, option("Maximum tokens of prompt and answer.", default="the model's limit", min=1)
]


def _read_config(ctx: typer.Context, value: Path | None) -> Path | None:
    """Options and environment come before the file's values."""
    if value is not None:
        ctx.default_map = {**(ctx.default_map or {}), **config_values(value, ctx.command)}
    return value


@dataclass(frozen=True, kw_only=True)
class ServeConfig(MeetingOptions):
    """Options of a service; a default of None is chosen for model and devices."""

    devices: DevicesOption = None
    link: LinkOption = None
    transport: TransportOption = "auto"
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on; 0 for a free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        list[str] | None,
        option(
            "API key, or @FILE with one per line; may be repeated.",
            default="no key",
            envvar="TESSERA_API_KEY",
        ),
    ] = None
    served_model_name: Annotated[str | None, option("Model name for clients.", default="its own name")] = None
    lora: Annotated[
        list[str] | None,
        option(
            "A LoRA adapter (peft) that requests choose by `model`; may be repeated.",
            "--lora", "--lora-modules", metavar="NAME=FOLDER", callback=PLANNED,
        ),
    ] = None  # fmt: skip
    microbatches: Annotated[
        int | None, option("Microbatches in flight.", default="2; on one GPU 1", min=1, callback=PLANNED)
    ] = None
    seqs: Annotated[
        int | None,
        option(
            "Sequences per microbatch.",
            "--seqs", "--max-num-seqs", default="8; on GPUs 64", min=1, callback=PLANNED,
        ),
    ] = None  # fmt: skip
    max_model_len: MaxModelLen = None
    max_batch_tokens: Annotated[
        int | None,
        option(
            "Maximum tokens of one step.", "--max-batch-tokens", "--max-num-batched-tokens",
            default="2048; on a CPU 128", min=1, callback=PLANNED,
        ),
    ] = None  # fmt: skip
    memory_share: MemoryShareOption = MEMORY_SHARE
    memory: MemoryOption = None
    expert_frequencies: FrequenciesOption = None
    prefix_caching: Annotated[
        bool,
        option(
            "Compute common prefixes of prompts once.",
            "--prefix-caching/--no-prefix-caching", "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True  # fmt: skip
    plan: Annotated[
        Path | None,
        option("Serve by this plan for a load, of `tessera plan MODEL`.", "--plan", **FILE),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        option(
            "Mean prompt that the service is planned for, in tokens.",
            default="128", min=1, callback=needs("output_tokens"),
        ),
    ] = None  # fmt: skip
    output_tokens: Annotated[
        int | None,
        option(
            "Mean answer that the service is planned for, in tokens.", default="64", min=1, callback=PLANNED
        ),
    ] = None
    tpot_ms: Annotated[float | None, limit_ms(PER_TOKEN, **NEEDS_LOAD)] = None
    ttft_ms: Annotated[float | None, limit_ms(TO_FIRST, **NEEDS_LOAD)] = None
    plan_cache: Annotated[bool, option("Reuse plans of an earlier start of the same service.")] = True
    random_weights: RandomWeights = False
    policy: Annotated[str, option(POLICY_HELP, callback=PLANNED)] = "auto"
    effort: EffortOption = "full"
    max_waiting: Annotated[int, option("Maximum number of waiting requests.", min=1)] = 1024
    max_requests: Annotated[int, option("Maximum number of requests, waiting ones included.", min=1)] = 2048
    max_body: Annotated[int, option("Maximum bytes of a request body.", min=1)] = 4 * 2**20
    drain: Annotated[float, option("Seconds to finish running requests at shutdown.", min=0, max=86_400)] = (
        30.0
    )
    access_log: Annotated[bool, option("Log every answer on standard error.", "--access-log")] = False
    log_json: Annotated[bool, option("Log in JSON, one object per line.", "--log-json")] = False
    tls_cert: Annotated[
        Path | None, option("Certificate for HTTPS, a PEM file.", "--tls-cert", "--ssl-certfile", **FILE)
    ] = None
    tls_key: Annotated[Path | None, option("Its key, a PEM file.", "--tls-key", "--ssl-keyfile", **FILE)] = (
        None
    )
    root_path: Annotated[str, option("Path under which a proxy shows the server, as /llm.")] = ""
    forwarded_allow_ips: Annotated[
        str, option("Proxies whose X-Forwarded-For and -Proto are believed, as 10.0.0.1,10.1.0.0/16.")
    ] = ""
    otlp_traces_endpoint: Annotated[
        str, option("Send OpenTelemetry traces there, as http://127.0.0.1:4318/v1/traces.")
    ] = ""
    chat_template: Annotated[
        str, option("Chat template: a jinja file, or its text.", default="the checkpoint's")
    ] = ""
    generation_config: Annotated[
        Literal["auto", "none"],
        option("Sampling defaults: auto takes generation_config.json; none takes OpenAI's."),
    ] = "auto"
    config: Annotated[
        Path | None, option(CONFIG_HELP, "--config", is_eager=True, callback=_read_config, **FILE)
    ] = None

    def device_names(self, model: str) -> str:
        """By default this machine's GPUs, with its CPU if they cannot hold the model, or it."""
        import torch

        num = torch.cuda.device_count() if not self.devices and torch.cuda.is_available() else 0
        named = self.devices or ",".join(f"cuda:{n}" for n in range(num)) or "cpu"
        return named if num == 0 or self._holds(named, model) else f"{named},cpu"

    def _holds(self, gpus: str, model: str) -> bool:
        from tessera.capture import place_of
        from tessera.serve.single_device import is_single_device
        from tessera.serve.steps import weight_bytes

        caps = [word for word in self.memory or () if not word.startswith("cpu")]
        held = sum(device.memory_bytes for device in cap_memory(parse_devices(gpus), caps))
        return is_single_device(model) or weight_bytes(place_of(model)) <= HELD_SHARE * held

    @property
    def adapters(self) -> dict[str, str]:
        return by_name(map(_adapter, self.lora or ()), "--lora")

    @property
    def tls(self) -> tuple[str, str] | None:
        return (str(self.tls_cert), str(self.tls_key)) if self.tls_cert and self.tls_key else None

    def check(self) -> None:
        from tessera.execute.transport import NAMES
        from tessera.serve.policies import POLICIES
        from tessera.serve.records import AUTO
        from tessera.serve.server import check_tls

        if (self.tls_cert is None) != (self.tls_key is None):
            raise TesseraError("a certificate goes with its key", "Give both.", "--tls-cert, --tls-key")
        if self.tls:
            check_tls(*self.tls)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            message = f"--root-path must begin with / and not end with it, got {self.root_path!r}"
            raise TesseraError(message, "Write /llm.")
        check_known("transport", self.transport, NAMES, "--transport")
        check_known("policy", self.policy, (AUTO, *POLICIES), "--policy")
        read_keys(self.api_key or ())

    @property
    def limits(self) -> "HttpLimits":
        from tessera.serve.limits import HttpLimits

        return HttpLimits(body_bytes=self.max_body, requests=self.max_requests, drain_s=self.drain)

    def spec(self, cluster: Cluster) -> "ServeSpec":
        from tessera.serve.records import ServeSpec, sizes_for

        usual, frequencies = sizes_for(cluster), sorted(frequencies_of(self.expert_frequencies).items())
        spec = ServeSpec(
            self.microbatches or usual[0],
            self.seqs or usual[1],
            self.max_model_len,
            self.max_batch_tokens,
            memory_share=self.memory_share,
            policies=(self.policy,),
            random_weights=self.random_weights,
            effort=self.effort,
            adapters=tuple(self.adapters.items()),
            expert_frequencies=tuple((module, tuple(often)) for module, often in frequencies),
        )
        if not (self.prompt_tokens and self.output_tokens):
            return spec
        load = Load(self.prompt_tokens, self.output_tokens, tpot_ms=self.tpot_ms, ttft_ms=self.ttft_ms)
        is_free = self.microbatches is self.seqs is self.max_batch_tokens is None
        return replace(spec, load=load, is_for_load=is_free)


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not (Path(folder) / "adapter_config.json").is_file():
        message = f"it must be NAME=FOLDER with an adapter_config.json in FOLDER, got '{text}'"
        raise TesseraError(message, "Name a folder that peft has saved.", "--lora")
    return name, str(Path(folder).resolve())


def read_keys(words: Iterable[str]) -> tuple[str, ...]:
    """Keys, or with @FILE one per line."""
    keys: list[str] = []
    for word in words:
        keys += keys_of_file(Path(word[1:])) if word.startswith("@") else [word]
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            message = f"a key needs {MIN_KEY_CHARS} or more printable ASCII characters without blanks"
            raise TesseraError(message, "Make one: openssl rand -hex 24.", "--api-key")
    return tuple(dict.fromkeys(keys))


def keys_of_file(path: Path) -> list[str]:
    lines = [line.strip() for line in read_text(path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise TesseraError("the file holds no key", "Write one key per line.", str(path))
    return keys


def key_of(word: str) -> str:
    """A client's key; of @FILE the first."""
    return keys_of_file(Path(word[1:]))[0] if word.startswith("@") else word


def template_of(text: str) -> str:
    return text if not text or "{" in text else read_text(text)


def config_values(path: Path, command: Any) -> dict[str, Any]:
    """Names are those of options, with - or _."""
    yaml = extra_module("yaml", "serve", "pyyaml")
    try:
        loader = yaml.SafeLoader(read_text(path))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode | None):
            raise TesseraError("not a mapping of options", "Write lines such as `port: 8000`.", str(path))
        lines = [
            (key.start_mark.line + 1, str(loader.construct_object(key)), loader.construct_object(value, True))
            for key, value in (node.value if node else ())
        ]
    except yaml.YAMLError as error:
        message = f"cannot read the configuration: {' '.join(str(error).split())}"
        raise TesseraError(message, "Write YAML.", str(path)) from None
    options = {name: p for p in command.params for name in (*p.opts, p.name) if p.name != "config"}
    values: dict[str, Any] = {}
    for line, key, value in lines:
        word, place = key.replace("_", "-"), f"{path}:{line}"
        option = options.get(f"--{word}") or options.get(word.replace("-", "_"))
        if option is None:
            names = [name for name in options if name.startswith("--")]
            raise TesseraError(unknown_option(f"--{word}", names), place=place)
        if option.name in values:
            raise TesseraError(f"'{key}' is given twice", "Leave one of them.", place)
        is_one = option.multiple and value is not None and not isinstance(value, list)
        values[option.name] = [value] if is_one else value
    return values


def unknown_option(name: str, names: Iterable[str]) -> str:
    if name in INSTEAD:
        return f"'{name}' is not an option here. {INSTEAD[name].rstrip('.')}"
    return f"unknown option '{name}'; {hint(name, sorted(names), NEAR)}"


def hint(name: str, names: Sequence[str], likeness: float = 0.6) -> str:
    near = difflib.get_close_matches(name, names, 1, likeness)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"


def log_line(message: str, level: str = "info", **more: Any) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    document = {"time": now, "level": level, "message": message, **more}
    print(json.dumps(document, ensure_ascii=False), file=sys.stderr, flush=True)


class JsonLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        more: dict[str, Any] = {"logger": record.name}
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            names = ("client", "method", "path", "http_version", "status")
            more |= dict(zip(names, record.args, strict=False))
        if record.exc_info:
            more["exception"] = "".join(traceback.format_exception(*record.exc_info))
        log_line(record.getMessage(), record.levelname.lower(), **more)


@contextmanager
def logging_by(config: ServeConfig) -> Iterator[None]:
    """uvicorn has no handlers by default."""
    handler: logging.Handler = JsonLog() if config.log_json else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    names = (["uvicorn.access"] if config.access_log else []) + (["tessera"] if config.log_json else [])
    before = {log: (log.level, log.propagate) for log in map(logging.getLogger, names)}
    for log in before:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        yield
    finally:
        for log, (level, log.propagate) in before.items():
            log.removeHandler(handler)
            log.setLevel(level)
