"""The process that workers are forked from: it imports torch for all of them, beside whoever starts it.

Imports no torch itself, so that both can begin at once.
"""

import multiprocessing
from multiprocessing import forkserver

# How processes are started: from one that stays until the program ends.
FORKSERVER = "forkserver"
# What a worker imports.
PRELOADED = ["tessera.execute.worker"]


def warm_up() -> None:
    """Starts the process that workers are forked from, if there is none; it imports what they need."""
    multiprocessing.get_context(FORKSERVER).set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
