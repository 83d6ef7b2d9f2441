"""Programs that read their values on the host, through the command line: refused, or shown by verifying."""

import json
from pathlib import Path

import pytest

import host_reads_model
from tessera.cli import _main


@pytest.mark.parametrize("name", ["summed", "branched", "masked", "counting"])
def test_capture_refuses_with_the_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the place, exit code 2, nothing written."""
    words = ["capture", f"host_reads_model:{name}", "--step", "call", "-o", str(tmp_path / "x.trace")]
    code = _main(words)
    err = capsys.readouterr().err

    assert 2 == code
    assert "host_reads_model.py:" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def baked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A trace that holds a value of the recorded request, of a model that computes it."""
    path = tmp_path / "baked.trace"
    assert 0 == _main(["capture", "host_reads_model:baked", "--step", "call", "-o", str(path)])
    monkeypatch.setattr(host_reads_model.Baked, "is_baked", False)
    capsys.readouterr()
    return path


def test_verify_shows_a_value_that_was_taken_for_a_constant(
    baked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded request comes out equal; others, of which the model was not told, do not."""
    code = _main(["verify", str(baked), "--orders", "1", "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)

    assert 2 == code
    assert ([], 0) == (found["legal"]["program_order_differs"], found["fresh"]["equal"])
    assert "do not give what the model itself gives: output" in err


def test_run_compares_fresh_requests_with_the_model_itself(
    baked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay of the recording would say that all is equal."""
    plan = tmp_path / "baked.plan"
    assert 0 == _main(["plan", str(baked), "--devices", "emu:a100,emu:l40s", "-o", str(plan)])
    capsys.readouterr()
    code = _main(["run", str(plan), "--verify", "--requests", "2", "--json"])
    out, err = capsys.readouterr()

    assert 2 == code
    assert "differs from the model itself" in err
    assert ("the model itself", "drawn like the example") == tuple(
        json.loads(out)[key] for key in ("reference", "inputs")
    )
