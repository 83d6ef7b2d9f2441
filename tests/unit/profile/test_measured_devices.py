"""Words for the devices of this machine: whole cards, parts of them, dilated ones, the CPU."""

import pytest

from tessera.errors import TesseraError, UnknownName
from tessera.ir import Device, DeviceKind, Link
from tessera.profile import parse_devices, wire
from tessera.profile.devices import Card, gpu_of

H200 = Card("NVIDIA H200", 150_000_000_000, 132)


def parse(text: str, *cards: Card) -> tuple[Device, ...]:
    """Devices of a machine with these cards; one H200 unless said."""
    return parse_devices(text, lambda: cards or (H200,))


def test_a_whole_card_is_the_gpu_it_is_named_after() -> None:
    """`cuda:0` carries the card's own memory and its key in the table."""
    (device,) = parse("cuda:0")

    assert ("cuda:0", DeviceKind.CUDA, "h200") == (device.name, device.kind, device.gpu)
    assert (H200.memory_bytes, 0, 0, False) == (
        device.memory_bytes,
        device.ordinal,
        device.num_sms,
        device.is_dilated,
    )


def test_parts_of_a_card_share_its_memory() -> None:
    """Two parts have half of the memory each and the SMs that were asked for."""
    first, second = parse("cuda:0/sm=32,cuda:0/sm=100")

    assert ((32, 100), {H200.memory_bytes // 2}) == (
        (first.num_sms, second.num_sms),
        {first.memory_bytes, second.memory_bytes},
    )


def test_a_dilated_card_keeps_the_other_gpus_times() -> None:
    """`as=` carries the other GPU's name, at most its memory, and says that it is dilated."""
    (device,) = parse("cuda:0/as=l40s")

    assert ("l40s", True, 48_000_000_000) == (device.gpu, device.is_dilated, device.memory_bytes)


def test_two_dilated_devices_on_one_card_get_unique_names() -> None:
    """The second of a kind is numbered."""
    assert ["cuda:0/as=a100", "cuda:0/as=a100#1"] == [d.name for d in parse("cuda:0/as=a100,cuda:0/as=a100")]


def test_the_cpu_is_a_device_with_this_machines_memory() -> None:
    """No GPU is asked for to parse it."""

    def no_cards() -> tuple[Card, ...]:
        raise AssertionError("cards were asked for")

    (device,) = parse_devices("cpu", no_cards)

    assert (DeviceKind.CPU, "") == (device.kind, device.gpu)
    assert device.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:3", "'cuda:3' does not exist: this machine has cuda:0 to cuda:0"),
        ("cuda", "'cuda' names no GPU"),
        ("cuda:x", "'cuda:x' names no GPU"),
        ("cuda:0/sm=0", "invalid number of SMs '0' in 'cuda:0/sm=0'. Give 1 to 132"),
        ("cuda:0/sm=133", "invalid number of SMs '133' in 'cuda:0/sm=133'. Give 1 to 132"),
        ("cuda:0/sm=many", "invalid number of SMs"),
        ("cuda:0/fast", "unknown option 'fast' in 'cuda:0/fast'. Write /sm=K or /as=GPU"),
        ("cuda:0/sm=100,cuda:0/sm=64", "need 164 SMs together; the NVIDIA H200 has 132"),
        ("cuda:0,cuda:0", "are the same card. Cut it into parts"),
        ("cuda:0,cuda:0/sm=8", "are the same card"),
        ("cuda:0/as=a100,cuda:0/sm=8", "are the same card"),
        ("cpu:1", "'cpu:1' is not a device. Write cpu"),
    ],
)
def test_what_a_machine_cannot_give_is_refused_in_one_line(text: str, words: str) -> None:
    """Each mistake names the word, the limit and the remedy."""
    with pytest.raises(TesseraError) as caught:
        parse(text)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_cuda_the_message_points_to_emulation() -> None:
    """A machine without a GPU says so."""
    with pytest.raises(TesseraError, match=r"this machine has no CUDA device\. Use emu:GPU"):
        parse_devices("cuda:0", lambda: ())


def test_a_dilated_card_needs_a_known_gpu() -> None:
    """A wrong GPU lists the right ones."""
    with pytest.raises(UnknownName, match="unknown GPU 'l50'"):
        parse("cuda:0/as=l50")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce GTX 1080", ""),
    ],
)
def test_cards_are_recognised_by_the_words_of_their_names(name: str, key: str) -> None:
    """The key with most words wins; an unknown card has none."""
    assert key == gpu_of(name)


def test_measured_links_join_the_devices_they_were_measured_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--link measured` takes each direction as it was found."""
    devices = parse_devices("cpu,cpu")
    links = (Link("cpu", "cpu#1", "measured", 3.0, 5.0), Link("cpu#1", "cpu", "measured", 4.0, 6.0))

    monkeypatch.setattr("tessera.profile.store.stored_links", lambda: links)
    cluster = wire(devices, ["measured"])

    assert (3.0, 6.0) == (cluster.links[0].latency_us, cluster.links[1].gbps)


def test_a_link_that_was_not_measured_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guess in place of a measurement."""
    monkeypatch.setattr("tessera.profile.store.stored_links", lambda: ())
    with pytest.raises(
        TesseraError,
        match=r"no link from cpu to cpu#1 was measured. Name its kind, or measure it: ",
    ):
        wire(parse_devices("cpu,cpu"), ["measured"])
