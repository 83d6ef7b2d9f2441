"""`tessera gpus`: which sources cover the costs of every GPU."""

from pathlib import Path

import pytest

from commands import answer
from tables_factory import made_tables, write_table
from tessera.cli import _main
from tessera.profile import GPUS, OpClass


def test_every_gpu_says_which_source_covers_each_class(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tables, a measured GPU has fitted GEMMs and an unmeasured one has the class model."""
    monkeypatch.setattr("tessera.cli.gpus.profile.installed_tables", lambda: None)
    found = {row["name"]: row["sources"] for row in answer("gpus", capsys=capsys)["gpus"]}

    assert ("fitted", "class") == (found["a100"]["gemm"], found["h20"]["gemm"])
    assert all(set(OpClass) - {OpClass.ALLOCATION} == row.keys() for row in found.values())


def test_the_list_fits_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for nearly every GPU, and no column so narrow that words are broken."""
    monkeypatch.setenv("COLUMNS", "80")
    assert 0 == _main(["gpus"])
    out, _ = capsys.readouterr()
    lines = out.splitlines()

    assert max(map(len, lines)) <= 80
    assert ["name", "memory", "TFLOP/s", "GB/s", "USD/h", "costs", "borrows"] == lines[1].split()
    num_gpus = len(GPUS)
    assert set(GPUS) <= {line.split()[0] for line in lines[2:] if line.strip()}
    assert len(lines) < num_gpus + 16


def test_one_gpu_in_full_lists_tables_and_those_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tessera gpus NAME` names the table of a class, its error, and the tables that are not used."""
    write_table(tmp_path, "a100", OpClass.GEMM, "sglang", card="B200")
    write_table(tmp_path, "a100", OpClass.GEMM, "vllm")
    monkeypatch.setattr("tessera.cli.gpus.profile.installed_tables", lambda: made_tables(tmp_path))
    found = answer("gpus", "a100", capsys=capsys)
    (row,) = [c for c in found["coverage"] if c["source"] == "table"]

    assert ("gemm", "16 bits", True) == (row["op"], row["dtypes"], 0 <= row["rel_error"] < 0.3)
    assert "points of vllm 1.0.0" in row["why"]
    assert "timed on NVIDIA B200" in " ".join(found["rejected_tables"].values())
    assert "table" == found["sources"]["gemm"]


def test_people_are_told_how_to_install_the_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, the card of a GPU that has tables ends with the line that installs them."""
    monkeypatch.setattr("tessera.cli.gpus.profile.installed_tables", lambda: None)

    assert 0 == _main(["gpus", "l40s"])
    assert 'pip install "tessera-gpu[tables]"' in capsys.readouterr().out.replace("\n", " ")
