"""Kernels that are launched while the one before still runs (programmatic dependent launches, since Hopper).

Every program first calls `wait_previous`: a kernel's end is then after the end of all before.
"""

import triton
import triton.language as tl


@triton.jit
def wait_previous(OVERLAPS: tl.constexpr):
    """Waits for the end of the kernel before."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_next(OVERLAPS: tl.constexpr):
    """Lets the next kernel be launched as soon as all programs of this one run."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def overlap(OVERLAPS: tl.constexpr):
    launch_next(OVERLAPS)
    wait_previous(OVERLAPS)


@triton.jit
def fetch_early(place, LINES: tl.constexpr):
    """Brings lines of 128 bytes into the card's cache, which has no effect on what is read later."""
    places = place.to(tl.int64)[:, None] + 128 * tl.arange(0, LINES)[None, :]
    CODE: tl.constexpr = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(CODE, "=r,l", [places], tl.int32, is_pure=False, pack=1)
