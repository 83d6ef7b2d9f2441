"""Plan -> Programs -> results: the run.

`lower` and `schedule` import without torch, so that the simulator can use them; the engine is loaded
when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from tessera.execute.lower import lower
from tessera.execute.schedule import Job, LaneTable, Queue

if TYPE_CHECKING:
    from tessera.execute.engine import Engine, Request, RunResult

__all__ = ["Engine", "Job", "LaneTable", "Queue", "Request", "RunResult", "lower"]


def __getattr__(name: str) -> Any:
    if name in ("Engine", "Request", "RunResult"):
        from tessera.execute import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
