"""Options of a service, for the command line, configuration files and Python.

`ServeConfig` has a field for every option of `tessera serve`; the commands that start a service of their own
(chat, batch) and `tessera.api` make the same record.
"""

import difflib
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tessera.cli.capture import RandomWeights
from tessera.cli.output import PER_TOKEN, TO_FIRST, excludes, finite, limit_ms, needs
from tessera.cli.plan import LINK_HELP, EffortOption, FrequenciesOption, MemoryOption
from tessera.cli.remote import Meeting, OnRay, Rank, Rendezvous, SecretFile, UnderTorchrun
from tessera.cli.run import TransportOption
from tessera.errors import TesseraError, extra_module
from tessera.ir import MEMORY_SHARE

if TYPE_CHECKING:
    from tessera.ir import Cluster
    from tessera.serve.records import ServeSpec
    from tessera.serve.start import ServeOptions

# Share of the GPUs' memory that weights may take before the CPU is taken in.
HELD_SHARE = 0.85
# Likeness of names from which one is suggested.
NEAR = 0.7
# vLLM's options that have no meaning here, and what does their work.
INSTEAD = json.loads(files("tessera.cli").joinpath("instead.json").read_bytes())

DevicesOption = Annotated[
    str | None,
    typer.Option(
        help="Devices, such as cpu, emu:a100,emu:l40s, cuda:0,cpu or away:a100:2.",
        show_default="this machine's GPUs, its CPU if they cannot hold the model",
    ),
]
LinkOption = Annotated[list[str] | None, typer.Option(help=LINK_HELP, show_default="pcie4")]
HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="API key, or @FILE with one per line; may be repeated.",
        show_default="no key",
        envvar="TESSERA_API_KEY",
    ),
]
NameOption = Annotated[str | None, typer.Option(help="Model name for clients.", show_default="its own name")]
# Callback of an option that a plan decides.
PLANNED = excludes("plan", "is in the plan")
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(min=1, callback=PLANNED, help="Microbatches in flight.", show_default="2; on one GPU 1"),
]
SeqsOption = Annotated[
    int | None,
    typer.Option(
        "--seqs",
        "--max-num-seqs",
        min=1,
        callback=PLANNED,
        help="Sequences per microbatch.",
        show_default="8; on GPUs 64",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens of prompt and answer.", show_default="the model's limit"),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        "--max-batch-tokens",
        "--max-num-batched-tokens",
        min=1,
        callback=PLANNED,
        help="Maximum tokens of one step.",
        show_default="2048; on a CPU 128",
    ),
]
MemoryShare = Annotated[
    float,
    typer.Option(
        "--memory-share",
        "--gpu-memory-utilization",
        min=0.01,
        max=1,
        callback=finite,
        help="Share of GPU memory for weights and pages, 0.01 to 1.",
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Compute common prefixes of prompts once.",
    ),
]
PlanCache = Annotated[bool, typer.Option(help="Reuse plans of an earlier start of the same service.")]
POLICY_HELP = (
    "auto, single, data-parallel, prefill-decode, prefill-decode-fractional, attention-ffn, layer-pipeline, "
    "kernel-level or latency."
)
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        exists=True,
        dir_okay=False,
        is_eager=True,
        help="Serve by this plan for a load, of `tessera plan MODEL`.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        "--lora-modules",
        metavar="NAME=FOLDER",
        callback=PLANNED,
        help="A LoRA adapter (peft) that requests choose by `model`; may be repeated.",
    ),
]
PolicyOption = Annotated[str, typer.Option(callback=PLANNED, help=POLICY_HELP)]
OutputTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        is_eager=True,
        help="Mean answer that the service is planned for, in tokens.",
        show_default="64",
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=needs("output_tokens"),
        help="Mean prompt that the service is planned for, in tokens.",
        show_default="128",
    ),
]
NEEDS_LOAD: dict[str, Any] = {"min": 1e-3, "callback": needs("output_tokens")}
TpotMs = Annotated[float | None, limit_ms(PER_TOKEN, **NEEDS_LOAD)]
TtftMs = Annotated[float | None, limit_ms(TO_FIRST, **NEEDS_LOAD)]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Maximum number of waiting requests.")]
MaxRequests = Annotated[int, typer.Option(min=1, help="Maximum number of requests, waiting ones included.")]
MaxBody = Annotated[int, typer.Option(min=1, help="Maximum bytes of a request body.")]
DrainOption = Annotated[
    float,
    typer.Option(min=0, max=86_400, callback=finite, help="Seconds to finish running requests at shutdown."),
]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Log every answer on standard error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log in JSON, one object per line.")]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", "--ssl-certfile", exists=True, dir_okay=False, help="Certificate for HTTPS, a PEM file."
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", "--ssl-keyfile", exists=True, dir_okay=False, help="Its key, a PEM file."),
]
RootPath = Annotated[str, typer.Option(help="Path under which a proxy shows the server, as /llm.")]
ForwardedAllowIps = Annotated[
    str,
    typer.Option(help="Proxies whose X-Forwarded-For and -Proto are believed, as 10.0.0.1,10.1.0.0/16."),
]
OtlpEndpoint = Annotated[
    str, typer.Option(help="Send OpenTelemetry traces there, as http://127.0.0.1:4318/v1/traces.")
]
ChatTemplateOption = Annotated[
    str, typer.Option(help="Chat template: a jinja file, or its text.", show_default="the checkpoint's")
]
GenerationConfig = Annotated[
    Literal["auto", "none"],
    typer.Option(help="Sampling defaults: auto takes generation_config.json; none takes OpenAI's."),
]


