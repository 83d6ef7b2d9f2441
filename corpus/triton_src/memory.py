"""What is hard to follow: atomics, pointers that are chosen or loaded, indices that look like pointers."""

import triton
import triton.language as tl


@triton.jit
def histogram(idx, hist, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.atomic_add(hist + tl.load(idx + i, mask=m, other=0), 1, mask=m)


@triton.jit
def scatter_add(values, idx, out, n, BLOCK: tl.constexpr):
    """The pointers change their layout between load and use, so they travel through shared memory."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, 16)
    m = i < n
    where = tl.load(idx + i, mask=m, other=0)
    v = tl.load(values + i[:, None] * 16 + d[None, :], mask=m[:, None], other=0.0)
    tl.atomic_add(out + where[:, None] * 16 + d[None, :], v, mask=m[:, None])


@triton.jit
def tickets(x, counts, ticket, n, BLOCK: tl.constexpr):
    """Pointers go, and numbers come back, through the same bytes of shared memory."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    taken = tl.atomic_add(counts + tl.load(x + i, mask=m, other=0), 1, mask=m)
    tl.store(ticket + i, taken, mask=m)


@triton.jit
def scatter_product(a, b, rows, out, k, stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The pointers take the place of the factors of a product in shared memory."""
    i, j, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for begin in range(0, k, K):
        left = tl.load(a + i[:, None] * k + begin + d[None, :])
        total += tl.dot(left, tl.load(b + (begin + d)[:, None] * N + j[None, :]))
    tl.atomic_add(out + tl.load(rows + i)[:, None] * stride + j[None, :], total)


@triton.jit
def atomic_kinds(x, top, low, bits, lock, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + i, mask=m, other=0)
    tl.atomic_max(top + i % 4, v, mask=m)
    tl.atomic_min(low + i % 4, v, mask=m)
    tl.atomic_or(bits + i % 4, v, mask=m)
    tl.atomic_xchg(lock + tl.program_id(0), 7)


@triton.jit
def compare_and_swap(lock, out):
    old = tl.atomic_cas(lock, 0, 1)
    tl.store(out + tl.program_id(0), old)


@triton.jit
def select_ptr(a, b, out, flag, n, BLOCK: tl.constexpr):
    p = a if flag > 0 else b
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(p + i, mask=m), mask=m)


@triton.jit
def select_store(a, b, x, flag, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + i, mask=m)
    if flag > 3:
        tl.store(a + i, v, mask=m)
    else:
        tl.store(b + i, v * 2.0, mask=m)


@triton.jit
def ptr_table(table, out, n, BLOCK: tl.constexpr):
    p = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float16))
    i = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * n + i, tl.load(p + i, mask=i < n), mask=i < n)


@triton.jit
def paged_gather(pages, table, out, dim, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    page = tl.load(table + token // PAGE)
    c = tl.arange(0, BLOCK)
    row = tl.load(pages + (page.to(tl.int64) * PAGE + token % PAGE) * dim + c, mask=c < dim)
    tl.store(out + token * dim + c, row, mask=c < dim)


@triton.jit
def gather_i64(x, idx, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(x + tl.load(idx + i, mask=m, other=0), mask=m), mask=m)


@triton.jit
def swap_buffers(a, b, steps, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    src = a + i
    dst = b + i
    for _ in range(0, steps):
        tl.store(dst, tl.load(src) * 0.5)
        tl.debug_barrier()
        src, dst = dst, src


FLAT = {"n": "i32", "BLOCK": "constexpr"}
BUILDS = {
    "histogram": dict(
        fn=histogram, signature={"idx": "*i32", "hist": "*i32", **FLAT}, constexprs={"BLOCK": 256}
    ),
    "scatter_add": dict(
        fn=scatter_add,
        signature={"values": "*fp32", "idx": "*i32", "out": "*fp32", **FLAT},
        constexprs={"BLOCK": 64},
    ),
    "tickets": dict(
        fn=tickets,
        signature={"x": "*i64", "counts": "*i32", "ticket": "*i32", **FLAT},
        constexprs={"BLOCK": 128},
        num_warps=1,
    ),
    "scatter_product": dict(
        fn=scatter_product,
        signature={
            "a": "*fp16",
            "b": "*fp16",
            "rows": "*i64",
            "out": "*fp32",
            "k": "i32",
            "stride": "i64",
            "M": "constexpr",
            "N": "constexpr",
            "K": "constexpr",
        },
        constexprs={"M": 32, "N": 32, "K": 16},
        num_warps=1,
    ),
    "atomic_kinds": dict(
        fn=atomic_kinds,
        signature={"x": "*i32", "top": "*i32", "low": "*i32", "bits": "*i32", "lock": "*i32", **FLAT},
        constexprs={"BLOCK": 128},
    ),
    "compare_and_swap": dict(fn=compare_and_swap, signature={"lock": "*i32", "out": "*i32"}, constexprs={}),
    "select_ptr": dict(
        fn=select_ptr,
        signature={"a": "*fp32", "b": "*fp32", "out": "*fp32", "flag": "i32", **FLAT},
        constexprs={"BLOCK": 256},
    ),
    "select_store": dict(
        fn=select_store,
        signature={"a": "*fp32", "b": "*fp32", "x": "*fp32", "flag": "i32", **FLAT},
        constexprs={"BLOCK": 256},
    ),
    "ptr_table": dict(
        fn=ptr_table, signature={"table": "*i64", "out": "*fp16", **FLAT}, constexprs={"BLOCK": 128}
    ),
    "paged_gather": dict(
        fn=paged_gather,
        signature={
            "pages": "*fp16",
            "table": "*i32",
            "out": "*fp16",
            "dim": "i32",
            "PAGE": "constexpr",
            "BLOCK": "constexpr",
        },
        constexprs={"PAGE": 16, "BLOCK": 128},
        aligned=("pages", "table", "out"),
    ),
    "gather_i64": dict(
        fn=gather_i64,
        signature={"x": "*fp32", "idx": "*i64", "out": "*fp32", **FLAT},
        constexprs={"BLOCK": 128},
    ),
    "swap_buffers": dict(
        fn=swap_buffers,
        signature={"a": "*fp32", "b": "*fp32", "steps": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 128},
    ),
}
