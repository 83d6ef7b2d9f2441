"""Flags in shared memory, set by a GPU's graphs while a CPU worker polls them."""

import threading
import time

import torch

from tessera.execute.transport import FlaggedMemory


def test_flags_that_change_during_a_poll_are_found_by_it_or_a_later_one() -> None:
    num = 4096
    shared = torch.zeros(num + 1, dtype=torch.int64)
    memory = FlaggedMemory.__new__(FlaggedMemory)
    memory._watched = {7: [(shared.numpy(), set(range(num + 1)))]}  # the last one never arrives
    memory._news_s = time.monotonic()
    is_over = threading.Event()

    def set_flags() -> None:
        while not is_over.is_set():
            shared[:num].random_(0, 2)  # without the interpreter's lock

    setting = threading.Thread(target=set_flags)
    setting.start()
    found, stop_s = set(), time.monotonic() + 1.0
    try:
        while time.monotonic() < stop_s:
            found |= {arrived.number for arrived in memory.poll() or ()}
    finally:
        is_over.set()
        setting.join()
    assert found == set(range(num))


def test_a_flag_of_the_next_run_stays_set() -> None:
    flags = torch.tensor([1, 1]).numpy()
    memory = FlaggedMemory.__new__(FlaggedMemory)
    memory._watched = {7: [(flags, {1})]}

    assert [1] == [arrived.number for arrived in memory.poll() or ()]
    assert [1, 0] == flags.tolist()
