"""A trace and devices in, a price list out; nothing is run and nothing is measured.

Each launch is reduced to its work (class, dtype, operations, bytes); equal work is priced once a GPU.
Launches that make only empty tensors are priced at the floor of their class, since on a GPU they still
pass through the queue; operators that start no kernel (allocations, views) take no time of the device.
"""

from tessera.errors import TesseraError
from tessera.ir import Cost, Costs, Device, DeviceKind, Source, Trace, verify
from tessera.profile.counts import OpClass, Work, is_zero_size, work_of
from tessera.profile.fitted import family_of, model_of, price
from tessera.profile.gpus import gpu

FAMILY_WORDS = {"any": "", "f16": " in 16 bits", "f32": " in fp32", "f64": " in fp64", "f8": " in 8 bits"}


def estimate(trace: Trace, devices: tuple[Device, ...]) -> Costs:
    """What every launch of the trace costs on every device, with source and expected error."""
    for device in devices:
        _check(device)
    known: dict[Work, tuple[Cost, ...]] = {}
    rows = []
    for work in works(trace):
        if work not in known:
            known[work] = tuple(price(work, d.gpu) for d in devices)
        rows.append(known[work])
    costs = Costs(trace.digest, devices, tuple(rows))
    verify(costs)
    return costs


def works(trace: Trace) -> tuple[Work, ...]:
    """The work of every launch, in order."""
    return tuple(work_of(trace.kernels[launch.kernel], launch) for launch in trace.launches)


def notes(trace: Trace, devices: tuple[Device, ...]) -> tuple[str, ...]:
    """What a reader of the prices should know: guesses, empty launches, GPUs without measurements."""
    counted = works(trace)
    said = []
    unknown = {trace.kernel_of(i).name for i, work in enumerate(counted) if work.op is OpClass.OTHER}
    if unknown:
        said.append(f"priced by bytes alone, operator unknown: {', '.join(sorted(unknown))}")
    empty = [i for i, launch in enumerate(trace.launches) if is_zero_size(launch)]
    if empty:
        named = ", ".join(f"{i} ({trace.kernel_of(i).name})" for i in empty[:8])
        more = f" and {len(empty) - 8} more" if len(empty) > 8 else ""
        said.append(f"zero-size launches, priced at the floor of their class: {named}{more}")
    for name in dict.fromkeys(d.gpu for d in devices):
        guessed = _guessed(name, counted)
        if guessed:
            said.append(f"{name}: no measurements of {', '.join(guessed)}; the class model is used")
    return tuple(said)


def _guessed(name: str, counted: tuple[Work, ...]) -> list[str]:
    """The classes that this GPU was never measured in, with the error to expect."""
    worst: dict[str, float] = {}
    for work in dict.fromkeys(counted):
        if work.op is OpClass.ALLOCATION:
            continue
        model = model_of(work, gpu(name))
        if model.source is Source.CLASS:
            words = f"{work.op}{FAMILY_WORDS[family_of(work.op, work.dtype)]}"
            worst[words] = max(worst.get(words, 0.0), model.short_error)
    return [f"{words} (±{error:.0%})" for words, error in sorted(worst.items())]


def _check(device: Device) -> None:
    if device.kind is not DeviceKind.EMU:
        remedy = "Only emu:GPU can be priced at present."
        raise TesseraError(f"{device.name} cannot be priced without measuring it", remedy, "--devices")
    gpu(device.gpu)
