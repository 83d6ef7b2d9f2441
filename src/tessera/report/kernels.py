"""Short names and classes of kernels, for people.

A class is guessed from the kernel's name and the module that launched it; it groups lines of a table and
decides nothing. What no rule knows is "elementwise" for an operator and "other" for anything else.
"""

import re

from tessera.ir import Kernel, Origin

# The first rule that fits wins: (class, what the kernel's short name matches, what its scope must match).
RULES: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (name, re.compile(kernel), re.compile(scope))
    for name, kernel, scope in (
        ("attention", r"attention|flash|fmha|sdpa", r""),
        ("attention", r"^(bmm|baddbmm|softmax|safe_softmax|matmul)$", r"(?i)attn|attention"),
        ("matrix multiply", r"(^|_)(mm|addmm|bmm|baddbmm|matmul|linear|gemm|gemv)(_|$)|grouped_mm", r""),
        ("convolution, scan", r"conv|scan|ssm|ssd", r""),
        ("norm", r"norm", r""),
        ("norm", r"", r"(?i)norm[^.]*$|(^|\.)ln_?\w*$"),
        ("reduction", r"softmax|topk|sort|argm|^sum|^mean|^amax|cumsum|triton_(per|red)_", r""),
        ("lookup", r"embedding|index|gather|scatter|select", r""),
        ("copy", r"copy|clone|^cat$|stack|contiguous|fill|zero|ones|empty|arange|full|repeat", r""),
    )
)  # fmt: skip


def short_name(name: str) -> str:
    """ "aten.mm.default" -> "mm", "aten._softmax.default" -> "softmax"; other names stay as they are."""
    parts = name.split(".")
    if len(parts) < 2 or parts[0] not in ("aten", "prims"):
        return name
    return parts[1].lstrip("_").replace("scaled_dot_product", "sdpa") or name


def kernel_class(kernel: Kernel, scope: str) -> str:
    """The class of work that one launch of a kernel does."""
    name = short_name(kernel.name)
    for label, by_name, by_scope in RULES:
        if by_name.search(name) and by_scope.search(scope):
            return label
    fused = kernel.origin is Origin.TRITON and name.startswith("triton_poi_")
    return "elementwise" if fused or kernel.origin is Origin.ATEN else "other"
