"""Attention and state-space kernels."""

import triton
import triton.language as tl


@triton.jit
def flash_forward(
    q,
    k,
    v,
    out,
    lse,
    scale,
    length,
    heads,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    head = tl.program_id(1)
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    base = head.to(tl.int64) * length * D
    qv = tl.load(q + base + rm[:, None] * D + rd[None, :], mask=rm[:, None] < length, other=0.0)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    stop = tl.minimum((tl.program_id(0) + 1) * BM, length) if CAUSAL else length
    for start in range(0, stop, BN):
        rn = start + tl.arange(0, BN)
        kv = tl.load(k + base + rn[None, :] * D + rd[:, None], mask=rn[None, :] < length, other=0.0)
        s = tl.dot(qv, kv) * scale
        seen = rn[None, :] < length
        if CAUSAL:
            seen = seen & (rm[:, None] >= rn[None, :])
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        fix = tl.exp(top - new)
        total = total * fix + tl.sum(p, 1)
        vv = tl.load(v + base + rn[:, None] * D + rd[None, :], mask=rn[:, None] < length, other=0.0)
        acc = tl.dot(p.to(vv.dtype), vv, acc * fix[:, None])
        top = new
    tl.store(
        out + base + rm[:, None] * D + rd[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=rm[:, None] < length,
    )
    tl.store(lse + head * length + rm, top + tl.log(total), mask=rm < length)


@triton.jit
def paged_decode(
    q,
    kcache,
    vcache,
    table,
    lengths,
    out,
    scale,
    heads,
    max_pages,
    PAGE: tl.constexpr,
    D: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    r = tl.arange(0, PAGE)
    length = tl.load(lengths + seq)
    qv = tl.load(q + (seq * heads + head) * D + d) * scale
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for page in range(0, tl.cdiv(length, PAGE)):
        block = tl.load(table + seq * max_pages + page).to(tl.int64)
        row = ((block * PAGE + r) * heads + head) * D
        seen = page * PAGE + r < length
        kv = tl.load(kcache + row[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        s = tl.where(seen, tl.sum(qv[None, :] * kv, 1), -float("inf"))
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp(s - new)
        fix = tl.exp(top - new)
        vv = tl.load(vcache + row[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        acc = acc * fix + tl.sum(p[:, None] * vv, 0)
        total = total * fix + tl.sum(p, 0)
        top = new
    tl.store(out + (seq * heads + head) * D + d, acc / total)


@triton.jit
def ssm_scan(x, dt, a, b, c, state, y, steps, channels, BLOCK: tl.constexpr, N: tl.constexpr):
    ch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    m = ch < channels
    h = tl.load(state + ch[:, None] * N + n[None, :], mask=m[:, None], other=0.0)
    av = tl.load(a + ch[:, None] * N + n[None, :], mask=m[:, None], other=0.0)
    for t in range(0, steps):
        step = tl.load(dt + t * channels + ch, mask=m, other=0.0)
        xv = tl.load(x + t * channels + ch, mask=m, other=0.0)
        bv = tl.load(b + t * N + n)
        cv = tl.load(c + t * N + n)
        h = h * tl.exp(step[:, None] * av) + (step * xv)[:, None] * bv[None, :]
        tl.store(y + t * channels + ch, tl.sum(h * cv[None, :], 1), mask=m)
    tl.store(state + ch[:, None] * N + n[None, :], h, mask=m[:, None])


@triton.jit
def kv_append(key, cache, slots, dim, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if slot >= 0:
        tl.store(cache + slot * dim + c, tl.load(key + token * dim + c, mask=c < dim), mask=c < dim)


def flash(dtype, causal):
    """One build of `flash_forward`."""
    signature = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}")
    signature |= {"lse": "*fp32", "scale": "fp32", "length": "i32", "heads": "i32"}
    signature |= dict.fromkeys(("BM", "BN", "D", "CAUSAL"), "constexpr")
    return dict(
        fn=flash_forward,
        signature=signature,
        constexprs={"BM": 64, "BN": 32, "D": 32, "CAUSAL": causal},
        aligned=("q", "k", "v", "out", "lse"),
    )


BUILDS = {
    "flash_forward": flash("fp16", False),
    "flash_forward_causal": flash("bf16", True),
    "paged_decode": dict(
        fn=paged_decode,
        signature={
            "q": "*fp32",
            "kcache": "*fp32",
            "vcache": "*fp32",
            "table": "*i32",
            "lengths": "*i32",
            "out": "*fp32",
            "scale": "fp32",
            "heads": "i32",
            "max_pages": "i32",
            "PAGE": "constexpr",
            "D": "constexpr",
        },
        constexprs={"PAGE": 16, "D": 32},
        aligned=("q", "kcache", "vcache", "table", "lengths", "out"),
    ),
    "ssm_scan": dict(
        fn=ssm_scan,
        signature={
            **dict.fromkeys(("x", "dt", "a", "b", "c", "state", "y"), "*fp32"),
            "steps": "i32",
            "channels": "i32",
            "BLOCK": "constexpr",
            "N": "constexpr",
        },
        constexprs={"BLOCK": 32, "N": 16},
        aligned=("x", "dt", "a", "b", "c", "state", "y"),
    ),
    "kv_append": dict(
        fn=kv_append,
        signature={"key": "*fp32", "cache": "*fp32", "slots": "*i32", "dim": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 128},
    ),
}
