"""From the words of the command line to devices, links and a cluster.

A device list is comma-separated: `emu:a100,emu:l40s`. The second of a kind is called `emu:a100#1`, and
so on. Only `emu:GPU` can be priced at present: `cpu` and `cuda:N` need measuring and are refused.
Every two devices are joined in both directions by one kind of link; mixed wiring is not handled.
"""

from collections import Counter
from dataclasses import dataclass

from tessera.errors import TesseraError, UnknownName
from tessera.ir import Cluster, Device, DeviceKind, Link, verify
from tessera.profile.gpus import Gpu, gpu, known_gpus


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """One kind of wire between two GPUs."""

    name: str
    # Start of the send to arrival of a short message.
    latency_us: float
    # What a long message sustains, each direction.
    gbps: float
    # Where the two figures come from.
    source: str


_IB = "NIC and switch about 5 us, plus staging through GPUDirect RDMA; 0.9 of the line rate: an assumption"
LINKS: dict[str, LinkPreset] = {
    x.name: x
    for x in (
        LinkPreset(
            "pcie4", 10.0, 25.0, "PCIe 4.0 x16: 31.5 GB/s raw, about 0.8 after framing: an assumption"
        ),
        LinkPreset("pcie5", 10.0, 50.0, "PCIe 5.0 x16: 63 GB/s raw, about 0.8 after framing: an assumption"),
        LinkPreset("nvlink", 13.0, 286.0, "Vidur, A100 send_recv in one node, fitted"),
        LinkPreset("ib100", 15.0, 11.2, f"InfiniBand 100 Gbit/s: {_IB}"),
        LinkPreset("ib200", 15.0, 22.5, f"InfiniBand 200 Gbit/s: {_IB}"),
        LinkPreset("ib400", 15.0, 45.0, f"InfiniBand 400 Gbit/s: {_IB}"),
    )
}


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices a list such as `emu:a100,emu:l40s` names, in order, with unique names."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        what = "no device is named" if not any(words) else f"an empty name in '{text}'"
        raise TesseraError(what, "Name devices like emu:a100,emu:l40s.", "--devices")
    seen: Counter[str] = Counter()
    devices = []
    for word in words:
        spec = _emulated(word)
        base = f"emu:{spec.name}"
        devices.append(_device(base if not seen[base] else f"{base}#{seen[base]}", spec))
        seen[base] += 1
    return tuple(devices)


def _emulated(word: str) -> Gpu:
    kind, colon, name = word.partition(":")
    if kind not in tuple(DeviceKind):
        raise UnknownName("kind of device", kind, tuple(DeviceKind))
    if kind != DeviceKind.EMU:
        gpus = ", ".join(sorted(g.name for g in known_gpus()))
        message = f"'{word}' cannot be priced: only emu:GPU can at present"
        raise TesseraError(message, f"Use emu: with one of {gpus}.", "--devices")
    if not colon or not name:
        gpus = ", ".join(sorted(g.name for g in known_gpus()))
        raise TesseraError(f"'{word}' names no GPU", f"Use emu: with one of {gpus}.", "--devices")
    return gpu(name)


def _device(name: str, spec: Gpu) -> Device:
    return Device(name, DeviceKind.EMU, spec.name, spec.memory_bytes, spec.usd_per_hour)


def make_cluster(devices: tuple[Device, ...], link: str) -> Cluster:
    """The devices with every two of them joined both ways by `link`."""
    if link not in LINKS:
        raise UnknownName("link", link, LINKS)
    preset = LINKS[link]
    links = tuple(
        Link(a.name, b.name, preset.name, preset.latency_us, preset.gbps)
        for a in devices
        for b in devices
        if a.name != b.name
    )
    cluster = Cluster(devices, links)
    verify(cluster)
    return cluster
