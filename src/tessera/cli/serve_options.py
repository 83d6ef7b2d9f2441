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
from tessera.cli.output import FILE, PER_TOKEN, TO_FIRST, excludes, info, limit_ms, needs, option
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
NEEDS_LOAD = needs("output_tokens")
POLICY_HELP = (
    "auto, single, data-parallel, prefill-decode, prefill-decode-fractional, attention-ffn, layer-pipeline, "
    "kernel-level or latency."
)
DEVICES_HELP = "Devices, such as cpu, emu:a100,emu:l40s, cuda:0,cpu or away:a100:2."
CONFIG_HELP = "YAML file with options by name, as `port: 8000`; options and TESSERA_SERVE_NAME come first."

DevicesOption = Annotated[
    str | None, info(DEVICES_HELP, shown="this machine's GPUs, its CPU if they cannot hold the model")
]
KeyOption = Annotated[str, info("Key of the server, or @FILE.", envvar="TESSERA_API_KEY")]
MaxModelLen = Annotated[
    int | None, info("Maximum tokens of prompt and answer.", shown="the model's limit", min=1)
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
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0 for a free one.", min=0, max=65535)
    api_key: list[str] | None = option(
        None,
        "API key, or @FILE with one per line; may be repeated.",
        shown="no key",
        envvar="TESSERA_API_KEY",
    )
    served_model_name: str | None = option(None, "Model name for clients.", shown="its own name")
    lora: list[str] | None = option(
        None, "A LoRA adapter (peft) that requests choose by `model`; may be repeated.",
        "--lora", "--lora-modules", metavar="NAME=FOLDER", callback=PLANNED,
    )  # fmt: skip
    microbatches: int | None = option(
        None, "Microbatches in flight.", shown="2; on one GPU 1", min=1, callback=PLANNED
    )
    seqs: int | None = option(
        None, "Sequences per microbatch.", "--seqs", "--max-num-seqs",
        shown="8; on GPUs 64", min=1, callback=PLANNED,
    )  # fmt: skip
    max_model_len: MaxModelLen = None
    max_batch_tokens: int | None = option(
        None, "Maximum tokens of one step.", "--max-batch-tokens", "--max-num-batched-tokens",
        shown="2048; on a CPU 128", min=1, callback=PLANNED,
    )  # fmt: skip
    memory_share: MemoryShareOption = MEMORY_SHARE
    memory: MemoryOption = None
    expert_frequencies: FrequenciesOption = None
    prefix_caching: bool = option(
        True, "Compute common prefixes of prompts once.",
        "--prefix-caching/--no-prefix-caching", "--enable-prefix-caching/--no-enable-prefix-caching",
    )  # fmt: skip
    plan: Path | None = option(
        None, "Serve by this plan for a load, of `tessera plan MODEL`.", "--plan", **FILE
    )
    prompt_tokens: int | None = option(
        None, "Mean prompt that the service is planned for, in tokens.",
        shown="128", min=1, callback=NEEDS_LOAD,
    )  # fmt: skip
    output_tokens: int | None = option(
        None, "Mean answer that the service is planned for, in tokens.", shown="64", min=1, callback=PLANNED
    )
    tpot_ms: float | None = limit_ms(PER_TOKEN, NEEDS_LOAD)
    ttft_ms: float | None = limit_ms(TO_FIRST, NEEDS_LOAD)
    plan_cache: bool = option(True, "Reuse plans of an earlier start of the same service.")
    random_weights: RandomWeights = False
    policy: str = option("auto", POLICY_HELP, callback=PLANNED)
    effort: EffortOption = "full"
    max_waiting: int = option(1024, "Maximum number of waiting requests.", min=1)
    max_requests: int = option(2048, "Maximum number of requests, waiting ones included.", min=1)
    max_body: int = option(4 * 2**20, "Maximum bytes of a request body.", min=1)
    drain: float = option(30.0, "Seconds to finish running requests at shutdown.", min=0, max=86_400)
    access_log: bool = option(False, "Log every answer on standard error.", "--access-log")
    log_json: bool = option(False, "Log in JSON, one object per line.", "--log-json")
    tls_cert: Path | None = option(
        None, "Certificate for HTTPS, a PEM file.", "--tls-cert", "--ssl-certfile", **FILE
    )
    tls_key: Path | None = option(None, "Its key, a PEM file.", "--tls-key", "--ssl-keyfile", **FILE)
    root_path: str = option("", "Path under which a proxy shows the server, as /llm.")
    forwarded_allow_ips: str = option(
        "", "Proxies whose X-Forwarded-For and -Proto are believed, as 10.0.0.1,10.1.0.0/16."
    )
    otlp_traces_endpoint: str = option(
        "", "Send OpenTelemetry traces there, as http://127.0.0.1:4318/v1/traces."
    )
    chat_template: str = option("", "Chat template: a jinja file, or its text.", shown="the checkpoint's")
    generation_config: Literal["auto", "none"] = option(
        "auto", "Sampling defaults: auto takes generation_config.json; none takes OpenAI's."
    )
    config: Path | None = option(None, CONFIG_HELP, is_eager=True, callback=_read_config, **FILE)

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