def _read_config(ctx: typer.Context, value: Path | None) -> Path | None:
    """The file's values become defaults; options and environment come first."""
    if value is not None:
        ctx.default_map = {**(ctx.default_map or {}), **config_values(value, ctx.command)}
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=_read_config,
        help="YAML file with options by name, as `port: 8000`; options and TESSERA_SERVE_NAME come first.",
    ),
]


@dataclass(frozen=True)
class ServeConfig:
    """Options of a service; a default of None is chosen for model and devices."""

    devices: DevicesOption = None
    link: LinkOption = None
    transport: TransportOption = "auto"
    rendezvous: Rendezvous = None
    rank: Rank = 0
    secret_file: SecretFile = None
    torchrun: UnderTorchrun = False
    ray: OnRay = None
    host: HostOption = "127.0.0.1"
    port: PortOption = 8000
    api_key: KeyOption = None
    served_model_name: NameOption = None
    lora: LoraOption = None
    microbatches: MicrobatchesOption = None
    seqs: SeqsOption = None
    max_model_len: MaxModelLen = None
    max_batch_tokens: MaxBatchTokens = None
    memory_share: MemoryShare = MEMORY_SHARE
    memory: MemoryOption = None
    expert_frequencies: FrequenciesOption = None
    prefix_caching: PrefixCaching = True
    plan: PlanOption = None
    prompt_tokens: PromptTokens = None
    output_tokens: OutputTokens = None
    tpot_ms: TpotMs = None
    ttft_ms: TtftMs = None
    plan_cache: PlanCache = True
    random_weights: RandomWeights = False
    policy: PolicyOption = "auto"
    effort: EffortOption = "full"
    max_waiting: MaxWaiting = 1024
    max_requests: MaxRequests = 2048
    max_body: MaxBody = 4 * 2**20
    drain: DrainOption = 30.0
    access_log: AccessLog = False
    log_json: LogJson = False
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    root_path: RootPath = ""
    forwarded_allow_ips: ForwardedAllowIps = ""
    otlp_traces_endpoint: OtlpEndpoint = ""
    chat_template: ChatTemplateOption = ""
    generation_config: GenerationConfig = "auto"
    config: ConfigOption = None

    @property
    def meeting(self) -> Meeting | None:
        if not self.rendezvous and not self.torchrun:
            return None
        return Meeting.of(self.rendezvous, self.rank, self.secret_file, self.torchrun)

    def device_names(self, model: str) -> str:
        """The devices; by default this machine's GPUs, with its CPU if they cannot hold the model, or it."""
        import torch

        num = torch.cuda.device_count() if not self.devices and torch.cuda.is_available() else 0
        named = self.devices or ",".join(f"cuda:{n}" for n in range(num)) or "cpu"
        return named if num == 0 or self._holds(named, model) else f"{named},cpu"

    def _holds(self, gpus: str, model: str) -> bool:
        from tessera.capture import place_of
        from tessera.profile import cap_memory, parse_devices
        from tessera.serve.start import is_single_device
        from tessera.serve.steps import weight_bytes

        caps = [word for word in self.memory or () if not word.startswith("cpu")]
        held = sum(device.memory_bytes for device in cap_memory(parse_devices(gpus), caps))
        return is_single_device(model) or weight_bytes(place_of(model)) <= HELD_SHARE * held

    @property
    def tls(self) -> tuple[str, str] | None:
        """Files of certificate and key."""
        return (str(self.tls_cert), str(self.tls_key)) if self.tls_cert and self.tls_key else None

    def check(self) -> None:
        """Refuse what can be refused before anything takes long."""
        from tessera.execute.transport import check_name
        from tessera.serve.limits import read_keys
        from tessera.serve.policies import check_policy
        from tessera.serve.server import check_tls

        if (self.tls_cert is None) != (self.tls_key is None):
            raise TesseraError("a certificate goes with its key", "Give both.", "--tls-cert, --tls-key")
        if self.tls:
            check_tls(*self.tls)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            message = f"--root-path must begin with / and not end with it, got {self.root_path!r}"
            raise TesseraError(message, "Write /llm.")
        check_name(self.transport)
        check_policy(self.policy)
        read_keys(self.api_key or ())
        _adapters(self.lora or [])

    def options(self, cluster: "Cluster") -> "ServeOptions":
        from tessera.ir import ServicePlan, load
        from tessera.serve.limits import HttpLimits, read_keys
        from tessera.serve.planning import default_folder
        from tessera.serve.server import is_loopback
        from tessera.serve.service import say
        from tessera.serve.start import ServeOptions

        return ServeOptions(
            name=self.served_model_name or "",
            spec=self._spec(cluster),
            transport=self.transport,
            max_waiting=self.max_waiting,
            prefix_caching=self.prefix_caching,
            keys=read_keys(self.api_key or ()),
            is_local=is_loopback(self.host),
            limits=HttpLimits(body_bytes=self.max_body, requests=self.max_requests, drain_s=self.drain),
            kept=default_folder() if self.plan_cache else None,
            plan=load(ServicePlan, self.plan) if self.plan else None,
            root_path=self.root_path,
            chat_template=_template(self.chat_template),
            has_sampling_defaults=self.generation_config == "auto",
            log=log_line if self.log_json else say,
            traces=self.otlp_traces_endpoint,
        )

    def _spec(self, cluster: "Cluster") -> "ServeSpec":
        from tessera.ir import Load
        from tessera.serve.policies import check_policy
        from tessera.serve.records import ServeSpec, sizes_for

        usual = sizes_for(cluster)
        spec = ServeSpec(
            self.microbatches or usual[0],
            self.seqs or usual[1],
            self.max_model_len,
            self.max_batch_tokens,
            memory_share=self.memory_share,
            policies=(check_policy(self.policy),),
            random_weights=self.random_weights,
            effort=self.effort,
            adapters=_adapters(self.lora or []),
            expert_frequencies=_frequencies(self.expert_frequencies),
        )
        if not (self.prompt_tokens and self.output_tokens):
            return spec
        load = Load(self.prompt_tokens, self.output_tokens, tpot_ms=self.tpot_ms, ttft_ms=self.ttft_ms)
        is_free = self.microbatches is self.seqs is self.max_batch_tokens is None
        return replace(spec, load=load, is_for_load=is_free)


