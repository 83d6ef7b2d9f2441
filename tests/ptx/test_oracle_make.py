"""The corpus can be made anew where a compiler is at hand; each test skips, by name, where it is not."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera_ptx import analyze

CORPUS = Path(__file__).resolve().parents[2] / "corpus"
sys.path.insert(0, str(CORPUS))
checks: Any = importlib.import_module("checks")
make_corpus: Any = importlib.import_module("make_corpus")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def flags(text: str) -> dict[str, list[tuple[int, int, bool, bool, bool]]]:
    """What the analysis says of each kernel of a text."""
    return {
        report.name: [(a.param, a.offset, a.read, a.write, a.atomic) for a in report.accesses]
        for report in analyze(text)
    }


@needs_nvcc
def test_nvcc_makes_the_same_kernels(tmp_path: Path) -> None:
    """A CUDA file compiled now has the kernels and accesses of the checked-in PTX."""
    out = tmp_path / "pointer_in_shared.ptx"
    source = CORPUS / "cuda" / "pointer_in_shared.cu"
    subprocess.run(["nvcc", "-ptx", "-arch=sm_80", "-o", str(out), str(source)], check=True)

    assert flags(checks.text_of("ptx/sm_80/pointer_in_shared.ptx")) == flags(out.read_text())


@needs_triton
def test_triton_makes_the_same_kernel() -> None:
    """A Triton build compiled now has the accesses of the checked-in PTX."""
    build = make_corpus.load(CORPUS / "triton_src" / "memory.py").BUILDS["select_ptr"]
    text = make_corpus.compile_triton(build, 80)

    assert flags(checks.text_of("ptx/sm_80/select_ptr.ptx")) == flags(text)


def test_paths_are_cut_from_ptx() -> None:
    """`clean` leaves base names in .file, cuts debug sections and what refers to them."""
    text = '.file 1 "/home/someone" "k.py"\n.loc 1 2 3, function_name $L__info_string0, inlined_at 1 4 5\n'
    text += "ret;\n.section .debug_str\n{\n$L__info_string0:\n.b8 1\n}\n"
    cleaned = make_corpus.clean(text, keep_debug=False)

    assert '.file 1 "k.py"' in cleaned
    assert ".loc 1 2 3\n" in cleaned
    assert "info_string" not in cleaned
