"""tessera serve: an OpenAI-compatible endpoint for a model."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from tessera.cli.capture import RandomWeights
from tessera.cli.output import HIDDEN, Record, excludes, finite, needs, progress
from tessera.cli.plan import LINK_HELP, EffortOption, MemoryShareOption
from tessera.cli.remote import Meeting, OnRay, Rank, Rendezvous, SecretFile, UnderTorchrun, gathered, work
from tessera.cli.run import TransportOption
from tessera.errors import MissingExtra, TesseraError
from tessera.ir import MEMORY_SHARE

if TYPE_CHECKING:
    from tessera.execute.worker_stepper import MakeHub
    from tessera.ir import Cluster, Device
    from tessera.serve.limits import HttpLimits
    from tessera.serve.records import ServeSpec
    from tessera.serve.start import ServeOptions

# Python's default of 5 ms delays the engine after each step while HTTP writes: a fifth of the tokens per
# second at steps of 10 ms.
SWITCH_S = 5e-4
MODEL_HELP = "A built-in model, a folder with a checkpoint, or its name in the local Hugging Face cache."

DevicesOption = Annotated[
    str | None,
    typer.Option(
        help="Devices, such as cpu, emu:a100,emu:l40s, cuda:0 or away:a100:2.",
        show_default="this machine's GPUs, or its CPU",
    ),
]
LinkOption = Annotated[list[str] | None, typer.Option(help=LINK_HELP, show_default="pcie4")]
HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(help="API key, or @FILE with one per line; may be repeated.", envvar="TESSERA_API_KEY"),
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
    typer.Option(min=1, callback=PLANNED, help="Sequences per microbatch.", show_default="8; on GPUs 64"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens of prompt and answer.", show_default="the model's limit"),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        min=1, callback=PLANNED, help="Maximum tokens of one step.", show_default="2048; on a CPU 128"
    ),
]
PrefixCaching = Annotated[bool, typer.Option(help="Compute common prefixes of prompts once.")]
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
        metavar="NAME=FOLDER",
        callback=PLANNED,
        help="A LoRA adapter (peft) that requests choose by `model`; may be repeated.",
    ),
]
PolicyOption = Annotated[str, typer.Option(callback=PLANNED, help=POLICY_HELP)]
OutputTokens = Annotated[
    int | None,
    typer.Option(min=1, is_eager=True, help="Mean answer that the service is planned for, in tokens."),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        min=1, callback=needs("output_tokens"), help="Mean prompt that the service is planned for, in tokens."
    ),
]
TpotMs = Annotated[
    float | None,
    typer.Option(
        min=1e-3,
        callback=needs("output_tokens"),
        help="Limit of milliseconds per output token, at the median.",
    ),
]
TtftMs = Annotated[
    float | None,
    typer.Option(
        min=1e-3,
        callback=needs("output_tokens"),
        help="Limit of milliseconds to the first token, at the median.",
    ),
]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Maximum number of waiting requests.")]
MaxRequests = Annotated[int, typer.Option(min=1, help="Maximum number of requests, waiting ones included.")]
MaxBody = Annotated[int, typer.Option(min=1, help="Maximum bytes of a request body.")]
DrainOption = Annotated[
    float,
    typer.Option(min=0, max=86_400, callback=finite, help="Seconds to finish running requests at shutdown."),
]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Log every answer on standard error.")]


class ServeReady(Record, frozen=True):
    """A service that answers requests."""

    # What was chosen, what is expected, and what one more device would add.
    notes: tuple[str, ...]
    headline: str
    url: Annotated[str, HIDDEN]
    model: Annotated[str, HIDDEN]
    devices: Annotated[tuple[str, ...], HIDDEN]
    # Seconds from the command to the first request it could answer.
    seconds: Annotated[float, HIDDEN]
    # Language models only.
    policies: Annotated[tuple[str, ...], HIDDEN] = ()
    policy: Annotated[str | None, HIDDEN] = None
    microbatches: Annotated[int | None, HIDDEN] = None
    seqs: Annotated[int | None, HIDDEN] = None
    max_model_len: Annotated[int | None, HIDDEN] = None
    step_tokens: Annotated[tuple[int, ...], HIDDEN] = ()
    pool_tokens: Annotated[int | None, HIDDEN] = None
    # Encoders only.
    max_len: Annotated[int | None, HIDDEN] = None
    dimensions: Annotated[int | None, HIDDEN] = None


def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    devices: DevicesOption = None,
    link: LinkOption = None,
    transport: TransportOption = "auto",
    rendezvous: Rendezvous = None,
    rank: Rank = 0,
    secret_file: SecretFile = None,
    torchrun: UnderTorchrun = False,
    ray: OnRay = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: KeyOption = None,
    served_model_name: NameOption = None,
    lora: LoraOption = None,
    microbatches: MicrobatchesOption = None,
    seqs: SeqsOption = None,
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    memory_share: MemoryShareOption = MEMORY_SHARE,
    prefix_caching: PrefixCaching = True,
    plan: PlanOption = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    tpot_ms: TpotMs = None,
    ttft_ms: TtftMs = None,
    plan_cache: PlanCache = True,
    random_weights: RandomWeights = False,
    policy: PolicyOption = "auto",
    effort: EffortOption = "full",
    max_waiting: MaxWaiting = 1024,
    max_requests: MaxRequests = 2048,
    max_body: MaxBody = 4 * 2**20,
    drain: DrainOption = 30.0,
    access_log: AccessLog = False,
) -> Iterator[ServeReady]:
    """Serve a model over OpenAI's HTTP API, with plans for its devices.

    Stops on SIGTERM or Ctrl-C: running requests finish, new ones are refused. A live page is at /.
    """
    started_s = time.perf_counter()
    if access_log:
        _log_access()
    meeting = Meeting.of(rendezvous, rank, secret_file, torchrun) if rendezvous or torchrun else None
    if meeting is not None and meeting.rank > 0:
        _join(meeting, model)
        return
    _check_extra()
    if meeting is None and ray is None:
        _warm_up()
    keys, limits = _keys(transport, api_key or []), _http_limits(max_body, max_requests, drain)
    with gathered(devices or _own_devices(), model, meeting, ray) as (gathered_devices, hub):
        cluster = _wired(gathered_devices, link)
        sizes = (microbatches, seqs, max_model_len, max_batch_tokens)
        spec = _spec(cluster, *sizes, memory_share, policy, random_weights, effort)
        spec = replace(spec, adapters=_adapters(lora or []))
        spec = _for_load(spec, sizes, prompt_tokens, output_tokens, tpot_ms, ttft_ms)
        given = (served_model_name or "", spec, transport, max_waiting, prefix_caching, keys)
        options = _options(host, limits, plan_cache, plan, *given)
        yield from _serve(model, cluster, options, (host, port), started_s, hub)


def _warm_up() -> None:
    """The fork server imports torch while this process does."""
    from tessera.execute.processes import warm_up

    warm_up()


def _spec(
    cluster: "Cluster",
    microbatches: int | None,
    seqs: int | None,
    max_model_len: int | None,
    max_batch_tokens: int | None,
    memory_share: float,
    policy: str,
    random_weights: bool,
    effort: str,
) -> "ServeSpec":
    from tessera.serve.policies import check_policy
    from tessera.serve.records import ServeSpec, sizes_for

    usual = sizes_for(cluster)
    return ServeSpec(
        microbatches or usual[0],
        seqs or usual[1],
        max_model_len,
        max_batch_tokens,
        memory_share=memory_share,
        policies=(check_policy(policy),),
        random_weights=random_weights,
        effort=effort,
    )


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


def _keys(transport: str, given: list[str]) -> tuple[str, ...]:
    """API keys; the transport is checked first."""
    from tessera.execute.transport import check_name
    from tessera.serve.limits import read_keys

    check_name(transport)
    return read_keys(given)


def _options(
    host: str, limits: "HttpLimits", plan_cache: bool, plan: Path | None, *given: Any
) -> "ServeOptions":
    from tessera.ir import ServicePlan, load
    from tessera.serve.planning import default_folder
    from tessera.serve.server import is_loopback
    from tessera.serve.start import ServeOptions

    kept, loaded = default_folder() if plan_cache else None, load(ServicePlan, plan) if plan else None
    own: dict[str, Any] = {"is_local": is_loopback(host), "limits": limits, "kept": kept, "plan": loaded}
    return ServeOptions(*given, **own)


def _for_load(
    spec: "ServeSpec",
    sizes: tuple[int | None, ...],
    prompt_tokens: int | None,
    output_tokens: int | None,
    tpot_ms: float | None,
    ttft_ms: float | None,
) -> "ServeSpec":
    """The spec for a load, if one is given; sizes that are not given are chosen for it."""
    from tessera.ir import Load

    if not (prompt_tokens and output_tokens):
        return spec
    load = Load(prompt_tokens, output_tokens, tpot_ms=tpot_ms, ttft_ms=ttft_ms)
    microbatches, seqs, _, max_batch_tokens = sizes
    is_free = microbatches is seqs is max_batch_tokens is None
    return replace(spec, load=load, is_for_load=is_free)


def _join(meeting: Meeting, model: str) -> None:
    from tessera.serve.joining import ModelHere

    work(meeting, make=ModelHere(model, may_import=True))


def _wired(devices: "tuple[Device, ...]", links: list[str] | None) -> "Cluster":
    from tessera.profile import wire

    return wire(devices, links or [])


def _own_devices() -> str:
    """The GPUs of this machine, or its CPU."""
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ",".join(f"cuda:{n}" for n in range(num)) or "cpu"


def _serve(
    model: str,
    cluster: "Cluster",
    options: "ServeOptions",
    address: tuple[str, int],
    started_s: float,
    hub: "MakeHub | None" = None,
) -> Iterator[ServeReady]:
    from tessera.serve.server import HttpServer, bind, url_of
    from tessera.serve.start import started

    sys.setswitchinterval(SWITCH_S)
    bound = bind(*address)
    if not options.keys and not options.is_local:
        _say(
            f"warning: everyone who reaches {address[0]} can use this server; set --api-key to require a key"
        )
    with _stoppable(), bound, ExitStack() as stack:
        with progress(f"serving {model}") as advance:
            ready = stack.enter_context(started(model, cluster, options, hub=hub, advance=advance))

        async def stop() -> None:
            await asyncio.to_thread(ready.service.stop, 0.0)

        for _ in HttpServer(ready.app, options.limits, stop, _say).serving(bound):
            seconds, url = time.perf_counter() - started_s, url_of(bound)
            headline = f"{ready.title} at {url} after {seconds:.1f} s"
            facts = {"notes": ready.summary, "headline": headline, "url": url, "seconds": round(seconds, 3)}
            yield msgspec.convert(facts | ready.facts, ServeReady)


def _http_limits(body_bytes: int, requests: int, drain_s: float) -> "HttpLimits":
    """Limits, with fewer connections where the shell allows fewer open files."""
    from tessera.serve.limits import HttpLimits
    from tessera.serve.server import allowed_connections

    limits = HttpLimits(body_bytes=body_bytes, requests=requests, drain_s=drain_s)
    allowed, remark = allowed_connections(limits.connections)
    if remark:
        _say(f"note: {remark}")
    return replace(limits, connections=allowed)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the command like Ctrl-C until the server handles it, so that workers end too."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log_access() -> None:
    """Give uvicorn's access log a handler; it has none by default."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("uvicorn.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _check_extra() -> None:
    """Refuse a missing extra before anything slow is done."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(module) is None:
            raise MissingExtra(module, "serve")


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
