"""tessera calibrate: the few launches that reduce a plan's error most, measured on a card of this machine."""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.output import Record, option, progress, shown
from tessera.cli.profile import measure_device, store_at
from tessera.errors import TesseraError
from tessera.ir import Cost, Device, Source, Step, Trace
from tessera.ir.files import cache_folder
from tessera.profile import Work, corrections, parse_devices, sureness_of, works
from tessera.profile.corrections import MeasuredWork
from tessera.profile.coverage import Sureness
from tessera.profile.estimate import price_works
from tessera.profile.measured import YARDSTICK, needs_measuring
from tessera.profile.store import Store

# (kind of step, batch, context) that are measured.
STEPS = (("decode", 32, 1024), ("prefill", 2, 1024))
SMALL_STEPS = (("decode", 2, 64), ("prefill", 2, 64))
MODEL, SMALL_MODEL = "llama-3-8b", "tiny-llama"


class CalibrationReport(Record, frozen=True):
    """What was measured, and what it does to prices."""

    gpu: str
    measured: Annotated[int, shown("launches measured")]
    steps: str
    # Measured launches' share of the steps' time.
    share: Annotated[float, shown("share of their time", "share")]
    error_before: Annotated[float, shown("error before", "error")]
    error_after: Annotated[float, shown("error now", "error")]
    ratios: Annotated[dict[str, float], shown("measured / modelled")]
    # Plans for this GPU use this file from now on.
    output: str


def calibrate(
    device: Annotated[str, typer.Argument(help="A device of this machine: cuda:0 or cpu.")],
    model: str = option("", "Model whose launches are measured.", shown="llama-3-8b; on a CPU tiny-llama"),
    num: int = option(36, "Launches to measure, at most.", "--launches", min=1),
    store: Path | None = option(None, "Where measurements are kept between commands.", shown=False),
) -> CalibrationReport:
    """Measure the launches that reduce a plan's error most.

    This kind of card is priced by them from now on.

    A launch that was measured is priced at its time, others of its class by the ratio of measured to
    modelled.
    """
    devices = parse_devices(device)
    if len(devices) != 1 or not needs_measuring(devices[0]) or devices[0].num_sms:
        raise TesseraError(f"'{device}' is no whole device of this machine", "Name cuda:0 or cpu.", "DEVICE")
    return _calibrated(devices[0], model, num, store_at(store, any_clock=True))


def _calibrated(device: Device, model: str, num: int, kept: partial[Store]) -> CalibrationReport:
    is_cpu = not device.name.startswith("cuda")
    gpu_name = device.gpu or ("cpu" if is_cpu else "")
    if not gpu_name:
        message = f"no model knows {device.name}"
        raise TesseraError(message, "Measure traces with `tessera profile`.", "DEVICE")
    traces = _traces(model or (SMALL_MODEL if is_cpu else MODEL), is_cpu)
    priced_as = YARDSTICK if is_cpu else gpu_name
    path = cache_folder("calibrations") / f"{gpu_name}.json"
    counted = [works(trace) for trace in traces]
    every = [work for listed in counted for work in listed]
    # Not the prices of an earlier calibration.
    before = price_works(every, priced_as, None, corrections.packaged())
    selected = frozenset(corrections.chosen(every, before, num))
    modelled = dict(zip(every, before, strict=True))
    rows: dict[Work, MeasuredWork] = {}
    about: dict[str, str] = {}
    for trace, listed in zip(traces, counted, strict=True):
        only = frozenset(i for i, work in enumerate(listed) if work in selected)
        measured = measure_device(trace, device, kept, only=only)
        about = dict(measured.machine.identity)
        for work, timing in zip(listed, measured.timings, strict=True):
            if timing is not None and work in selected:
                rows[work] = MeasuredWork(work, timing.us, modelled[work].us)
    if not rows:
        raise TesseraError(f"no launch could be timed on {device.name}", "See `tessera profile --devices`.")
    calibration = corrections.Corrections(gpu_name, about, rows=tuple(rows.values()))
    corrections.save(calibration, path)
    after = [calibration.apply_rows(*pair) for pair in zip(every, before, strict=True)]

    def sure(costs: list[Cost]) -> Sureness:
        priced = zip(every, costs, strict=True)
        return sureness_of((work, priced_as, cost, 1.0) for work, cost in priced)

    steps = " and ".join(f"{t.step.kind} of {t.step.model} at batch {t.step.batch}" for t in traces)
    return CalibrationReport(
        gpu=gpu_name,
        measured=len(rows),
        steps=steps,
        share=sure(after).by_source.get(Source.MEASURED, 0.0),
        error_before=sure(before).rel_error,
        error_after=sure(after).rel_error,
        ratios=_ratios(rows.values()),
        output=str(path),
    )


def _traces(model: str, is_small: bool) -> list[Trace]:
    with progress("importing torch", 1 + len(STEPS)) as advance:
        from tessera.capture import place_of, record_step
        from tessera.capture.models import steps_of_model

        place, kinds = place_of(model), steps_of_model(model)
        traces = []
        steps = [step for step in (SMALL_STEPS if is_small else STEPS) if step[0] in kinds]
        for kind, batch, context in steps or [(kinds[0], 1, 1024)]:
            advance(f"recording {kind}")
            traces.append(record_step(Step(place, kind, batch, context), "cpu" if is_small else "fake"))
        return traces


def _ratios(rows: Iterable[MeasuredWork]) -> dict[str, float]:
    us, modelled_us = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rows:
        us[row.work.op.value] += row.us
        modelled_us[row.work.op.value] += row.modelled_us
    return {op: us[op] / modelled_us[op] for op in sorted(us) if modelled_us[op] > 0}
