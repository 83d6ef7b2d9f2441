"""How fast the PTX analyzer is: lines per second, milliseconds per kernel, growth with kernel length.

    python benchmarks/bench_ptx.py [PATH ...] [--json]      PATH: PTX files or folders; default corpus/ptx

Every file is analyzed from its text (parse, control flow, values, extents), without the cache. Growth is
measured on generated kernels of 1,000 and 50,000 lines: straight unrolled code, code with many branches,
code with many loops, and code that swaps pointers in stack microbatches; the figure is time per line of the
long one over the short one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tessera_ptx import analyze

_HEAD = """.version 8.0
.target sm_80
.address_size 64
.visible .entry grown(.param .u64 p0, .param .u64 p1, .param .u32 n)
{
    .reg .pred %p<N>;
    .reg .b32 %r<N>;
    .reg .f32 %f<N>;
    .reg .b64 %rd<N>;
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    ld.param.u32 %r1, [n];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mad.lo.s32 %r5, %r3, %r4, %r2;
    mov.u64 %rd5, %rd3;
"""


def straight(num_lines: int) -> str:
    """Unrolled loads, arithmetic and stores."""
    lines = []
    for k in range(10, 10 + num_lines // 6):
        lines += [
            f"add.s32 %r{k}, %r5, {k};",
            f"mul.wide.s32 %rd{k}, %r{k}, 4;",
            f"add.s64 %rd{k + num_lines}, %rd3, %rd{k};",
            f"ld.global.f32 %f{k}, [%rd{k + num_lines}];",
            f"fma.rn.f32 %f{k + num_lines}, %f{k}, %f{k}, %f{k};",
            f"st.global.f32 [%rd{k + num_lines}+{4 * (k % 100)}], %f{k + num_lines};",
        ]
    return _kernel(lines, num_lines)


def branchy(num_lines: int) -> str:
    """A diamond every eight lines; the pointer is chosen in each."""
    lines = []
    for k in range(10, 10 + num_lines // 8):
        lines += [
            f"setp.lt.s32 %p{k}, %r5, {k};",
            f"@%p{k} bra $A{k};",
            "mov.u64 %rd5, %rd3;",
            f"bra.uni $B{k};",
            f"$A{k}: mov.u64 %rd5, %rd4;",
            f"$B{k}: add.s64 %rd{k}, %rd5, {4 * k};",
            f"ld.global.f32 %f{k}, [%rd{k}];",
            f"st.global.f32 [%rd{k}+4], %f{k};",
        ]
    return _kernel(lines, num_lines)


def loopy(num_lines: int) -> str:
    """A loop every eight lines that walks the pointer."""
    lines = []
    for k in range(10, 10 + num_lines // 8):
        lines += [
            f"mov.u32 %r{k}, 0;",
            f"$L{k}: ld.global.f32 %f{k}, [%rd5];",
            f"add.s32 %r{k}, %r{k}, 1;",
            "add.s64 %rd5, %rd5, 4;",
            f"st.global.f32 [%rd5+{k}], %f{k};",
            f"setp.lt.s32 %p{k}, %r{k}, %r1;",
            f"@%p{k} bra $L{k};",
            "mov.u64 %rd5, %rd3;",
        ]
    return _kernel(lines, num_lines)


def spilled(num_lines: int) -> str:
    """Two pointers that change places in stack microbatches every six lines."""
    lines = [
        ".local .align 8 .b8 microbatches[16];",
        "st.local.u64 [microbatches], %rd1;",
        "st.local.u64 [microbatches+8], %rd2;",
    ]
    for k in range(10, 10 + num_lines // 6):
        lines += [
            f"ld.local.u64 %rd{k}, [microbatches];",
            f"ld.local.u64 %rd{k + num_lines}, [microbatches+8];",
            f"ld.f32 %f{k}, [%rd{k}];",
            f"st.f32 [%rd{k}+4], %f{k};",
            f"st.local.u64 [microbatches], %rd{k + num_lines};",
            f"st.local.u64 [microbatches+8], %rd{k};",
        ]
    return _kernel(lines, num_lines)


def _kernel(lines: list[str], size: int) -> str:
    return _HEAD.replace("N>", f"{2 * size + 64}>") + "\n".join(lines) + "\nret;\n}\n"


def seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The best of a few runs, in processor time."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        action()
        best = min(best, time.process_time() - begin)
    return best


def corpus_rows(paths: list[Path]) -> list[dict[str, float | str]]:
    """One row per file."""
    rows: list[dict[str, float | str]] = []
    for path in paths:
        text = path.read_text()
        took = seconds(lambda text=text: analyze(text))  # type: ignore[misc]
        kernels = len(analyze(text))
        rows.append({"file": path.name, "lines": text.count("\n"), "kernels": kernels, "ms": 1e3 * took})
    return rows


def growth_rows() -> list[dict[str, float | str]]:
    """Time per line at 1,000 and 50,000 lines."""
    rows: list[dict[str, float | str]] = []
    shapes = (
        ("straight", straight),
        ("branches", branchy),
        ("loops", loopy),
        ("stack microbatches", spilled),
    )
    for name, make in shapes:
        per_line = []
        for size in (1_000, 50_000):
            text = make(size)
            took = seconds(lambda text=text: analyze(text), 5 if size == 1_000 else 1)  # type: ignore[misc]
            per_line.append(1e6 * took / text.count("\n"))
        rows.append(
            {
                "code": name,
                "us_1000": per_line[0],
                "us_50000": per_line[1],
                "ratio": per_line[1] / per_line[0],
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("corpus/ptx")])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    files = [f for p in options.paths for f in (sorted(p.rglob("*.ptx")) if p.is_dir() else [p])]
    rows, growth = corpus_rows(files), growth_rows()
    lines = sum(float(r["lines"]) for r in rows)
    total_ms = sum(float(r["ms"]) for r in rows)
    kernels = sum(float(r["kernels"]) for r in rows)
    summary = {
        "files": len(rows),
        "lines": lines,
        "lines_per_s": 1e3 * lines / total_ms if total_ms else 0.0,
        "ms_per_kernel": total_ms / kernels if kernels else 0.0,
        "median_file_lines_per_s": statistics.median(
            [1e3 * float(r["lines"]) / float(r["ms"]) for r in rows] or [0.0]
        ),
    }
    if options.json:
        print(json.dumps({"summary": summary, "files": rows, "growth": growth}, indent=2))
        return 0
    print(f"{'file':40s} {'lines':>8s} {'kernels':>8s} {'ms':>9s} {'lines/s':>9s}")
    for row in rows:
        rate = 1e3 * float(row["lines"]) / float(row["ms"])
        print(f"{row['file']:40s} {row['lines']:8d} {row['kernels']:8d} {row['ms']:9.2f} {rate:9.0f}")
    print(
        f"\n{len(rows)} files, {lines:.0f} lines: {summary['lines_per_s']:.0f} lines/s, "
        f"{summary['ms_per_kernel']:.2f} ms per kernel\n"
    )
    print(f"{'growth':12s} {'us/line @1,000':>16s} {'us/line @50,000':>16s} {'ratio':>6s}")
    for row in growth:
        print(f"{row['code']:12s} {row['us_1000']:16.2f} {row['us_50000']:16.2f} {row['ratio']:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
