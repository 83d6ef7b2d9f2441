"""Elementwise kernels: masks, dtypes, strides, random numbers."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)


@triton.jit
def silu_mul(gate, up, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    g = tl.load(gate + i, mask=m).to(tl.float32)
    u = tl.load(up + i, mask=m).to(tl.float32)
    tl.store(out + i, (g * tl.sigmoid(g) * u).to(tl.bfloat16), mask=m)


@triton.jit
def strided_copy(src, dst, src_row, dst_row, rows, cols, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = (c < cols) & (r < rows)
    tl.store(dst + r * dst_row + c, tl.load(src + r * src_row + c, mask=m), mask=m)


@triton.jit
def where_mask(x, mask, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    keep = tl.load(mask + i, mask=m, other=0)
    tl.store(out + i, tl.where(keep != 0, tl.load(x + i, mask=m, other=0.0), -1.0), mask=m)


@triton.jit
def dropout(x, out, p, seed, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + i, mask=m)
    tl.store(out + i, tl.where(tl.rand(seed, i) > p, v / (1.0 - p), 0.0), mask=m)


@triton.jit
def transcendental(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + i, mask=m, other=1.0)
    r = tl.exp(v) + tl.log(v) + tl.sqrt(v) + tl.rsqrt(v) + tl.sin(v) + tl.cos(v) + tl.erf(v) + tl.floor(v)
    tl.store(out + i, r, mask=m)


POINTWISE = {"n": "i32", "BLOCK": "constexpr"}
BUILDS = {
    "add": dict(
        fn=add,
        signature={"x": "*fp32", "y": "*fp32", "out": "*fp32", **POINTWISE},
        constexprs={"BLOCK": 1024},
    ),
    "add_unaligned": dict(
        fn=add,
        signature={"x": "*fp16", "y": "*fp16", "out": "*fp16", **POINTWISE},
        constexprs={"BLOCK": 256},
        aligned=(),
    ),
    "silu_mul": dict(
        fn=silu_mul,
        signature={"gate": "*bf16", "up": "*bf16", "out": "*bf16", **POINTWISE},
        constexprs={"BLOCK": 512},
    ),
    "strided_copy": dict(
        fn=strided_copy,
        signature={
            "src": "*fp32",
            "dst": "*fp32",
            "src_row": "i64",
            "dst_row": "i32",
            "rows": "i32",
            "cols": "i32",
            "BLOCK": "constexpr",
        },
        constexprs={"BLOCK": 128},
        aligned=("src", "dst"),
    ),
    "where_mask": dict(
        fn=where_mask,
        signature={"x": "*fp32", "mask": "*i8", "out": "*fp32", **POINTWISE},
        constexprs={"BLOCK": 512},
    ),
    "dropout": dict(
        fn=dropout,
        signature={"x": "*fp32", "out": "*fp32", "p": "fp32", "seed": "i32", **POINTWISE},
        constexprs={"BLOCK": 256},
    ),
    "transcendental": dict(
        fn=transcendental, signature={"x": "*fp32", "out": "*fp32", **POINTWISE}, constexprs={"BLOCK": 256}
    ),
}
