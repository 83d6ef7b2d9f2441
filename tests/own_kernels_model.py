"""A step that mixes operators with kernels it launches itself: a Triton kernel and a CUDA kernel."""

from typing import Any

import torch
import triton
import triton.language as tl

import tessera
from tessera.ir import Step

WIDTH = 16
# y += a * x over n elements.
AXPY = """
.version 8.0
.target sm_80
.address_size 64

.visible .entry axpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .f32 %f<5>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [y];
    ld.param.u64 %rd2, [x];
    ld.param.f32 %f1, [a];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.s32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    add.s64 %rd5, %rd1, %rd3;
    ld.global.f32 %f3, [%rd5];
    fma.rn.f32 %f4, %f2, %f1, %f3;
    st.global.f32 [%rd5], %f4;
DONE:
    ret;
}
"""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gate(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out = x * sigmoid(y)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x, y = tl.load(x_ptr + at, mask=inside), tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x * (1 / (1 + tl.exp(-y))), mask=inside)


CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]


@triton.autotune(CONFIGS, key=["n"])  # type: ignore[untyped-decorator, unused-ignore]
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """y = 2 * x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


class Mixed(torch.nn.Module):
    """Two linear layers joined by a Triton kernel; a CUDA kernel adds the result to what is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.axpy: Any = tessera.CudaKernel(AXPY, "axpy")

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """What is kept after the step, squashed; `kept` is changed in place."""
        a, b = self.left(x), self.right(x)
        gated = torch.empty_like(a)
        n = gated.numel()
        gate[(triton.cdiv(n, 32),)](a, b, gated, n, BLOCK=32)
        half = n // 2
        self.axpy[triton.cdiv(half, 32), 32](kept, gated, 0.5, half)  # the first half of the rows
        return torch.tanh(kept)


def step(record: Step) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """For `own_kernels_model:step`."""
    x = torch.randn(record.batch, WIDTH, generator=torch.Generator().manual_seed(record.seed))
    return Mixed(), {"x": x, "kept": torch.zeros(record.batch, WIDTH)}