def _frequencies(path: Path | None) -> tuple[tuple[str, tuple[float, ...]], ...]:
    if path is None:
        return ()
    from tessera.planning import read_frequencies

    return tuple((module, tuple(often)) for module, often in sorted(read_frequencies(path).items()))


def _adapters(given: list[str]) -> tuple[tuple[str, str], ...]:
    adapters: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not (Path(folder) / "adapter_config.json").is_file():
            message = f"--lora must be NAME=FOLDER with an adapter_config.json in FOLDER, got {text!r}"
            raise TesseraError(message, "Name a folder that peft has saved.")
        if name in adapters:
            raise TesseraError(f"--lora has the name {name!r} twice", "Give every adapter its own name.")
        adapters[name] = str(Path(folder).resolve())
    return tuple(adapters.items())


def _template(given: str) -> str:
    """The text of a chat template, given as a file or as text."""
    if not given or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(f"cannot read the chat template: {error}", place=given) from None


def config_values(path: Path, command: Any) -> dict[str, Any]:
    """Values of a YAML file by parameter; names are those of options, with - or _."""
    yaml = extra_module("yaml", "serve", "pyyaml")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TesseraError(f"cannot read the configuration: {error}", place=str(path)) from None
    if not isinstance(given, dict):
        raise TesseraError("not a mapping of options", "Write lines such as `port: 8000`.", str(path))
    options = {name: p.name for p in command.params for name in (*p.opts, p.name) if p.name != "config"}
    found = {}
    for key, value in given.items():
        word = str(key).replace("_", "-")
        name = options.get(f"--{word}") or options.get(word.replace("-", "_"))
        if name is None:
            known = [option for option in options if option.startswith("--")]
            raise TesseraError(unknown_option(f"--{word}", known), place=str(path))
        found[name] = value
    return found


def unknown_option(name: str, known: Iterable[str]) -> str:
    """What to write in place of an unknown option."""
    if name in INSTEAD:
        return f"'{name}' is not an option here. {INSTEAD[name].rstrip('.')}"
    listed = sorted(known)
    near = difflib.get_close_matches(name, listed, 1, NEAR)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(listed)}"
    return f"unknown option '{name}'; {hint}"


def log_line(message: str, level: str = "info", **more: Any) -> None:
    """One JSON object on standard error."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    document = {"time": now, "level": level, "message": message, **more}
    print(json.dumps(document, ensure_ascii=False), file=sys.stderr, flush=True)


class JsonLog(logging.Handler):
    """Log records as JSON lines; of uvicorn's access log the parts too."""

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
    """Handlers of the access log and of errors; uvicorn's have none by default."""
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
