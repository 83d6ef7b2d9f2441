"""The cost model's formula, effect by effect."""

import numpy as np
import pytest
from scripts.cost_tables import plain_loads

from tessera.profile.fitted import Loads, Params, Peaks, predict

PEAKS = Peaks(tflops=100.0, gbps=1000.0, num_sms=100)
PLAIN = Params(t0_us=2.0, ec=0.5, em=0.8, p=2.0)


def gemm(m: int, n: int, k: int, batch: int = 1) -> Loads:
    """One GEMM that moves no bytes."""
    shape = np.array([[batch], [m], [n], [k]], dtype=np.float64)
    zeros = np.zeros(1)
    return Loads(np.array([2.0 * batch * m * n * k]), zeros, shape, zeros, zeros)


def time(params: Params, loads: Loads) -> float:
    """Time of a single launch."""
    return float(predict(params, loads, PEAKS)[0])


def test_computing_and_loading_join_by_the_p_norm() -> None:
    """3 us of computing and 4 us of loading take 5 us when p is 2, and the floor comes on top."""
    loads = plain_loads(np.array([3 * 0.5 * 1e8]), np.array([4 * 0.8 * 1e6]))

    assert time(PLAIN, loads) == pytest.approx(2.0 + 5.0)


def test_no_work_costs_the_floor() -> None:
    """A launch without operations and bytes takes t0."""
    assert 2.0 == pytest.approx(time(PLAIN, plain_loads(np.zeros(1), np.zeros(1))))


def test_one_full_wave_costs_its_operations() -> None:
    """A hundred large tiles on a hundred SMs waste nothing."""
    params = Params(2.0, 0.5, 0.8, 2.0, tile=0.2, split_us=1.0)
    loads = gemm(10 * 256, 10 * 128, 4096)

    assert time(params, loads) == pytest.approx(time(PLAIN, loads))


def test_a_lone_tile_is_split_only_as_far_as_that_pays() -> None:
    """One long tile leaves 99 SMs idle; splitting k helps, and each halving has its price."""
    cheap, dear = (Params(2.0, 0.5, 0.8, 2.0, tile=0.2, split_us=s) for s in (0.1, 1000.0))
    loads = gemm(256, 128, 65536)

    assert time(PLAIN, loads) < time(cheap, loads) < time(dear, loads)


def test_waves_never_cost_less_than_the_operations() -> None:
    """Padding to whole tiles only adds."""
    params = Params(2.0, 0.5, 0.8, 2.0, tile=0.01, split_us=0.01)
    for m, n, k in ((1, 1, 1), (100, 100, 100), (4096, 4096, 64), (3000, 5000, 700)):
        assert time(params, gemm(m, n, k)) >= time(PLAIN, gemm(m, n, k))


def test_what_the_cache_holds_is_read_faster() -> None:
    """Half the bytes at four times the speed: 5/8 of the time."""
    params = Params(0.0, 0.5, 0.8, 2.0, l2x=4.0)
    cold = plain_loads(np.zeros(1), np.array([1e6]))
    half = Loads(cold.flops, cold.num_bytes, cold.gemm, cold.rows, np.array([0.5]))

    assert time(params, half) == pytest.approx(0.625 * time(params, cold))


def test_every_sequence_of_a_decode_costs_a_little() -> None:
    """A thousand groups at 0.03 us are 30 us, whatever they read."""
    params = Params(2.0, 0.5, 0.8, 2.0, row_us=0.03)
    cold = plain_loads(np.zeros(1), np.zeros(1))
    many = Loads(cold.flops, cold.num_bytes, cold.gemm, np.array([1000.0]), cold.hit)

    assert time(params, many) == pytest.approx(32.0)
