"""Words to devices, and devices to a cluster."""

import os
from pathlib import Path

import pytest

from profile_factories import emulated
from tessera.errors import TesseraError, UnknownName
from tessera.ir import AWAY, DeviceKind, host, verify
from tessera.profile import GPUS, LINKS, cap_memory, gpu, parse_devices, wire
from tessera.profile.measured import needs_measuring


def test_devices_keep_their_order_and_figures() -> None:
    """Each word becomes a device with its GPU's memory and rent."""
    first, second = parse_devices("emu:a100, emu:l40s")

    assert ("emu:a100", DeviceKind.EMU, "a100") == (first.name, first.kind, first.gpu)
    assert (gpu("l40s").memory_bytes, 0.99) == (second.memory_bytes, second.usd_per_hour)


def test_the_second_of_a_kind_is_numbered() -> None:
    """Names stay unique."""
    names = [d.name for d in parse_devices("emu:a100,emu:l40s,emu:a100,emu:a100")]

    assert ["emu:a100", "emu:l40s", "emu:a100#1", "emu:a100#2"] == names


def test_gpus_of_other_machines_need_none_here() -> None:
    """Whole ones, priced by their name, with a count."""
    devices = parse_devices("away:l40s:2,away:a100")

    assert ["away:l40s", "away:l40s#1", "away:a100"] == [d.name for d in devices]
    assert {(DeviceKind.CUDA, AWAY, False)} == {(d.kind, d.ordinal, needs_measuring(d)) for d in devices}
    for text, message in (
        ("away:l40s*", "only Ray knows"),
        ("away:l40s:no", "needs a number"),
        ("away:", "no GPU"),
    ):
        with pytest.raises(TesseraError, match=message):
            parse_devices(text)


def test_an_unknown_gpu_answers_with_the_known_ones() -> None:
    """A wrong GPU lists the right ones."""
    with pytest.raises(UnknownName, match=r"unknown GPU 'a101'; known: a100, .*v100"):
        parse_devices("emu:a101")


def test_an_unknown_kind_answers_with_the_known_ones() -> None:
    """A wrong kind lists the right ones."""
    known = "known: away, cpu, cuda, emu"
    with pytest.raises(UnknownName, match=rf"^--devices: unknown kind of device 'tpu'; {known}"):
        parse_devices("tpu:0")


@pytest.mark.parametrize("text", ["", " ", "emu:a100,", ",", "emu", "emu:"])
def test_malformed_text_gets_one_clear_error(text: str) -> None:
    """Nothing, a stray comma, a missing GPU: one line with a remedy."""
    with pytest.raises(TesseraError, match=r"--devices: .*emu:"):
        parse_devices(text)


def test_every_two_devices_are_joined_both_ways() -> None:
    """Three devices have six links."""
    cluster = wire(emulated("a100", "l40s", "h100"), ["pcie4"])

    verify(cluster)
    assert 6 == len(cluster.links)


def test_an_unknown_link_answers_with_the_known_ones() -> None:
    """A wrong link lists the right ones."""
    with pytest.raises(
        UnknownName, match="unknown link 'pcie9'; known: ib100, ib200, ib400, measured, nvlink"
    ):
        wire(emulated("a100"), ["pcie9"])


def test_every_link_says_where_its_figures_come_from() -> None:
    """No link without a source, none faster than its line rate."""
    ceiling = {"pcie4": 31.5, "pcie5": 63.0, "nvlink": 900.0, "ib100": 12.5, "ib200": 25.0, "ib400": 50.0}

    assert ceiling.keys() == LINKS.keys()
    assert all(x.source and x.latency_us > 0 and x.gbps < ceiling[name] for name, x in LINKS.items())


def test_all_gpus_are_known_with_their_sources() -> None:
    """Twenty-eight GPUs, each with figures that make sense and words on where they come from."""
    gpus = tuple(GPUS.values())

    assert 28 == len({g.name for g in gpus}) == len(gpus)
    assert all(g.memory_bytes > 1e9 and g.memory_gbps > 100 and g.fp32_tflops > 1 for g in gpus)
    assert all(g.spec_source and g.price_source and g.effective_source for g in gpus)


