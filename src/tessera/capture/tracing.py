"""tracing: transformers as it behaves while a compiler looks at it, for the time of a call.

Transformers reads masks on the host, to leave them out where they hide nothing, and checks inputs by their
values; it does neither while it is traced. Capture is a trace, so it says so. The results are the same:
a mask that hides nothing is applied instead of left out. The messages of such checks name values: a tensor
is written as "tensor" there, so that no value gets into a text.

What other releases of transformers call differently is left alone: the read is then refused by its line.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

IMPORTS = "transformers.utils.import_utils"
ANSWER = "is_jit_tracing"  # what `is_tracing` asks, wherever it was imported
NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


@contextmanager
def traced() -> Iterator[None]:
    """While entered, transformers takes no decision by the values of tensors that it can do without."""
    module = sys.modules.get(IMPORTS)
    answer, checks = getattr(module, ANSWER, None), os.environ.get(NO_CHECKS)
    if module is None or answer is None:
        yield
        return
    thread = threading.get_ident()
    written: Callable[[torch.Tensor, str], str] = torch.Tensor.__format__

    def write(tensor: torch.Tensor, how: str) -> str:
        return "tensor" if threading.get_ident() == thread else written(tensor, how)

    setattr(module, ANSWER, lambda: True)
    torch.Tensor.__format__ = write  # type: ignore[method-assign]
    os.environ[NO_CHECKS] = "1"
    try:
        yield
    finally:
        setattr(module, ANSWER, answer)
        torch.Tensor.__format__ = written  # type: ignore[method-assign]
        if checks is None:
            del os.environ[NO_CHECKS]
        else:
            os.environ[NO_CHECKS] = checks
