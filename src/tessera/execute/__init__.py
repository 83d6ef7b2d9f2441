"""Plan -> Programs -> results: the run.

    scheduler   decides what runs next
    stepper     runs it: on workers (`worker_stepper`), a virtual clock (`simulate.stepper`) or one device in
                order (`reference`)
    offline     runs a list of requests through both

The scheduler, the stepper interface and `lower` import without torch, so that the simulator can use them.
"""

from tessera.execute.lower import lower

__all__ = ["lower"]
