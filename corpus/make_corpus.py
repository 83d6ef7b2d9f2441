"""Make the corpus's PTX anew: `python corpus/make_corpus.py [--only NAME] [--table] [--docs]`.

    cuda/*.cu       -> ptx/<arch>/<file>.ptx     by nvcc (found on PATH or by $NVCC)
    triton_src/*.py -> ptx/<arch>/<build>.ptx    by Triton, without a GPU
    hand/*.ptx      are sources themselves
    golden/*.txt    -> truth.json

A compiler that this machine does not have is named and skipped; its files stay as they are. What is
written is free of the machine's paths: `.file` keeps base names only, and debug sections are cut, except
in the files of KEEP_DEBUG, which exist so that the parser meets them. `--table` prints the accuracy table
of docs/ptx-corpus.md and makes nothing.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # pinned: the default changes between releases

import golden

ARCHS = golden.ARCHS
FROM_SM_90 = {"tma", "hopper"}  # CUDA files whose instructions older architectures lack
KEEP_DEBUG = {"debug_info", "row_sum"}
COMP_DIR = re.compile(r"(\.b8 )\d+( +// DW_AT_comp_dir\n)((?:\.b8 \d+\n)*?)(\.b8 0\n)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="make only files whose name contains this")
    parser.add_argument("--table", action="store_true", help="print the accuracy table, make nothing")
    parser.add_argument(
        "--docs", action="store_true", help="print the table and put it into docs/ptx-corpus.md"
    )
    options = parser.parse_args()
    if options.table or options.docs:
        import table

        text = table.render()
        print(text)
        if options.docs:
            table.write_docs(text)
        return 0
    for arch in ARCHS:
        (HERE / "ptx" / arch).mkdir(parents=True, exist_ok=True)
    made = make_cuda(options.only) + make_triton(options.only)
    golden.write_truth()
    print(f"made {made} files")
    return 0


def make_cuda(only: str) -> int:
    """Compile every CUDA file for every architecture it can have."""
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None:
        print("skipped cuda/: no nvcc on this machine")
        return 0
    made = 0
    for source in sorted((HERE / "cuda").glob("*.cu")):
        for arch in ARCHS if source.stem not in FROM_SM_90 else ("sm_90",):
            if only not in source.stem:
                continue
            flags = ["-lineinfo"] if source.stem in KEEP_DEBUG else []
            out = HERE / "ptx" / arch / f"{source.stem}.ptx"
            command = [nvcc, "-ptx", f"-arch={arch}", *flags, "-o", str(out), source.name]
            subprocess.run(command, check=True, cwd=source.parent)
            out.write_text(clean(out.read_text(), keep_debug=True))
            made += 1
    return made


def make_triton(only: str) -> int:
    """Compile every Triton build for every architecture."""
    if importlib.util.find_spec("triton") is None:
        print("skipped triton_src/: no triton in this environment")
        return 0
    made = 0
    for source in sorted((HERE / "triton_src").glob("*.py")):
        for name, build in load(source).BUILDS.items():
            for arch in ARCHS if only in name else ():
                text = clean(compile_triton(build, int(arch.removeprefix("sm_"))), name in KEEP_DEBUG)
                (HERE / "ptx" / arch / f"{name}.ptx").write_text(text)
                made += 1
    return made


def load(path: Path) -> Any:
    """Import one file of triton_src/ by its path."""
    spec = importlib.util.spec_from_file_location(f"corpus_triton_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_triton(build: dict[str, Any], capability: int) -> str:
    """PTX of one build; pointers and integers divide by 16 unless `aligned` names those that do."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = build["signature"]
    names = list(signature)
    plain = [n for n in names if signature[n][0] == "*" or signature[n] in ("i32", "i64")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in build.get("aligned", plain)}
    constexprs = {(names.index(n),): value for n, value in build["constexprs"].items()}
    source = ASTSource(build["fn"], signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": build.get("num_warps", 4), "num_stages": build.get("num_stages", 2)}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(kernel.asm["ptx"])


def clean(text: str, keep_debug: bool) -> str:
    """The text without paths of this machine and, unless asked to keep them, without debug sections."""
    text = re.sub(r'(\.file\s+\d+\s+")(?:[^"]*/)?([^"/]*")\s*(?:"([^"]*)")?', _base_name, text)
    if keep_debug:
        return COMP_DIR.sub(lambda m: f"{m[1]}46{m[2]}" + ".b8 46\n" * m[3].count("\n") + m[4], text)
    # `.loc` names its inlined function by a label of the string section, which goes.
    text = re.sub(r"(\.loc\s+\d+ \d+ \d+), function_name [^\n/]*", r"\1", text)
    return re.sub(r"\n\s*\.section\s+\.debug_\w+\s*\{[^}]*\}", "", text)


def _base_name(found: re.Match[str]) -> str:
    last = found[3].rsplit("/", 1)[-1] + '"' if found[3] else found[2]
    return f"{found[1]}{last}" + "\n" * found[0].count("\n")


if __name__ == "__main__":
    raise SystemExit(main())
