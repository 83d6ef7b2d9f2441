"""Links between unlike pairs, and links that share a bus."""

import pytest

from tessera.errors import TesseraError, UnknownName
from tessera.profile import parse_devices, wire

PAIR = parse_devices("emu:a100,emu:l40s")
THREE = parse_devices("emu:a100,emu:a100-pcie,emu:l40s")


def names(words: list[str], buses: list[str] | None = None) -> dict[tuple[str, str], str]:
    """(source, destination) -> name of the link."""
    return {(x.src, x.dst): x.name for x in wire(THREE, words, buses or []).links}


def test_default_is_pcie4() -> None:
    """As the option says."""
    assert {"pcie4"} == {x.name for x in wire(PAIR).links}


def test_one_name_joins_all() -> None:
    """Every pair, both ways."""
    found = names(["nvlink"])

    assert 6 == len(found)
    assert {"nvlink"} == set(found.values())


def test_pair_can_have_a_link_of_its_own() -> None:
    """Both ways, and the rest keep theirs; names with a dash are understood."""
    found = names(["pcie5", "emu:a100-emu:a100-pcie=nvlink"])

    assert "nvlink" == found["emu:a100", "emu:a100-pcie"] == found["emu:a100-pcie", "emu:a100"]
    assert "pcie5" == found["emu:a100", "emu:l40s"]


def test_one_direction_can_have_a_link_of_its_own() -> None:
    """An arrow instead of a dash."""
    found = names(["emu:a100>emu:l40s=ib100"])

    assert "ib100" == found["emu:a100", "emu:l40s"]
    assert "pcie4" == found["emu:l40s", "emu:a100"]


def test_bus_groups_the_links_among_its_devices() -> None:
    """Both directions share; links to others do not."""
    groups = {(x.src, x.dst): x.group for x in wire(THREE, [], ["emu:a100,emu:l40s"]).links}

    assert groups["emu:a100", "emu:l40s"] == groups["emu:l40s", "emu:a100"] != ""
    assert "" == groups["emu:a100", "emu:a100-pcie"]


@pytest.mark.parametrize(
    ("words", "buses", "message"),
    [
        (["rope"], [], "unknown link 'rope'"),
        (["emu:a100-emu:l40s=rope"], [], "unknown link 'rope'"),
        (["emu:a100-emu:h100=nvlink"], [], "'emu:a100-emu:h100' is not a pair"),
        (["pcie4", "pcie5"], [], "more than one link for all pairs"),
        ([], ["emu:a100,emu:h100"], "unknown device 'emu:h100'"),
        ([], ["emu:a100"], "at least two devices"),
        ([], ["emu:a100,emu:l40s", "emu:l40s,emu:a100"], "on two buses"),
    ],
)
def test_wiring_that_is_not_understood_is_refused(words: list[str], buses: list[str], message: str) -> None:
    """One line each, with what would be right."""
    with pytest.raises((TesseraError, UnknownName), match=message):
        wire(PAIR, words, buses)
