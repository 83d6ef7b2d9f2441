"""The store: what is kept between commands, and what is refused."""

import json
from pathlib import Path

import pytest

from tessera.errors import ArtifactError, TesseraError
from tessera.profile.store import Machine, Store, Timing

TIMING = Timing(12.5, 0.1, 20)


def machine(mhz: float | None = 1500.0, change: dict[str, str] | None = None) -> Machine:
    """One device of some identity."""
    return Machine({"device": "Fake GPU", "driver": "1", "torch": "2", **(change or {})}, mhz)


def filled(path: Path, mhz: float | None = 1500.0) -> None:
    """A store with one launch."""
    Store(path, machine(mhz)).add("launch", "k1", "aten.mm.default", timing=TIMING)


def test_what_is_added_is_found_by_the_next_command(tmp_path: Path) -> None:
    """Times survive the process, to the last digit."""
    filled(tmp_path / "s")

    assert TIMING == Store(tmp_path / "s", machine()).row("launch", "k1").timing


def test_failures_and_whole_steps_are_kept_too(tmp_path: Path) -> None:
    """So that they are not tried again."""
    store = Store(tmp_path / "s", machine())
    store.add("failed", "k2", "aten.nonzero.default", why="it waits for the host")
    store.add("whole", "digest", timing=TIMING)
    again = Store(tmp_path / "s", machine())

    assert ("it waits for the host", TIMING) == (
        again.row("failed", "k2").why,
        again.row("whole", "digest").timing,
    )


@pytest.mark.parametrize("change", [{"driver": "2"}, {"torch": "3"}, {"device": "Other GPU"}, {"sms": "32"}])
def test_rows_of_another_machine_are_not_used(tmp_path: Path, change: dict[str, str]) -> None:
    """Another driver, torch, card or part of a card is another machine."""
    filled(tmp_path / "s")

    assert Store(tmp_path / "s", machine(change=change)).row("launch", "k1").timing is None


def test_other_clocks_can_be_used_by_choice(tmp_path: Path) -> None:
    """As a service does, which measures once."""
    filled(tmp_path / "s", 1500.0)

    assert TIMING == Store(tmp_path / "s", machine(1980.0), any_clock=True).row("launch", "k1").timing


def test_rows_at_another_clock_are_measured_again_and_both_kept(tmp_path: Path) -> None:
    """Each is found at its own clock."""
    filled(tmp_path / "s", 1500.0)
    store = Store(tmp_path / "s", machine(1980.0))

    assert store.row("launch", "k1").timing is None
    store.add("launch", "k1", "aten.mm.default", timing=Timing(9.0, 0.1, 9))
    assert 9.0 == _us(Store(tmp_path / "s", machine(1980.0)))
    assert 12.5 == _us(Store(tmp_path / "s", machine(1500.0)))


def _us(store: Store) -> float:
    found = store.row("launch", "k1").timing
    assert found is not None
    return found.us


def test_clocks_a_little_apart_are_the_same(tmp_path: Path) -> None:
    """Two per cent is what a clock drifts by itself."""
    filled(tmp_path / "s", 1500.0)

    assert TIMING == Store(tmp_path / "s", machine(1530.0)).row("launch", "k1").timing


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    """All that was whole before it stays, and what comes after it as well."""
    path = tmp_path / "s"
    filled(path)
    with path.open("a") as file:
        file.write('{"kind": "lau')
    Store(path, machine()).add("launch", "k2", "aten.mm.default", timing=TIMING)
    store = Store(path, machine())

    assert (TIMING, TIMING) == (store.row("launch", "k1").timing, store.row("launch", "k2").timing)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    """With file and line."""
    path = tmp_path / "s"
    filled(path)
    line = path.read_text()
    path.write_text(f"{line}garbage\n{line}")

    with pytest.raises(ArtifactError, match=r"s:2: no measurement but something else. Delete that line"):
        Store(path, machine())


TIMED = {"us": -1.0, "half_us": 0.1, "num": 9}


@pytest.mark.parametrize(
    "row", [{}, {"kind": "session"}, {"kind": "whole", "timing": []}, {"kind": "launch", "timing": TIMED}]
)
def test_a_row_without_its_fields_is_named(tmp_path: Path, row: dict[str, object]) -> None:
    """As damage; a default store is left out."""
    path = tmp_path / "s"
    filled(path)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    said: list[str] = []

    with pytest.raises(ArtifactError, match="no measurement"):
        Store(path, machine())
    Store(path, machine(), warn=said.append)
    assert 1 == len(said)


def test_a_folder_that_cannot_be_written_gets_one_line(tmp_path: Path) -> None:
    """With the option that helps."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "s", machine())

    with pytest.raises(TesseraError, match=r"cannot be written: .*Choose --store"):
        store.add("whole", "digest", timing=TIMING)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_store_that_is_spare_is_done_without(tmp_path: Path, is_folder: bool) -> None:
    """A service starts all the same; what was measured is known until it ends."""
    (tmp_path / "s").mkdir() if is_folder else (tmp_path / "s").write_text("")
    said: list[str] = []
    store = Store(tmp_path / "s" if is_folder else tmp_path / "s" / "x", machine(), warn=said.append)
    store.add("whole", "digest", timing=TIMING)

    assert TIMING == store.row("whole", "digest").timing
    assert "cannot be" in said[-1]


def test_rows_say_who_measured_them(tmp_path: Path) -> None:
    """Device, driver, torch and clock."""
    filled(tmp_path / "s")
    row = json.loads((tmp_path / "s").read_text())

    assert (1500.0, "1", "2") == (row["clock_mhz"], row["identity"]["driver"], row["identity"]["torch"])
