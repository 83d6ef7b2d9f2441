"""Plan -> Programs -> results: the run.

The scheduler, what it imports, and `lower` need no torch, so that the simulator can use them.
"""

from tessera.execute.lower import lower

__all__ = ["lower"]