def test_sustained_rates_are_below_the_data_sheet() -> None:
    """No measured rate exceeds its peak."""
    for g in GPUS.values():
        if g.effective:
            assert g.effective.gemm_tflops < (g.bf16_tflops or 0)
            assert max(g.effective.decode_gbps, g.effective.weights_gbps) < g.memory_gbps


def test_default_price_is_runpods_where_it_quotes_one() -> None:
    """RunPod first, then Lambda, AWS, GCP, an estimate; None where nobody rents it."""
    names = ("a100", "gh200", "a10g", "h20", "a30")

    quoted = [(gpu(n).price_provider, gpu(n).usd_per_hour) for n in names]

    expected = [("RunPod", 1.59), ("Lambda", 2.29), ("AWS", 1.006), ("estimate", 2.25), ("", None)]
    assert expected == quoted


def test_no_source_names_a_place_on_somebodys_disk() -> None:
    """Sources are public data sets, not paths."""
    words = " ".join(f"{g.spec_source} {g.effective_source} {g.price_source} {g.note}" for g in GPUS.values())

    assert not any(part in words for part in ("/work", "/home", "shared/", ".parquet"))


def test_memory_is_capped_by_device() -> None:
    devices = parse_devices("emu:l40s,emu:cpu-xeon-8480")
    capped = cap_memory(devices, ["emu:l40s=22GB", "emu:cpu-xeon-8480=1GiB"])
    assert [d.memory_bytes for d in capped] == [22_000_000_000, 1 << 30]
    capped = cap_memory(devices, ["emu:l40s=22g", "emu:cpu-xeon-8480=4 kib"])
    assert [d.memory_bytes for d in capped] == [22_000_000_000, 4096], "in any case"
    assert cap_memory(devices, ["emu:l40s=1TB"]) == devices, "a cap adds nothing"
    for word in ("emu:l40s", "emu:l40s=much", "emu:l40s=0GB"):
        with pytest.raises(TesseraError, match=r"^--memory: it must be DEVICE=SIZE.* GiB"):
            cap_memory(devices, [word])
    with pytest.raises(UnknownName):
        cap_memory(devices, ["cuda:7=22GB"])
    with pytest.raises(TesseraError, match=r"^--memory: 'emu:l40s' is given twice"):
        cap_memory(devices, ["emu:l40s=22GB", "emu:l40s=22GB"])


def test_modelled_cpus_are_devices() -> None:
    (device,) = parse_devices("emu:cpu-epyc-9654")
    assert device.is_cpu
    assert device.kind is DeviceKind.EMU
    assert not parse_devices("emu:l40s")[0].is_cpu
    with pytest.raises(UnknownName):
        parse_devices("emu:cpu-8086")


def test_cpus_share_the_memory_of_their_node() -> None:
    (alone,), pair = parse_devices("cpu"), parse_devices("cpu,cpu")
    assert sum(d.memory_bytes for d in pair) <= alone.memory_bytes
    assert parse_devices(f"cpu/node={alone.ordinal}")[0].memory_bytes == alone.memory_bytes


def test_a_cpu_without_a_gpu_has_one_thread() -> None:
    """With several threads, sums depend on their number."""
    assert [1, 1] == [d.num_cores for d in parse_devices("cpu,emu:l40s,cpu") if d.kind is DeviceKind.CPU]


def test_nodes_have_shares_of_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may not count memory that was added later."""
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-4095\n")
    (tmp_path / "node0" / "meminfo").write_text("Node 0 MemTotal:        6000 kB\n")
    monkeypatch.setattr(host, "NODES", tmp_path)
    (node,) = host.host_nodes()
    assert os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") == node.memory_bytes


def test_last_level_caches_of_all_cores_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that several cores share counts once."""
    for core in os.sched_getaffinity(0):
        for index, size, shared in ((2, "1024K", core), (3, "307200K", "all")):
            folder = tmp_path / f"cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.setattr(host, "CPUS", tmp_path)
    assert host.cache_bytes() == 300 << 20
    for core in os.sched_getaffinity(0):
        (tmp_path / f"cpu{core}/cache/index3/shared_cpu_list").write_text(f"{core}\n")
    assert host.cache_bytes() == len(os.sched_getaffinity(0)) * 300 << 20


def test_a_cache_of_unknown_size_is_32_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CPUS", tmp_path)
    assert host.cache_bytes() == 32 << 20
