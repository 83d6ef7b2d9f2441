"""Options of a service, for the command line, configuration files and Python.

`ServeConfig` has a field for every option of `tessera serve`; the commands that start a service of their own
(chat, batch) and `tessera.api` make the same record.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tessera.cli.capture import RandomWeights
from tessera.cli.output import excludes, finite, needs
from tessera.cli.plan import LINK_HELP, EffortOption
from tessera.cli.remote import Meeting, OnRay, Rank, Rendezvous, SecretFile, UnderTorchrun
from tessera.cli.run import TransportOption
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.ir import Cluster
    from tessera.serve.records import ServeSpec
    from tessera.serve.start import ServeOptions

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
MemoryShare = Annotated[
    float,
    typer.Option(min=0.01, max=1, callback=finite, help="Share of GPU memory for weights and pages."),
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
    memory_share: MemoryShare = 0.9
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

    @property
    def meeting(self) -> Meeting | None:
        if not self.rendezvous and not self.torchrun:
            return None
        return Meeting.of(self.rendezvous, self.rank, self.secret_file, self.torchrun)

    @property
    def device_names(self) -> str:
        """The devices; by default the GPUs of this machine, or its CPU."""
        import torch

        num = torch.cuda.device_count() if not self.devices and torch.cuda.is_available() else 0
        return self.devices or ",".join(f"cuda:{n}" for n in range(num)) or "cpu"

    def check(self) -> None:
        """Refuse what can be refused before anything takes long."""
        from tessera.execute.transport import check_name
        from tessera.serve.limits import read_keys
        from tessera.serve.policies import check_policy

        check_name(self.transport)
        check_policy(self.policy)
        read_keys(self.api_key or ())
        _adapters(self.lora or [])

    def options(self, cluster: "Cluster") -> "ServeOptions":
        from tessera.ir import ServicePlan, load
        from tessera.serve.limits import HttpLimits, read_keys
        from tessera.serve.planning import default_folder
        from tessera.serve.server import is_loopback
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
        )
        if not (self.prompt_tokens and self.output_tokens):
            return spec
        load = Load(self.prompt_tokens, self.output_tokens, tpot_ms=self.tpot_ms, ttft_ms=self.ttft_ms)
        is_free = self.microbatches is self.seqs is self.max_batch_tokens is None
        return replace(spec, load=load, is_for_load=is_free)


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
