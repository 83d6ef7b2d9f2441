"""Row-wise kernels: reductions, softmax, norms, rotary embedding, top index."""

import triton
import triton.language as tl


@triton.jit
def row_sum(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        acc += tl.load(x + row * cols + c, mask=c < cols, other=0.0)
    tl.store(out + row, tl.sum(acc, 0))


@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + c, mask=c < cols, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * cols + c, e / tl.sum(e, 0), mask=c < cols)


@triton.jit
def rmsnorm(x, w, eps, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < cols
    v = tl.load(x + row * cols + c, mask=m, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(v * v, 0) / cols + eps)
    tl.store(x + row * cols + c, (v * inv * tl.load(w + c, mask=m)).to(tl.float16), mask=m)


@triton.jit
def layernorm_residual(x, residual, w, b, out, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < cols
    v = tl.load(x + row * cols + c, mask=m, other=0.0) + tl.load(residual + row * cols + c, mask=m, other=0.0)
    tl.store(residual + row * cols + c, v, mask=m)
    mean = tl.sum(v, 0) / cols
    d = tl.where(m, v - mean, 0.0)
    inv = 1.0 / tl.sqrt(tl.sum(d * d, 0) / cols + eps)
    y = d * inv * tl.load(w + c, mask=m) + tl.load(b + c, mask=m)
    tl.store(out + row * cols + c, y, mask=m)


@triton.jit
def rope(q, cosine, sine, heads, HALF: tl.constexpr):
    token = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    base = q + (token * heads + head) * 2 * HALF
    c = tl.load(cosine + token * HALF + d)
    s = tl.load(sine + token * HALF + d)
    a = tl.load(base + d)
    b = tl.load(base + HALF + d)
    tl.store(base + d, a * c - b * s)
    tl.store(base + HALF + d, b * c + a * s)


@triton.jit
def argmax(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + c, mask=c < cols, other=-float("inf"))
    tl.store(out + row, tl.argmax(v, 0))


@triton.jit
def column_sum(x, out, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    acc = tl.zeros((COLS,), tl.float32)
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        m = (r < rows)[:, None] & (c < cols)[None, :]
        acc += tl.sum(tl.load(x + r[:, None] * cols + c[None, :], mask=m, other=0.0), 0)
    tl.store(out + c, acc, mask=c < cols)


@triton.jit
def cumsum(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + c, mask=c < cols, other=0.0)
    tl.store(out + row * cols + c, tl.cumsum(v, 0), mask=c < cols)


@triton.jit
def cross_entropy(logits, label, loss, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(logits + row * cols + c, mask=c < cols, other=-float("inf"))
    top = tl.max(v, 0)
    lse = tl.log(tl.sum(tl.exp(v - top), 0)) + top
    tl.store(loss + row, lse - tl.load(logits + row * cols + tl.load(label + row)))


ROW = {"cols": "i32", "BLOCK": "constexpr"}
BUILDS = {
    "row_sum": dict(fn=row_sum, signature={"x": "*fp32", "out": "*fp32", **ROW}, constexprs={"BLOCK": 512}),
    "softmax": dict(fn=softmax, signature={"x": "*fp32", "out": "*fp32", **ROW}, constexprs={"BLOCK": 1024}),
    "softmax_unaligned": dict(
        fn=softmax, signature={"x": "*fp32", "out": "*fp32", **ROW}, constexprs={"BLOCK": 256}, aligned=()
    ),
    "rmsnorm": dict(
        fn=rmsnorm,
        signature={"x": "*fp16", "w": "*fp16", "eps": "fp32", **ROW},
        constexprs={"BLOCK": 1024},
        aligned=("x", "w", "cols"),
    ),
    "layernorm_residual": dict(
        fn=layernorm_residual,
        signature={
            "x": "*fp32",
            "residual": "*fp32",
            "w": "*fp32",
            "b": "*fp32",
            "out": "*fp32",
            "cols": "i32",
            "eps": "fp32",
            "BLOCK": "constexpr",
        },
        constexprs={"BLOCK": 256},
    ),
    "rope": dict(
        fn=rope,
        signature={"q": "*fp32", "cosine": "*fp32", "sine": "*fp32", "heads": "i32", "HALF": "constexpr"},
        constexprs={"HALF": 32},
        num_warps=1,
    ),
    "argmax": dict(fn=argmax, signature={"x": "*fp32", "out": "*i32", **ROW}, constexprs={"BLOCK": 512}),
    "column_sum": dict(
        fn=column_sum,
        signature={
            "x": "*fp32",
            "out": "*fp32",
            "rows": "i32",
            "cols": "i32",
            "ROWS": "constexpr",
            "COLS": "constexpr",
        },
        constexprs={"ROWS": 32, "COLS": 32},
    ),
    "cumsum": dict(fn=cumsum, signature={"x": "*fp32", "out": "*fp32", **ROW}, constexprs={"BLOCK": 256}),
    "cross_entropy": dict(
        fn=cross_entropy,
        signature={"logits": "*fp32", "label": "*i32", "loss": "*fp32", **ROW},
        constexprs={"BLOCK": 512},
    ),
}
