"""Tensor descriptors: made on the device from a pointer, and handed over by the host.

Before sm_90 both are lowered to plain loads and stores, and the host's descriptor becomes a pointer,
shapes and strides: the parameter list differs between architectures.
"""

import triton
import triton.language as tl


@triton.jit
def tma_device_desc(a, c, m, n, BM: tl.constexpr, BN: tl.constexpr):
    src = tl.make_tensor_descriptor(a, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    dst = tl.make_tensor_descriptor(c, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    y = tl.program_id(0) * BM
    x = tl.program_id(1) * BN
    dst.store([y, x], src.load([y, x]) * 2.0)


@triton.jit
def tma_host_desc(a, b, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    y = tl.program_id(0) * BM
    x = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        acc = tl.dot(a.load([y, start]), b.load([start, x]), acc)
    c.store([y, x], acc.to(tl.float16))


@triton.jit
def tma_device_matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    da = tl.make_tensor_descriptor(a, shape=[m, k], strides=[k, 1], block_shape=[BM, BK])
    db = tl.make_tensor_descriptor(b, shape=[k, n], strides=[n, 1], block_shape=[BK, BN])
    dc = tl.make_tensor_descriptor(c, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    y = tl.program_id(0) * BM
    x = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        acc = tl.dot(da.load([y, start]), db.load([start, x]), acc)
    dc.store([y, x], acc.to(tl.float16))


BUILDS = {
    "tma_device_desc": dict(
        fn=tma_device_desc,
        signature={"a": "*fp32", "c": "*fp32", "m": "i32", "n": "i32", "BM": "constexpr", "BN": "constexpr"},
        constexprs={"BM": 32, "BN": 32},
    ),
    "tma_host_desc": dict(
        fn=tma_host_desc,
        signature={
            "a": "tensordesc<fp16[64,32]>",
            "b": "tensordesc<fp16[32,64]>",
            "c": "tensordesc<fp16[64,64]>",
            "k": "i32",
            "BM": "constexpr",
            "BN": "constexpr",
            "BK": "constexpr",
        },
        constexprs={"BM": 64, "BN": 64, "BK": 32},
        aligned=(),
    ),
    "tma_device_matmul": dict(
        fn=tma_device_matmul,
        signature={
            "a": "*fp16",
            "b": "*fp16",
            "c": "*fp16",
            "m": "i32",
            "n": "i32",
            "k": "i32",
            "BM": "constexpr",
            "BN": "constexpr",
            "BK": "constexpr",
        },
        constexprs={"BM": 64, "BN": 64, "BK": 32},
    ),
}
