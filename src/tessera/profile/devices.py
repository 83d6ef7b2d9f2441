"""Command-line specs -> devices, links and a cluster.

A device list is comma-separated:

    emu:GPU        computes on the CPU, on the virtual clock of GPU
    emu:cpu-CPU    likewise, of a CPU
    cpu            this machine's first NUMA node, real time
    cpu/node=N     another NUMA node
    cuda:N         GPU N of this machine
    cuda:N/sm=K    K SMs of that GPU
    cuda:N/as=GPU  each launch dilated to its time on another GPU
    away:GPU[:N]   N GPUs of other machines, each worker's first

Repeated devices get a suffix (`emu:a100#1`) and share a card or node evenly. A card is a known GPU if its
name has every word of the GPU's key.

A link spec is for all pairs ("pcie4") or for one: "emu:a100-emu:l40s=nvlink" both ways,
"emu:a100>emu:l40s=ib100" one way. Links of a bus carry one message at a time.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tessera.errors import TesseraError, by_name, check_known
from tessera.ir import AWAY, Cluster, Device, DeviceKind, Link, verify
from tessera.ir.files import packaged
from tessera.ir.host import host_nodes
from tessera.profile.cpus import CPUS, PREFIX, cpu
from tessera.profile.gpus import GPUS, Gpu, gpu

PLACE = "--devices"
# Left beside a GPU, whose worker polls.
SPARE_CORES = 1
UNITS = {"": 1} | {
    f"{letter}{i}": (1024 if i else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for i in ("", "i")
}
OTHER_MACHINE = "away"
MEASURED = "measured"
DEFAULT = "pcie4"


@dataclass(frozen=True, slots=True)
class LinkPreset:
    name: str
    # Time of a short message.
    latency_us: float
    # Sustained, per direction.
    gbps: float
    source: str


LINKS = {link.name: link for link in packaged("profile", "links.json", tuple[LinkPreset, ...])}


@dataclass(frozen=True, slots=True)
class Card:
    # Driver's name: "NVIDIA H200".
    name: str
    memory_bytes: int
    num_sms: int


# Imports torch: called only for lists with a CUDA device.
Cards = Callable[[], tuple[Card, ...]]


def cuda_cards() -> tuple[Card, ...]:
    """Empty without a driver or a CUDA build."""
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Card(x.name, x.total_memory, x.multi_processor_count) for x in properties)


def gpu_of(card_name: str) -> str:
    words = set(re.split(r"[^a-z0-9]+", card_name.lower()))
    keys = [name for name in GPUS if set(name.split("-")) <= words]
    return max(keys, key=lambda key: len(key.split("-")), default="")


def parse_devices(text: str, cards: Cards = cuda_cards) -> tuple[Device, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        what = "no device is named" if not any(words) else f"an empty name in '{text}'"
        raise TesseraError(what, "Name devices like emu:a100,emu:l40s.", PLACE)
    parsed = [device for word in words for device in _devices(word, cards)]
    has_cards = any(d.kind is DeviceKind.CUDA and d.ordinal != AWAY for d in parsed)
    return tuple(_numbered(_shared(parsed, cards() if has_cards else ())))


def cap_memory(devices: tuple[Device, ...], words: Sequence[str]) -> tuple[Device, ...]:
    caps = by_name(map(_cap, words), "--memory")
    names = [device.name for device in devices]
    for name in caps:
        check_known("device", name, names, "--memory")
    return tuple(
        replace(d, memory_bytes=min(d.memory_bytes, caps.get(d.name, d.memory_bytes))) for d in devices
    )


def _cap(word: str) -> tuple[str, int]:
    # At the last separator: cpu/node=1 is a device.
    name, _, size = word.rpartition("=")
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", size, re.IGNORECASE)
    if not name or number is None or not float(number[1]):
        message = f"it must be DEVICE=SIZE, got '{word}'"
        remedy = "Write --memory cuda:0=22GB: a number above zero, in KB, MB, GB, TB, KiB, MiB, GiB or TiB."
        raise TesseraError(message, remedy, "--memory")
    return name, int(float(number[1]) * UNITS[(number[2] or "").capitalize()])


def _numbered(devices: Iterable[Device]) -> Iterable[Device]:
    seen: Counter[str] = Counter()
    for device in devices:
        number, name = seen[device.name], device.name
        seen[name] += 1
        yield replace(device, name=f"{name}#{number}") if number else device


def _devices(word: str, cards: Cards) -> list[Device]:
    kind, rest = word.partition("/")[0].partition(":")[0], word.partition(":")[2]
    if word in GPUS:
        raise TesseraError(f"'{word}' is a GPU, not a device", f"Write emu:{word} to plan for it.", PLACE)
    check_known("kind of device", kind, (*DeviceKind, OTHER_MACHINE), PLACE)
    if kind == OTHER_MACHINE:
        return _away(word, rest)
    if kind == DeviceKind.EMU:
        return [_emulated(word, rest)]
    return [_cpu(word) if kind == DeviceKind.CPU else _cuda(word, rest, cards())]


def _away(word: str, rest: str) -> list[Device]:
    name, colon, number = rest.partition(":")
    if name.endswith("*"):
        raise TesseraError(f"only Ray knows how many GPUs '{word}' is", f"Write {word[:-1]}:2.", PLACE)
    if colon and not (number.isdecimal() and int(number) > 0):
        remedy = f"Write {OTHER_MACHINE}:{name or 'a100'}:2."
        raise TesseraError(f"'{word}' needs a number of GPUs, at least 1", remedy, PLACE)
    emulated = _emulated(word, name)
    away = replace(emulated, name=f"{OTHER_MACHINE}:{emulated.gpu}", kind=DeviceKind.CUDA, ordinal=AWAY)
    return [away] * int(number or 1)


def _emulated(word: str, name: str) -> Device:
    if not name:
        kind, gpus = word.partition(":")[0], ", ".join(sorted((*GPUS, *CPUS)))
        raise TesseraError(f"'{word}' names no GPU", f"Use {kind}: with one of {gpus}.", PLACE)
    spec = cpu(name, PLACE) if name.startswith(PREFIX) else gpu(name, PLACE)
    usd = spec.usd_per_hour if isinstance(spec, Gpu) else None
    return Device(f"emu:{spec.name}", DeviceKind.EMU, spec.name, spec.memory_bytes, usd, spec.tdp_w)


def _cpu(word: str) -> Device:
    nodes = {f"{DeviceKind.CPU}/node={node.number}": node for node in host_nodes()}
    node = next(iter(nodes.values())) if word == DeviceKind.CPU else nodes.get(word)
    if node is None:
        raise TesseraError(f"'{word}' is not a device", f"Write cpu or {' or '.join(nodes)}.", PLACE)
    return Device(word, DeviceKind.CPU, "", node.memory_bytes, ordinal=node.number, num_cores=len(node.cores))


def _cuda(word: str, rest: str, cards: tuple[Card, ...]) -> Device:
    number, slash, option = rest.partition("/")
    if not number.isdecimal():
        raise TesseraError(f"'{word}' names no GPU", "Write cuda:0, cuda:0/sm=32 or cuda:0/as=l40s.", PLACE)
    ordinal = int(number)
    if ordinal >= len(cards):
        have = f"cuda:0 to cuda:{len(cards) - 1}" if cards else "no CUDA device"
        remedy = "Use emu:GPU to price a GPU that is not here."
        raise TesseraError(f"'{word}' does not exist: this machine has {have}", remedy, PLACE)
    card = cards[ordinal]
    name = f"cuda:{ordinal}"
    key = gpu_of(card.name)
    rent = gpu(key).usd_per_hour if key else None
    whole = Device(name, DeviceKind.CUDA, key, card.memory_bytes, rent, ordinal=ordinal)
    if not slash:
        return whole
    what, _, value = option.partition("=")
    if what == "sm":
        if not value.isdecimal() or not 1 <= int(value) <= card.num_sms:
            limit = f"Give 1 to {card.num_sms}, which is what the {card.name} has."
            raise TesseraError(f"invalid number of SMs '{value}' in '{word}'", limit, PLACE)
        return replace(whole, name=f"{name}/sm={int(value)}", num_sms=int(value))
    if what == "as" and value:
        other = gpu(value, PLACE)
        memory_bytes, usd = min(card.memory_bytes, other.memory_bytes), other.usd_per_hour
        dilated = replace(whole, name=f"{name}/as={other.name}", gpu=other.name, is_dilated=True)
        return replace(dilated, memory_bytes=memory_bytes, usd_per_hour=usd)
    raise TesseraError(f"unknown option '{option}' in '{word}'", "Write /sm=K or /as=GPU.", PLACE)


def _shared(devices: Sequence[Device], cards: tuple[Card, ...]) -> Iterable[Device]:
    """Splits cards and NUMA nodes evenly among their devices.

    Without a GPU every CPU worker has one thread: sums depend on their number. Beside a GPU they leave cores
    to its worker and the engine.
    """
    num = Counter((d.kind, d.ordinal) for d in devices)
    is_beside_gpu = any(d.kind is DeviceKind.CUDA for d in devices)
    for ordinal, card in enumerate(cards):
        _check_fit([d for d in devices if (d.kind, d.ordinal) == (DeviceKind.CUDA, ordinal)], card)
    for device in devices:
        parts = num[device.kind, device.ordinal]
        if device.kind is DeviceKind.CPU:
            cores = max(1, (device.num_cores - SPARE_CORES) // parts) if is_beside_gpu else 1
            yield replace(device, memory_bytes=device.memory_bytes // parts, num_cores=cores)
        elif device.kind is DeviceKind.CUDA and device.ordinal != AWAY:
            share = cards[device.ordinal].memory_bytes // parts
            yield replace(device, memory_bytes=min(device.memory_bytes, share))
        else:
            yield device


def _check_fit(devices: Sequence[Device], card: Card) -> None:
    if len(devices) < 2 or all(d.is_dilated for d in devices):
        return
    names, base = " and ".join(d.name for d in devices), f"cuda:{devices[0].ordinal}"
    if not all(d.num_sms for d in devices):
        remedy = f"Cut it into parts ({base}/sm=K,{base}/sm=L) or dilate it ({base}/as=GPU,{base}/as=GPU)."
        raise TesseraError(f"{names} are the same card", remedy, PLACE)
    total = sum(d.num_sms for d in devices)
    if total > card.num_sms:
        message = f"{names} need {total} SMs together; the {card.name} has {card.num_sms}"
        raise TesseraError(message, "Give smaller parts.", PLACE)


def wire(devices: tuple[Device, ...], words: Sequence[str] = (), buses: Sequence[str] = ()) -> Cluster:
    plain = [word for word in words if "=" not in word or word in LINKS]
    if len(plain) > 1:
        remedy = "Give one for all pairs, and the others as emu:a100-emu:l40s=nvlink."
        raise TesseraError(f"more than one link for all pairs: {', '.join(plain)}", remedy, "--link")
    names = tuple(device.name for device in devices)
    pairs = [(a, b) for a in names for b in names if a != b]
    links = _links(plain[0] if plain else DEFAULT, pairs)
    named: list[tuple[str, Link]] = []
    for word in words:
        if word not in plain:
            ends, _, name = word.rpartition("=")
            joined = [(a, b) for a, b in pairs if ends in (f"{a}-{b}", f"{b}-{a}", f"{a}>{b}")]
            named += [(f"{a}>{b}", link) for (a, b), link in _links(name, joined).items()]
            if not joined:
                remedy = f"Write A-B=LINK with two of {', '.join(names)}."
                raise TesseraError(f"'{ends}' is not a pair of devices", remedy, "--link")
    links |= {(link.src, link.dst): link for link in by_name(named, "--link").values()}
    for bus in buses:
        _share(links, bus, names)
    cluster = Cluster(devices, tuple(links.values()))
    verify(cluster)
    return cluster


def _links(name: str, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Link]:
    check_known("link", name, (*LINKS, MEASURED), "--link")
    if name != MEASURED:
        preset = LINKS[name]
        return {(a, b): Link(a, b, preset.name, preset.latency_us, preset.gbps) for a, b in pairs}
    from tessera.profile.store import stored_links

    links = {(x.src, x.dst): x for x in stored_links()}
    for a, b in pairs:
        if (a, b) not in links:
            remedy = f"Name its kind, or measure it: tessera profile --links --devices {a},{b}"
            raise TesseraError(f"no link from {a} to {b} was measured", remedy, "--link")
    return {pair: links[pair] for pair in pairs}


def _share(links: dict[tuple[str, str], Link], bus: str, names: tuple[str, ...]) -> None:
    ends = [word.strip() for word in bus.split(",")]
    for end in ends:
        check_known("device", end, names, "--bus")
    if len(set(ends)) < 2:
        message = f"at least two devices needed, got '{bus}'"
        raise TesseraError(message, "Name the devices on the bus.", "--bus")
    for pair, link in links.items():
        if pair[0] in ends and pair[1] in ends:
            if link.group:
                message = f"the link from {pair[0]} to {pair[1]} is on two buses"
                raise TesseraError(message, "Name each pair once.", "--bus")
            links[pair] = replace(link, group=bus)
