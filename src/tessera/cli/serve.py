"""tessera serve: from a model to an OpenAI-compatible endpoint, in one command."""

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from tessera.cli.capture import RandomWeights
from tessera.cli.output import console, progress
from tessera.cli.plan import LINK_HELP, EffortOption
from tessera.cli.remote import Meeting, OnRay, Rank, Rendezvous, SecretFile, UnderTorchrun, gathered, work
from tessera.errors import MissingExtra, TesseraError

if TYPE_CHECKING:
    from tessera.execute.worker_stepper import MakeHub
    from tessera.ir import Cluster, Device
    from tessera.serve.limits import HttpLimits
    from tessera.serve.start import RunningService, ServeOptions

# The engine wants the interpreter right after every step, while HTTP writes what the step before gave: with
# Python's own 5 ms it waited that long, a fifth of the tokens a second at steps of 10 ms.
SWITCH_S = 5e-4
MODEL_HELP = "A built-in model, a folder with a checkpoint, or its name in the local Hugging Face cache."
KEY_HELP = "A key that clients must send, or @FILE with one a line; repeat for several."
Name = Annotated[str | None, typer.Option(help="What clients call the model. [default: its name]")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of a prompt and its answer.", show_default="the model's own limit")
]
MaxBatchTokens = Annotated[
    int | None, typer.Option(help="Tokens of one step.", show_default="2048, on a CPU 128")
]
PlanCache = Annotated[bool, typer.Option(help="Use plans of an earlier start of the same service.")]
MemoryShare = Annotated[float, typer.Option(help="Of a GPU's memory, for weights and pages.")]
PrefixCaching = Annotated[
    bool, typer.Option(help="Read once what requests have in common at their beginning.")
]
TransportName = Annotated[
    str, typer.Option(help="How workers pass bytes on, if not as suits them best: shm, ipc, nvshmem or host.")
]
AccessLog = Annotated[bool, typer.Option("--access-log", help="A line on standard error for every answer.")]
AsJsonLine = Annotated[bool, typer.Option("--json", help="Say where it listens as one line of JSON.")]


DevicesOption = Annotated[
    str | None,
    typer.Option(
        help="Where it runs: cpu, emu:a100,emu:l40s, cuda:0, away:a100:2, ...",
        show_default="this machine's GPUs, or its CPU",
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(help="Microbatches, each with pages of its own.", show_default="2, on one GPU 1"),
]
SeqsOption = Annotated[
    int | None, typer.Option(help="Sequences of one microbatch.", show_default="8, on GPUs 64")
]


def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    devices: DevicesOption = None,
    link: Annotated[list[str] | None, typer.Option(help=LINK_HELP, show_default="pcie4")] = None,
    transport: TransportName = "auto",
    rendezvous: Rendezvous = None,
    rank: Rank = 0,
    secret_file: SecretFile = None,
    torchrun: UnderTorchrun = False,
    ray: OnRay = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for a free one.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help=KEY_HELP, envvar="TESSERA_API_KEY")] = None,
    served_model_name: Name = None,
    microbatches: MicrobatchesOption = None,
    seqs: SeqsOption = None,
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    memory_share: MemoryShare = 0.9,
    prefix_caching: PrefixCaching = True,
    plan_cache: PlanCache = True,
    random_weights: RandomWeights = False,
    policy: Annotated[str, typer.Option(help="auto, throughput or latency.")] = "auto",
    effort: EffortOption = "full",
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait.")] = 1024,
    max_requests: Annotated[int, typer.Option(help="Requests at once, waiting ones included.")] = 2048,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 4 * 2**20,
    drain: Annotated[float, typer.Option(help="Seconds to finish what runs when told to stop.")] = 30.0,
    access_log: AccessLog = False,
    as_json: AsJsonLine = False,
) -> None:
    """Serve a model over HTTP as OpenAI does, with plans for its devices.

    Stops on SIGTERM or Ctrl-C: finishes what runs and refuses what comes. A live page is at /.
    """
    started_s = time.perf_counter()
    if access_log:
        _log_access()
    meeting = Meeting.of(rendezvous, rank, secret_file, torchrun) if rendezvous or torchrun else None
    if meeting is not None and meeting.rank > 0:
        _join(meeting, model)
        return
    _check_extra()
    _check_counts(
        {"--microbatches": microbatches, "--seqs": seqs, "--max-model-len": max_model_len,
         "--max-batch-tokens": max_batch_tokens, "--max-waiting": max_waiting, "--max-requests": max_requests,
         "--max-body": max_body}, drain, memory_share)  # fmt: skip
    from tessera.execute.processes import warm_up

    limits = _http_limits(max_body, max_requests, drain)
    if meeting is None and ray is None:
        warm_up()  # which imports torch beside this process, under the same limit of files
    sizes = _Sizes(microbatches, seqs, max_model_len, max_batch_tokens, memory_share)
    options = _options(
        served_model_name, sizes, random_weights, policy, effort, transport, max_waiting, prefix_caching,
        api_key, host, limits, plan_cache,
    )  # fmt: skip
    with gathered(devices or _own_devices(), model, meeting, ray) as (found, hub):
        cluster = _wired(found, link)
        _serve(model, cluster, sizes.fill(options, cluster), (host, port), as_json, started_s, hub)


