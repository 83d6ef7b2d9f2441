"""Hold the interpreter against a GPU: `python corpus/check_on_gpu.py [--json FILE]`.

Runs every launch of the corpus, and every instruction form of `forms.py`, on a CUDA device through the
driver's own interface and in the interpreter, and compares what lies in memory afterwards. Needs a driver,
no toolkit. Launches whose arguments hold addresses or tensor maps are left out: they mean nothing on the
other machine. Expected to differ: what depends on the order of blocks, on addresses, on the layout of a
tensor map, or on what an earlier launch left in a variable of the module.
"""

import argparse
import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import checks
import forms
import launches
import numpy as np

from tessera_ptx.interp import InterpreterFault, Packed, run
from tessera_ptx.interp.launch import DYNAMIC_SHARED, Binding, _entry
from tessera_ptx.interp.rules.bulk import TENSOR_MAP_BYTES

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FORM_LANES = 4096


class Refused(Exception):
    """The driver did not take a module or a launch."""


class Gpu:
    """The driver interface, as little of it as a launch needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.modules: dict[str, ctypes.c_void_p] = {}
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        """Call the driver; raise on any error."""
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise Refused(f"{name}: {text.value.decode() if text.value else code}")

    def load(self, text: str) -> ctypes.c_void_p:
        """A module from PTX."""
        if text not in self.modules:
            module = ctypes.c_void_p()
            try:
                self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text.encode()))
            except Refused:
                # Triton writes a newer version number than it needs; a driver may know only older ones.
                older = re.sub(r"(?m)^\.version .*", ".version 8.6", text)
                self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(older.encode()))
            self.modules[text] = module
        return self.modules[text]

    def launch(
        self, module: ctypes.c_void_p, entry: str, made: launches.Launch, bound: Binding, function: Any
    ) -> Any:
        """Run a launch on a copy of the arena; gives the arena's bytes afterwards."""
        kernel, arena = ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, entry.encode())
        data = bound.arena.data
        self.call("cuMemAlloc_v2", ctypes.byref(arena), ctypes.c_size_t(data.size))
        try:
            self.call(
                "cuMemcpyHtoD_v2", arena, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.size)
            )
            params = self._relocated(bound, function, arena.value)
            holders = [
                (ctypes.c_char * max(p.size, 1)).from_buffer(params, function.param_offsets[p.name])
                for p in function.params
            ]
            pointers = (ctypes.c_void_p * len(holders))(*(ctypes.addressof(h) for h in holders))
            dims = [*_three(made.grid), *_three(made.block)]
            self.call("cuLaunchKernel", kernel, *dims, self._shared(kernel, made), None, pointers, None)
            self.call("cuCtxSynchronize")
            out = np.empty_like(data)
            self.call(
                "cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), arena, ctypes.c_size_t(data.size)
            )
            return out
        finally:
            self.call("cuMemFree_v2", arena)

    def _shared(self, kernel: ctypes.c_void_p, made: launches.Launch) -> int:
        if made.shared_bytes is not None:
            return made.shared_bytes
        self.call("cuFuncSetAttribute", kernel, _MAX_DYNAMIC_SHARED, DYNAMIC_SHARED)
        return DYNAMIC_SHARED

    @staticmethod
    def _relocated(bound: Binding, function: Any, base: int) -> bytearray:
        """The parameter block with the device's addresses."""
        block = bytearray(bound.params.tobytes())
        starts = {region.name: region.start for region in bound.arena.regions}
        for (number, offset), (buffer, extra) in bound.pointers.items():
            at = function.param_offsets[function.params[number].name] + offset
            block[at : at + 8] = (base + starts[buffer] + extra).to_bytes(8, "little")
        return block


def _three(dims: Any) -> tuple[int, int, int]:
    filled = (*((dims,) if isinstance(dims, int) else dims), 1, 1)
    return filled[0], filled[1], filled[2]


def holds_addresses(args: list[Any]) -> bool:
    """Whether a buffer of the launch holds addresses, or an argument is a tensor map in our own layout."""
    if any(isinstance(a, Packed) and a.size == TENSOR_MAP_BYTES for a in args):
        return True
    inner = [v for a in args if isinstance(a, Packed) for v in a.fields.values()]
    return any(type(a).__name__ == "ByPointer" for a in [*args, *inner])


