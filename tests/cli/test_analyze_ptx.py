"""`tessera analyze FILE.ptx`: what kernels read and write, for machines and for people."""

import json
from pathlib import Path

import pytest

from tessera.cli import _main
from tessera_ptx.store import forget

AXPY = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .f32 a)
{
    .reg .b32 %r<3>; .reg .f32 %f<4>; .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.f32 %f1, [a];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    ld.global.f32 %f3, [%rd5];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%rd5], %f3;
    ret;
}
"""


@pytest.fixture
def ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of PTX, and a cache of its own."""
    forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "axpy.ptx"
    path.write_text(AXPY)
    return path


def test_json_names_every_access(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """x is read, y is read and written, a is no buffer."""
    assert 0 == _main(["analyze", str(ptx), "--json"])
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]

    assert ("axpy", "sm_80", True, []) == tuple(kernel[k] for k in ("name", "arch", "movable", "why"))
    flags = [(a["param"], a["offset"], a["read"], a["write"], a["atomic"]) for a in kernel["accesses"]]
    assert [(0, 0, True, False, False), (1, 0, True, True, False)] == flags
    assert all(a["extent"] for a in kernel["accesses"])
    assert [] == kernel["symbols"] == kernel["indirect"]


def test_people_get_a_sentence(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table ends in words."""
    assert 0 == _main(["analyze", str(ptx)])

    assert "axpy reads param 0, param 1; writes param 1" in capsys.readouterr().out


def test_explain_shows_source_lines(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every access comes with the instruction that makes it."""
    assert 0 == _main(["analyze", str(ptx), "--explain", "axpy"])

    assert "st.global.f32 [%rd5], %f3;" in capsys.readouterr().out


def test_a_second_look_is_answered_from_the_cache(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results are kept by the hash of the PTX, and are the same."""
    assert 0 == _main(["analyze", str(ptx), "--json"])
    first = capsys.readouterr().out
    kept = list((ptx.parent / "cache" / "tessera" / "ptx").iterdir())
    assert 0 == _main(["analyze", str(ptx), "--json"])

    assert first == capsys.readouterr().out
    assert 1 == len(kept)


def test_an_unknown_kernel_answers_with_the_known_ones(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo in --explain lists the module's kernels."""
    assert 2 == _main(["analyze", str(ptx), "--explain", "axpi"])

    assert "unknown kernel 'axpi'; known: axpy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "contents", [b"", b"\x7fELF\x00\x00", AXPY[:300].encode(), b"ld.global.f32 %f1, [%rd1;\n"]
)
def test_broken_ptx_is_an_error_with_its_place(
    ptx: Path, contents: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty, binary, truncated or garbled text names file, line and column."""
    ptx.write_bytes(contents)
    code = _main(["analyze", str(ptx), "--json"])
    err = capsys.readouterr().err

    assert 2 == code
    assert "axpy.ptx:" in err
    assert "Traceback" not in err
