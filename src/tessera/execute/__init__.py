"""Plan -> Programs -> results: the run.

The scheduler, the stepper interface and `lower` import without torch, so that the simulator can use them.
"""

from tessera.execute.lower import lower

__all__ = ["lower"]