def check_row(gpu: Gpu, row: dict[str, Any], seed: int) -> tuple[str, float]:
    """One launch on both: 'equal', 'close' or 'different', and the largest relative error."""
    made = checks.made(row, seed)
    module = checks.module_of(row["ptx"])
    function = _entry(module, row["entry"])
    _, ours = checks.run_row(row, seed)
    bound = Binding(module, function, made.args)
    bound.arena.seal()
    theirs = gpu.launch(gpu.load(checks.text_of(row["ptx"])), row["entry"], made, bound, function)
    verdict, worst = "equal", 0.0
    for region in bound.arena.regions:
        mine, other = ours.buffers[region.name], theirs[region.start : region.start + region.size]
        if mine.tobytes() == other.tobytes():
            continue
        verdict = "close" if verdict == "equal" else verdict
        worst = max(
            worst,
            error_of(mine, other.view(mine.dtype).reshape(mine.shape), f"bf16:{region.name}" in made.expect),
        )
    if worst > max(made.tolerance, 1e-6):
        verdict = "different"
    return verdict, worst


def error_of(mine: Any, other: Any, is_bf16: bool) -> float:
    """The largest relative error, of values above one."""
    if is_bf16:
        mine, other = launches.from_bf16(mine), launches.from_bf16(other)
    a, b = mine.astype(np.float64), other.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.where(same, 0.0, np.abs(a - b) / np.maximum(1.0, np.abs(b))).max())


def check_form(gpu: Gpu, form: tuple[str, str, list[str], float]) -> str:
    """One instruction form on both; '' when they agree."""
    text, result, kinds, tolerance = form
    rng = np.random.default_rng(7)
    args = [np.zeros(FORM_LANES, f"u{forms.size_of(result)}")]
    args += [forms.operands(kind, FORM_LANES, rng) for kind in kinds]
    source = forms.kernel(text, result, kinds)
    made = launches.Launch(FORM_LANES // 256, 256, args, shared_bytes=0)
    ours = run(source, "k", made.grid, made.block, args).arrays[0]
    module = checks.parse(source, "form")
    bound = Binding(module, module.entries[0], args)
    bound.arena.seal()
    region = bound.arena.regions[0]
    whole = gpu.launch(gpu.load(source), "k", made, bound, module.entries[0])
    theirs = whole[region.start : region.start + region.size].view(ours.dtype)
    wrong = ours != theirs
    if result in ("f16", "f32", "f64"):
        a, b = (v.view(f"f{v.itemsize}").astype(np.float64) for v in (ours, theirs))
        wrong &= ~(np.isnan(a) & np.isnan(b))
        if tolerance:
            wrong &= ~(np.abs(a - b) <= tolerance * np.maximum(np.abs(b), 1e-30))
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    shown = ", ".join(f"{int(a[first]):#x}" for a in args[1:])
    results = f"{int(ours[first]):#x}, GPU {int(theirs[first]):#x}"
    return f"{int(wrong.sum())} of {FORM_LANES}: {text} ({shown}) -> {results}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", default="", help="write the findings to this file")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    gpu = Gpu()
    counts: dict[str, int] = {}
    notes: list[str] = []
    for form in forms.forms():
        try:
            wrong = check_form(gpu, form)
        except (Refused, InterpreterFault) as why:
            wrong = f"not compared: {form[0]}: {why}"
        verdict = "equal" if not wrong else "skipped" if wrong.startswith("not") else "different"
        note(counts, notes, "form", verdict, wrong)
    for row in checks.rows():
        if not checks.is_runnable(row):
            continue
        for seed in range(options.seeds):
            try:
                if holds_addresses(checks.made(row, seed).args):
                    continue
                verdict, worst = check_row(gpu, row, seed)
            except (Refused, InterpreterFault) as why:
                verdict, worst = "skipped", 0.0
                note(counts, notes, "launch", verdict, f"{checks.name_of(row)}: {why}")
                break
            text = f"{checks.name_of(row)} seed {seed}: error {worst:.3g}" if verdict == "different" else ""
            note(counts, notes, "launch", verdict, text)
    print("\n".join(notes))
    print(json.dumps(counts))
    if options.json:
        Path(options.json).write_text(json.dumps({"counts": counts, "notes": notes}, indent=1))
    return 0


def note(counts: dict[str, int], notes: list[str], what: str, verdict: str, text: str) -> None:
    """Count a verdict and keep its text."""
    counts[f"{what} {verdict}"] = counts.get(f"{what} {verdict}", 0) + 1
    if text:
        notes.append(f"{what} {text}")


if __name__ == "__main__":
    raise SystemExit(main())
