"""Wiring: which link joins which devices, and which links share a bus.

A word is the name of a link for all pairs ("pcie4"), or for one pair: "emu:a100-emu:l40s=nvlink" both ways,
"emu:a100>emu:l40s=ib100" one way. A bus is a list of devices, "emu:l40s,emu:l40s#1": all links among them
share one wire, in both directions, so one message at a time crosses any of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from tessera.errors import TesseraError, UnknownName
from tessera.ir import Cluster, Device, Link, verify
from tessera.profile.devices import LINKS, make_cluster

DEFAULT = "pcie4"


def wire(devices: tuple[Device, ...], words: Sequence[str] = (), buses: Sequence[str] = ()) -> Cluster:
    """A cluster of these devices, joined as the words say."""
    plain = [word for word in words if "=" not in word or word in LINKS]
    if len(plain) > 1:
        remedy = "Give one for all pairs, and the others as emu:a100-emu:l40s=nvlink."
        raise TesseraError(f"{' and '.join(plain)} are both meant for every pair", remedy, "--link")
    cluster = make_cluster(devices, plain[0] if plain else DEFAULT)
    links = {(x.src, x.dst): x for x in cluster.links}
    for word in words:
        if word not in plain:
            _join(links, word, cluster.names)
    for bus in buses:
        _share(links, bus, cluster.names)
    wired = Cluster(devices, tuple(links.values()))
    verify(wired)
    return wired


def _join(links: dict[tuple[str, str], Link], word: str, names: tuple[str, ...]) -> None:
    """Replaces the link of one pair."""
    # The last: a part of a card is called cuda:0/sm=32.
    ends, _, name = word.rpartition("=")
    if name not in LINKS:
        raise UnknownName("link", name, LINKS)
    preset = LINKS[name]
    pairs = [(a, b) for a in names for b in names if a != b and ends in (f"{a}-{b}", f"{b}-{a}", f"{a}>{b}")]
    if not pairs:
        remedy = f"Write A-B=LINK with two of {', '.join(names)}."
        raise TesseraError(f"'{ends}' is no pair of the devices", remedy, "--link")
    for src, dst in pairs:
        links[src, dst] = Link(src, dst, preset.name, preset.latency_us, preset.gbps)


def _share(links: dict[tuple[str, str], Link], bus: str, names: tuple[str, ...]) -> None:
    """Puts the links among some devices on one bus."""
    ends = [word.strip() for word in bus.split(",")]
    for end in ends:
        if end not in names:
            raise UnknownName("device", end, names)
    if len(set(ends)) < 2:
        raise TesseraError(f"'{bus}' joins no two devices", "Name the devices that share it.", "--bus")
    for pair, link in links.items():
        if pair[0] in ends and pair[1] in ends:
            if link.group:
                message = f"the link from {pair[0]} to {pair[1]} is on two buses"
                raise TesseraError(message, "Name each pair once.", "--bus")
            links[pair] = replace(link, group=bus)
