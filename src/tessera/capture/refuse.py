"""refuse: what cannot be recorded, said with the line of the program and with what to do instead."""

import functools
import traceback
from typing import Any, NoReturn

import torch

from tessera.capture.schema import given
from tessera.errors import CaptureError

# Frames of these files are ours; capture's models are not, since their lines are the program's.
_OURS = ("recorder", "refuse", "attention", "watch", "function", "call", "rng", "workload", "record", "own",
         "own_triton", "cuda_kernel")  # fmt: skip
_INNER = ("/torch/", "/tessera/capture/inductor/", *(f"/tessera/capture/{name}.py" for name in _OURS))
# When training, these update running statistics that their schemas do not declare as written.
SILENT_WRITERS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})

_BATCHED = "Keep the decision on the device (for experts: the grouped or batched path)"
_ON_DEVICE = "Make the optimiser with fused=True, or on a GPU with capturable=True."


def fail(message: str, remedy: str) -> NoReturn:
    """Raises with the innermost line of the program that is neither torch's nor the recorder's."""
    frames = [f for f in traceback.extract_stack() if not _is_inner(f.filename)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    raise CaptureError(message, remedy, place)


def _is_inner(filename: str) -> bool:
    return any(part in filename for part in _INNER) or filename.startswith("<")


def check_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_tensors: bool) -> None:
    """Refuses host reads, which would decide what runs, and writes that no schema declares."""
    check_honest(func, args, kwargs)
    if has_tensors and _answers_the_host(func):
        if any("/torch/optim/" in frame.filename for frame in traceback.extract_stack()):
            fail("the optimiser reads its step count or rate on the host", _ON_DEVICE)
        fail(
            f"{func} reads a tensor's value on the host", f"{_BATCHED}, or pass the value as a plain number."
        )


@functools.cache
def _answers_the_host(func: Any) -> bool:
    """True if an operator returns something, and none of it a tensor."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(r.type) for r in returns)


def check_honest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a call that writes more than its schema says."""
    if func._schema.name not in SILENT_WRITERS:
        return
    if given(func, "training", args, kwargs) and given(func, "running_mean", args, kwargs) is not None:
        fail(
            f"{func} changes its running statistics, which its schema does not say",
            "Call the model's eval() first.",
        )


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuses memory that is not one dense, strided storage."""
    if tensor.layout is not torch.strided:
        fail(f"a tensor of layout {tensor.layout} cannot be placed", "Use dense tensors: call .to_dense().")
    if tensor.is_quantized:
        fail(
            f"a quantized tensor ({tensor.dtype}) cannot be placed", "Call .dequantize() or use int8 tensors."
        )


def explain(func: Any, error: Exception) -> NoReturn:
    """An operator that failed while it was recorded: why, where, and what instead."""
    kind = type(error).__name__
    if kind in ("DynamicOutputShapeException", "DataDependentOutputException"):
        remedy = f"{_BATCHED}, or capture on real tensors with --device cpu or cuda:0."
        fail(f"{func} gives a result whose shape depends on values, and fake tensors have none", remedy)
    if kind in ("UnsupportedOperatorException", "UnsupportedFakeTensorException"):
        fail(
            f"{func} cannot be run on fake tensors",
            "Register a fake for it with torch.library.register_fake.",
        )
    if "two devices" in str(error) or "two different devices" in str(error):
        fail(
            f"{func} is given tensors of two devices",
            "Make new tensors where the others are: device=x.device.",
        )
    if isinstance(error, NotImplementedError):
        first = str(error).partition(". ")[0].partition("\n")[0]
        remedy = "Capture on a device that has it (--device fake or cuda:0), or use another operator."
        fail(f"{func} is missing on this device: {first}", remedy)
    raise error
