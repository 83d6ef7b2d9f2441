"""A kernel's text for cards that launch it while the one before still runs."""

import re

import numpy as np

from ptx_factory import THREAD, make_module, pointers
from tessera.kernels.launch import overlapping
from tessera_ptx.interp import run

ADD = f"""{pointers(0, 1)}{THREAD}add.s64 %rd21, %rd11, %rd20;
add.s64 %rd22, %rd12, %rd20;
ld.global.f32 %f1, [%rd21];
add.f32 %f1, %f1, 0f3F800000;
st.global.f32 [%rd22], %f1;"""
PTX = make_module(ADD, "u64 u64")


def test_a_kernel_waits_before_anything_else() -> None:
    """The next kernel may be launched then."""
    body = overlapping(PTX, "k").split(".entry k", 1)[1].split("{", 1)[1]

    assert ["griddepcontrol.launch_dependents", "griddepcontrol.wait"] == re.findall(r"[^\s;]+", body)[:2]


def test_the_rest_of_the_text_is_the_same() -> None:
    """But for the target, which has to know the instruction."""
    found = re.sub(r"griddepcontrol\.\w+;", "", overlapping(PTX, "k")).split()

    assert PTX.split() == [re.sub(r"^sm_90$", re.search(r"sm_\d+", PTX)[0], word) for word in found]  # type: ignore[index]


def test_results_are_the_same() -> None:
    """In the interpreter."""
    results = []
    for text in (PTX, overlapping(PTX, "k")):
        x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
        results.append(run(text, "k", (2, 1, 1), (32, 1, 1), [x, y]).buffers)

    assert all(np.array_equal(a, b) for a, b in zip(*(r.values() for r in results), strict=True))


def test_an_older_target_becomes_one_that_knows_the_instruction() -> None:
    """PTX of an older target runs on newer cards."""
    text = overlapping(re.sub(r"sm_\d+", "sm_80", PTX), "k")

    assert "sm_90" in text
    assert "sm_80" not in text


def test_a_newer_target_stays() -> None:
    """It may have instructions of its own."""
    assert ".target sm_100a" in overlapping(re.sub(r"sm_\d+", "sm_100a", PTX), "k")


def test_text_of_an_older_version_is_launched_plainly() -> None:
    """Its assembler does not know the instruction."""
    assert "" == overlapping(re.sub(r"\.version\s+[\d.]+", ".version 7.4", PTX), "k")


def test_a_kernel_that_waits_itself_is_launched_plainly() -> None:
    """Where it waits is not known."""
    assert "" == overlapping(overlapping(PTX, "k"), "k")


def test_other_kernels_of_the_text_are_left() -> None:
    """A text may have several."""
    assert "" == overlapping(PTX, "j")