@dataclass(frozen=True)
class _Sizes:
    """What a service can hold; None: as suits its devices."""

    microbatches: int | None
    seqs: int | None
    max_model_len: int | None
    max_batch_tokens: int | None
    memory_share: float

    def fill(self, options: "ServeOptions", cluster: "Cluster") -> "ServeOptions":
        """With what suits these devices."""
        from tessera.serve.records import sizes_for

        usual = sizes_for(cluster)
        spec = replace(options.spec, microbatches=self.microbatches or usual[0], rows=self.seqs or usual[1])
        return replace(options, spec=spec)


def _options(
    name: str | None,
    sizes: _Sizes,
    random_weights: bool,
    policy: str,
    effort: str,
    transport: str,
    max_waiting: int,
    prefix_caching: bool,
    api_key: Sequence[str] | None,
    host: str,
    limits: "HttpLimits",
    plan_cache: bool,
) -> "ServeOptions":
    from tessera.execute.transport import check_name
    from tessera.serve.limits import read_keys
    from tessera.serve.planning import default_folder, objectives_of
    from tessera.serve.records import ServeSpec
    from tessera.serve.server import is_loopback
    from tessera.serve.start import ServeOptions

    check_name(transport)
    spec = ServeSpec(
        capacity=sizes.max_model_len,
        max_batch_tokens=sizes.max_batch_tokens,
        memory_share=sizes.memory_share,
        policies=objectives_of(policy),
        random_weights=random_weights,
        effort=effort,
    )
    return ServeOptions(
        name or "",
        spec,
        transport,
        max_waiting,
        prefix_caching,
        read_keys(api_key or ()),
        is_loopback(host),
        limits,
        default_folder() if plan_cache else None,
    )


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
    as_json: bool,
    started_s: float,
    hub: "MakeHub | None" = None,
) -> None:
    from tessera.serve.server import HttpServer, bind, url_of
    from tessera.serve.start import started

    sys.setswitchinterval(SWITCH_S)
    bound = bind(*address)
    if not options.keys and not options.is_local:
        _say(
            f"warning: everyone who reaches {address[0]} can use this server; --api-key lets in who has a key"
        )
    with _stoppable(), bound, ExitStack() as stack:
        with progress(f"serving {model}") as advance:
            ready = stack.enter_context(started(model, cluster, options, hub=hub, advance=advance))

        async def stop() -> None:
            await asyncio.to_thread(ready.service.stop, 0.0)

        def announce() -> None:
            _announce(ready, url_of(bound), time.perf_counter() - started_s, as_json)

        HttpServer(ready.app, options.limits, stop, _say, announce).run(sockets=[bound])


def _announce(ready: "RunningService", url: str, seconds: float, as_json: bool) -> None:
    """One line, when the first request would be answered."""
    if as_json:
        typer.echo(json.dumps({"url": url, **ready.facts, "seconds": round(seconds, 3)}))
        return
    for line in ready.summary:
        _say(line)
    console().print(f"{ready.title} at {url} after {seconds:.1f} s", markup=False, soft_wrap=True)


def _http_limits(body_bytes: int, requests: int, drain_s: float) -> "HttpLimits":
    """With fewer connections where the shell allows fewer open files."""
    from tessera.serve.limits import HttpLimits
    from tessera.serve.server import raise_file_limit

    limits = HttpLimits(body_bytes=body_bytes, requests=requests, drain_s=drain_s)
    allowed, remark = raise_file_limit(limits.connections)
    if remark:
        _say(f"note: {remark}")
    return replace(limits, connections=allowed)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Until the server handles it itself, SIGTERM ends the command as Ctrl-C does, and workers with it."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log_access() -> None:
    """uvicorn's own lines; its logger stays silent while it has no handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("uvicorn.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _check_extra() -> None:
    """Before anything slow is done."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(module) is None:
            raise MissingExtra(module, "serve")


def _check_counts(counts: Mapping[str, int | None], drain_s: float, memory_share: float) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise TesseraError(f"{count} is too few", "Use 1 or more.", name)
    if not 0 <= drain_s < float("inf"):
        raise TesseraError(f"{drain_s:g} seconds are no time to finish", "Use 0 or more.", "--drain")
    if not 0 < memory_share <= 1:
        raise TesseraError(
            f"{memory_share:g} is no share", "Use more than 0 and at most 1.", "--memory-share"
        )


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
