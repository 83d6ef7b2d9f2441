"""Links: latency and bandwidth from transfers, and the store of them."""

from dataclasses import replace
from pathlib import Path

import pytest

import cuda_stub
from tessera.analyze import build_graph
from tessera.execute.link_times import time_transfers
from tessera.flow import time_fetches
from tessera.ir import Device, DeviceKind
from tessera.profile import parse_devices
from tessera.profile.store import SIZES, fit_link, keep_links, remark, stored_links


def transfers(latency_us: float, gbps: float) -> list[tuple[int, float]]:
    """What a perfect link would take."""
    return [(n, latency_us + n / (gbps * 1e3)) for n in SIZES]


def test_a_perfect_link_is_found_exactly() -> None:
    """Latency and bandwidth come back."""
    fit = fit_link("a", "b", "wire", transfers(12.0, 25.0), transfers(12.0, 20.0))

    assert (12.0, 25.0, 20.0) == pytest.approx((fit.latency_us, fit.gbps, fit.both_gbps))
    assert fit.rel_error < 1e-9


def test_short_messages_count_as_much_as_long_ones() -> None:
    """Ten per cent off on the longest transfer moves the latency little."""
    times = transfers(12.0, 25.0)
    times[-1] = (times[-1][0], times[-1][1] * 1.1)
    fit = fit_link("a", "b", "wire", times, times)

    assert 12.0 == pytest.approx(fit.latency_us, rel=0.02)


def test_no_latency_is_below_zero() -> None:
    """Noise that would make it so is taken as none."""
    fit = fit_link("a", "b", "wire", [(4096, 0.1), (8192, 10.0), (16384, 20.0)], transfers(1.0, 1.0))

    assert fit.latency_us >= 0.0
    assert fit.gbps > 0.0


def test_a_link_that_both_directions_share_is_remarked() -> None:
    """Half of the bandwidth when both are busy is worth knowing."""
    fit = fit_link("a", "b", "wire", transfers(12.0, 25.0), transfers(12.0, 12.0))

    assert "25 GB/s alone, 12 GB/s while the other direction is busy" in remark(fit)


def test_the_last_measurement_of_a_link_counts(tmp_path: Path) -> None:
    """Both stay in the store."""
    path = tmp_path / "s"
    keep_links(path, [fit_link("a", "b", "wire", transfers(12.0, 25.0), transfers(12.0, 25.0))])
    keep_links(path, [fit_link("a", "b", "wire", transfers(8.0, 30.0), transfers(8.0, 30.0))])

    (link,) = stored_links(path)
    assert ("a", "b", "measured") == (link.src, link.dst, link.name)
    assert (8.0, 30.0) == pytest.approx((link.latency_us, link.gbps))
    assert 2 == len(path.read_text().splitlines())


def test_the_speed_of_fetched_weights_is_kept_with_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a CPU and a GPU only."""
    cuda_stub.install(monkeypatch)
    (host,), card = parse_devices("cpu"), Device("cuda:0", DeviceKind.CUDA, "h200", 1 << 34)
    assert (0.0, 1.0) == time_fetches(card, host)
    gbps, _ = time_fetches(host, card)
    assert gbps > 0.0

    fit = fit_link("cpu", "cuda:0", "shm", transfers(12.0, 25.0), transfers(12.0, 25.0))
    fit = replace(fit, fetch_gbps=gbps, fetch_slowdown=1.5)
    keep_links(tmp_path / "s", [fit])
    (link,) = stored_links(tmp_path / "s")
    assert (gbps, 1.5) == (link.fetch_gbps, link.fetch_slowdown)
    assert 1e6 / (gbps * 1e3) == pytest.approx(link.fetch_us(1_000_000))


@pytest.mark.parametrize("transport", ["shm", "host"])
def test_two_workers_of_this_machine_are_timed_alone_and_beside_one_another(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size has a time, and a longer message takes longer, over the workers' own transports."""
    monkeypatch.setattr("tessera.execute.link_times.BYTES_PER_SIZE", 64 << 20)
    sizes = (4096, 1 << 22)
    one, other = parse_devices("cpu,cpu")
    found = time_transfers(one, other, transport, sizes, build_graph)

    assert sizes == tuple(n for n, _ in found.alone) == tuple(n for n, _ in found.both)
    assert found.alone[0][1] < found.alone[1][1]
