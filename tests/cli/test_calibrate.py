"""tessera calibrate, for real on this machine's CPU."""

import json
from pathlib import Path

import pytest

from tessera.cli import main
from tessera.profile.corrections import calibration_of, load


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration_of.cache_clear()


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as end:
        main(["calibrate", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.rerun("other work on the machine changes what is measured")
def test_a_few_launches_of_the_cpu_are_measured_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """So many at most, the most of the time; what is known does not make the rest less sure."""
    code, out, err = run("cpu", "--launches", "8", "--json", capsys=capsys)
    assert 0 == code, err
    found = json.loads(out)

    assert 3 <= found["measured"] <= 8
    assert found["share"] > 0.2
    assert found["error_after"] < 1.2 * found["error_before"]
    assert found["measured"] == len(load(Path(found["output"])).rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["emu:l40s"], "is no whole device of this machine"),
        (["cpu", "--launches", "0"], "--launches"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the remedy."""
    code, _, err = run(*words, capsys=capsys)

    assert 2 == code
    assert message in " ".join(err.split())
