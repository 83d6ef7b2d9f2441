"""Matrix products: plain, persistent, grouped experts, dequantised weights, split over K, sums by atomics."""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, m, n, k, sam, sbk, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        kk = start + rk
        av = tl.load(
            a + rm[:, None] * sam + kk[None, :], mask=(rm[:, None] < m) & (kk[None, :] < k), other=0.0
        )
        bv = tl.load(
            b + kk[:, None] * sbk + rn[None, :], mask=(kk[:, None] < k) & (rn[None, :] < n), other=0.0
        )
        acc = tl.dot(av, bv, acc)
    mask = (rm[:, None] < m) & (rn[None, :] < n)
    tl.store(c + rm[:, None] * scm + rn[None, :], acc.to(c.dtype.element_ty), mask=mask)


@triton.jit
def matmul_persistent(
    a, b, c, m, n, k, NUM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    tiles_n = tl.cdiv(n, BN)
    tiles = tl.cdiv(m, BM) * tiles_n
    for tile in range(tl.program_id(0), tiles, NUM):
        rm = (tile // tiles_n) * BM + tl.arange(0, BM)
        rn = (tile % tiles_n) * BN + tl.arange(0, BN)
        rk = tl.arange(0, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, k, BK):
            kk = start + rk
            av = tl.load(
                a + rm[:, None] * k + kk[None, :], mask=(rm[:, None] < m) & (kk[None, :] < k), other=0.0
            )
            bv = tl.load(
                b + kk[:, None] * n + rn[None, :], mask=(kk[:, None] < k) & (rn[None, :] < n), other=0.0
            )
            acc = tl.dot(av, bv, acc)
        mask = (rm[:, None] < m) & (rn[None, :] < n)
        tl.store(c + rm[:, None] * n + rn[None, :], acc.to(tl.float16), mask=mask)


@triton.jit
def moe_gather_gemm(
    tokens,
    weights,
    out,
    sorted_ids,
    expert_ids,
    dim,
    ffn,
    num_valid,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    expert = tl.load(expert_ids + tl.program_id(0)).to(tl.int64)
    token = tl.load(sorted_ids + rows)
    valid = token < num_valid
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, dim, BK):
        kk = start + tl.arange(0, BK)
        av = tl.load(
            tokens + token[:, None] * dim + kk[None, :], mask=valid[:, None] & (kk < dim)[None, :], other=0.0
        )
        bv = tl.load(
            weights + expert * dim * ffn + kk[:, None] * ffn + rn[None, :],
            mask=(kk < dim)[:, None] & (rn < ffn)[None, :],
            other=0.0,
        )
        acc = tl.dot(av, bv, acc)
    tl.store(
        out + token[:, None] * ffn + rn[None, :],
        acc.to(tl.float16),
        mask=valid[:, None] & (rn < ffn)[None, :],
    )


@triton.jit
def matmul_split_k(
    a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr
):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(tl.program_id(2) * BK, k, BK * SPLIT):
        kk = start + tl.arange(0, BK)
        av = tl.load(a + rm[:, None] * k + kk[None, :], mask=(rm[:, None] < m) & (kk[None, :] < k), other=0.0)
        bv = tl.load(b + kk[:, None] * n + rn[None, :], mask=(kk[:, None] < k) & (rn[None, :] < n), other=0.0)
        acc = tl.dot(av, bv, acc)
    tl.atomic_add(c + rm[:, None] * n + rn[None, :], acc, mask=(rm[:, None] < m) & (rn[None, :] < n))


@triton.jit
def gemv_int8(w, x, scale, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        m = c < cols
        acc += tl.load(w + row * cols + c, mask=m, other=0).to(tl.float32) * tl.load(x + c, mask=m, other=0.0)
    tl.store(out + row, tl.sum(acc, 0) * tl.load(scale + row))


SIZES = {"m": "i32", "n": "i32", "k": "i32"}
TILE = {"BM": "constexpr", "BN": "constexpr", "BK": "constexpr"}
SMALL = {"BM": 32, "BN": 32, "BK": 32}


def product(dtype, out, tile):
    """One build of `matmul` for its dtypes and tile."""
    signature = {
        "a": f"*{dtype}",
        "b": f"*{dtype}",
        "c": f"*{out}",
        **SIZES,
        "sam": "i32",
        "sbk": "i32",
        "scm": "i32",
    }
    return dict(fn=matmul, signature={**signature, **TILE}, constexprs=tile)


BUILDS = {
    "matmul_f16": product("fp16", "fp16", {"BM": 64, "BN": 64, "BK": 32}),
    "matmul_bf16": product("bf16", "fp32", SMALL),
    "matmul_tf32": product("fp32", "fp32", SMALL),
    "matmul_persistent": dict(
        fn=matmul_persistent,
        signature={"a": "*fp16", "b": "*fp16", "c": "*fp16", **SIZES, "NUM": "constexpr", **TILE},
        constexprs={"NUM": 4, **SMALL},
    ),
    "moe_gather_gemm": dict(
        fn=moe_gather_gemm,
        signature={
            "tokens": "*fp16",
            "weights": "*fp16",
            "out": "*fp16",
            "sorted_ids": "*i32",
            "expert_ids": "*i32",
            "dim": "i32",
            "ffn": "i32",
            "num_valid": "i32",
            **TILE,
        },
        constexprs={"BM": 16, "BN": 32, "BK": 32},
        aligned=("tokens", "weights", "out", "sorted_ids", "expert_ids", "dim", "ffn"),
    ),
    "matmul_split_k": dict(
        fn=matmul_split_k,
        signature={"a": "*bf16", "b": "*bf16", "c": "*fp32", **SIZES, **TILE, "SPLIT": "constexpr"},
        constexprs={**SMALL, "SPLIT": 2},
    ),
    "gemv_int8": dict(
        fn=gemv_int8,
        signature={
            "w": "*i8",
            "x": "*fp32",
            "scale": "*fp32",
            "out": "*fp32",
            "cols": "i32",
            "BLOCK": "constexpr",
        },
        constexprs={"BLOCK": 256},
    ),
}
