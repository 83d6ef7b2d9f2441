"""What can be run on this machine's CPU, checked before anything is built."""

from tessera.errors import TesseraError
from tessera.ir import Arg, BufferKind, Symbol, Trace

# Weights of a model that is built and run here.
MAX_BYTES = 4 << 30


def check_runnable(trace: Trace, place: str) -> None:
    """Refuses a trace of a model that is too large, or that was captured for a GPU."""
    size = sum(trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.WEIGHT))
    if size > MAX_BYTES:
        message = f"{trace.step.model} has {size / 1e9:.1f} GB of weights; this command runs the whole model"
        remedy = "Verify the tiny model of the same family: tessera capture tiny-... --device cpu."
        raise TesseraError(message, remedy, place)
    if trace.recorded_on != "cpu":
        raise TesseraError(
            f"the trace was captured on {trace.recorded_on}; this command runs on the CPU",
            "Capture the tiny model of the same family with --device cpu.",
            place,
        )
    for index, launch in enumerate(trace.launches):
        devices = [d for arg in (*launch.args, *(v for _, v in launch.kwargs)) for d in _devices(arg)]
        foreign = [d for d in devices if d.partition(":")[0] not in ("cpu", "")]
        if foreign:
            raise TesseraError(
                f"the trace was captured for {foreign[0]} (launch {index}, {trace.kernel_of(index).name}); "
                "this command runs on the CPU",
                "Capture the tiny model of the same family with --device cpu.",
                place,
            )


def _devices(arg: Arg) -> list[str]:
    if isinstance(arg, tuple):
        return [d for item in arg for d in _devices(item)]
    return [arg.name] if isinstance(arg, Symbol) and arg.kind == "device" else []
