"""Plan -> Programs -> results: the run.

    scheduler   who decides what runs next
    stepper     the seam: what runs it, on workers (`worker_stepper`), a clock (`simulate.stepper`) or one
                device in order (`reference`)
    offline     a list of requests through both

The scheduler, the seam and `lower` import without torch, so that the simulator can use them.
"""

from tessera.execute.lower import lower

__all__ = ["lower"]
