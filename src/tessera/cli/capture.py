"""tessera capture: a model's step -> a trace."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tessera.cli.output import HIDDEN, Record, info, option, progress, shown, written
from tessera.errors import TesseraError
from tessera.ir import BufferKind, Step, Trace, save

MODEL_HELP = (
    "A built-in model (tiny-llama, llama-3-8b, ...), a folder with a Hugging Face config.json or its name in "
    "the local Hugging Face cache, or module:callable, a function from the step to a Workload or to "
    "(nn.Module, example inputs)."
)
STEP_HELP = (
    "Step to run: prefill, decode, encode, denoise, call (the plain forward), or a served model's tokens."
)
LAUNCHES_HELP = (
    "Launches to record: compiled or eager. Compiling takes a minute unless the kernels are cached."
)

RandomWeights = Annotated[bool, info("Random weights in place of the folder's own.", "--random-weights")]
Launches = Annotated[
    Literal["compiled", "eager"] | None, info(LAUNCHES_HELP, shown="compiled where they are known")
]


class CapturedTrace(Record, frozen=True):
    output: str
    model: str
    step: str
    device: str
    launches: int
    views: int
    buffers: int
    edges: Annotated[int, shown("dependencies")]
    state_bytes: int
    weight_bytes: Annotated[int, shown("weights")]
    kinds: Annotated[dict[str, int], shown("buffers by kind")]
    # Operator -> calls whose result aliases an argument although the schema does not say so.
    undeclared_aliases: dict[str, int]
    seconds: Annotated[float, HIDDEN] = 0.0


def capture(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    step: str | None = option(None, STEP_HELP, shown="decode where there is one"),
    batch: int = option(1, "Rows of the batch.", min=1),
    context: int = option(128, "Tokens per row: of the prompt, the cache or the image.", min=1),
    reserve: int = option(0, "Tokens per row that decodes may add after this prefill.", min=0),
    seed: int = option(0, "Seed of the random weights."),
    random_weights: RandomWeights = False,
    inputs: Path | None = option(
        None, "Named inputs of a folder's model: safetensors, npz or json.", shown="random ones"
    ),
    device: str = option("cpu", "Where to record: cpu, cuda:N, or fake (no GPU, no weights)."),
    compiled: bool = option(
        False, "Record the kernels that Inductor makes of the step, for a GPU.", "--compiled"
    ),
    output: Path | None = written("trace", "STEP.trace"),
) -> CapturedTrace:
    """Record the launches of one step of a model."""
    with progress("importing torch", 3) as advance:
        from tessera import analyze
        from tessera.capture import check_device, place_of, record_step
        from tessera.capture.models.checkpoint import blamed_for_run

        check_device(device)
        kind = step or default_step(model)
        advance(f"recording {model}")
        path = str(inputs.resolve()) if inputs else ""  # the step can be built again from elsewhere
        what = Step(place_of(model), kind, batch, context, seed, reserve, random_weights, path)
        with blamed_for_run(what.model):
            trace = _record_compiled(what, device) if compiled else record_step(what, device)
        advance("analyzing")
        num_edges = len(analyze.build_graph(trace).edges)
        advance("writing")
        output = output or Path(f"{kind}.trace")
        save(trace, output)
    return _captured(trace, num_edges, output, model, device)


def _captured(trace: Trace, num_edges: int, path: Path, model: str, device: str) -> CapturedTrace:
    return CapturedTrace(
        output=str(path),
        model=model,
        step=trace.step.kind,
        device=device,
        launches=len(trace.launches),
        views=trace.num_views,
        buffers=len(trace.buffers),
        edges=num_edges,
        state_bytes=trace.bytes_of(BufferKind.STATE),
        weight_bytes=trace.bytes_of(BufferKind.WEIGHT),
        kinds={kind.value: len(trace.buffers_of(kind)) for kind in BufferKind},
        undeclared_aliases=dict(trace.aliases),
    )


def _record_compiled(step: Step, device: str) -> Trace:
    from tessera.capture import build, record_step
    from tessera.capture.inductor import record_inductor
    from tessera.capture.workload import on_device
    from tessera.flow import record_compiled

    if device == "cpu":
        raise TesseraError("Inductor's kernels are for GPUs", "Use --device fake or cuda:N.", "--compiled")
    if ":" in step.model:  # a user's program: a recording refuses what it cannot follow
        record_step(step, "fake")
    if device == "fake":
        return record_compiled(step)
    return record_inductor(on_device(build(step), device)).trace


def default_step(model: str) -> str:
    from tessera.capture.models import steps_of_model

    steps = steps_of_model(model)
    return "decode" if "decode" in steps else steps[0]
