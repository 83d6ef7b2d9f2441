"""Reading: bodies are read beside the event loop, so that none of them, however large, holds others up.

A small body is read in a thread. Parsing, matching and tokenizing hold Python's interpreter as long as they
last, so a larger one is read by a process: a light one is kept ready (no torch; the tokenizer from what
`tokenizer.read_parts` found), and forks for every body. What is forked has limits of CPU time and memory,
reads one body, answers with its draft and ends. So large bodies wait for one another only if there are many.

A draft comes back in MessagePack and is checked by type: a stranger's chat template has run where it was
made. The process inherits no environment and no open files. It ends when its control socket is closed.
"""

import asyncio
import fcntl
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from tessera.errors import TesseraError
from tessera.serve.openai.errors import ApiError, api_error
from tessera.serve.openai.read import (
    Draft,
    EmbeddingDraft,
    ModelCard,
    detokenize,
    read_chat,
    read_completion,
    read_embedding,
    read_image,
    tokenize,
)
from tessera.serve.records import ImageDraft
from tessera.serve.templates import KEPT

log = logging.getLogger("tessera.serve")

# Bodies up to this are read in a thread: the interpreter is held for some milliseconds at most.
SMALL_BYTES = 2**14
# Of one body that is read by a process.
CPU_S = 30
MEMORY_BYTES = 4 << 30
# Bodies that are read at once: in threads, and by processes.
THREADS = 4
PROCESSES = max(4, os.cpu_count() or 1)

# What becomes of a body; a document is an answer that needs no model.
Found = Draft | EmbeddingDraft | ImageDraft | bytes
READERS: dict[str, Callable[[bytes, ModelCard], Found]] = {
    "chat": read_chat,
    "completion": read_completion,
    "embedding": read_embedding,
    "image": read_image,
    "tokenize": tokenize,
    "detokenize": detokenize,
}


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    status: int
    message: str
    param: str | None
    code: str | None
    # Of a bug.
    trace: str = ""


ReadBody = Found | _Refusal


class Reading:
    """Reads the bodies of one endpoint. For one event loop; `close` it in the end."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._threads = ThreadPoolExecutor(THREADS, "tessera-reading")
        self._forks = asyncio.Semaphore(PROCESSES)
        self._lock = threading.Lock()
        self._process: ReadingProcess | None = None

    def start(self) -> "ReadingProcess":
        """Makes the process ready, so that no body waits for it; it starts in the background."""
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._process = ReadingProcess(self._card)
            return self._process

    async def read(self, kind: str, raw: bytes) -> Found:
        """The draft of a body, or its answer; ApiError or AskError says what is wrong with it."""
        loop = asyncio.get_running_loop()
        if len(raw) <= SMALL_BYTES:
            return await loop.run_in_executor(self._threads, READERS[kind], raw, self._card)
        async with self._forks:
            process = await loop.run_in_executor(self._threads, self.start)
            answer = await process.read(kind, raw)
        if isinstance(answer, _Refusal):
            if answer.trace:
                log.error("a body could not be read\n%s", answer.trace)
            raise ApiError(answer.status, answer.message, answer.param, answer.code)
        return answer

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._process is not None:
            self._process.close()


class ReadingProcess:
    """The process that forks, from outside."""

    def __init__(self, card: ModelCard) -> None:
        self._control, there = socket.socketpair()
        with there:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(there.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=(there.fileno(),),
                start_new_session=True,  # Ctrl-C is for the server
            )
        self.close = weakref.finalize(self, _end, self._child, self._control)
        assert self._child.stdin is not None
        with suppress(OSError), self._child.stdin as pipe:  # whoever asks is told
            pipe.write(pickle.dumps(card))

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_alive(self) -> bool:
        return self._child.poll() is None

    async def read(self, kind: str, raw: bytes) -> ReadBody:
        """Has one body read; given up, it is read no further."""
        here, there = socket.socketpair()
        here.setblocking(False)
        with here:
            try:
                with there:
                    socket.send_fds(self._control, [kind.encode()], [there.fileno()])
                answer = await _exchanged(here, raw)
            except OSError:  # it has died
                answer = b""
        if not answer:
            return _TOO_LARGE if self.is_alive() else _DEAD
        found: ReadBody = msgspec.msgpack.decode(answer, type=ReadBody)
        return found


PROGRAM = "from tessera.serve.reading import main; main()"
_LIMITS = f"{CPU_S} s of CPU time or {MEMORY_BYTES >> 30} GiB of memory"
_TOO_LARGE = _Refusal(400, f"the body takes more than {_LIMITS} to read", None, "request_too_large")
_DEAD = _Refusal(503, "the body could not be read. Try again.", None, "overloaded")


async def _exchanged(here: socket.socket, raw: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(here, raw)
    here.shutdown(socket.SHUT_WR)
    parts = []
    while part := await loop.sock_recv(here, 2**20):
        parts.append(part)
    return b"".join(parts)


def _environment() -> dict[str, str]:
    """What Python needs to find its libraries and this package."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}


def _end(child: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    child.kill()
    child.wait()


# The process.


def main() -> None:
    """Forks for every body, until the other end of the control socket is closed."""
    card: ModelCard = pickle.load(sys.stdin.buffer)
    gc.freeze()  # what is forked leaves these pages as they are
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            kind, fds, _, _ = socket.recv_fds(control, 64, 1)
            if not kind:
                return
            if os.fork() == 0:
                control.close()
                _read_one(kind.decode(), fds[0], card)
            os.close(fds[0])


def _read_one(kind: str, fd: int, card: ModelCard) -> None:
    """Reads a body, answers, and ends; also, at once, if nobody waits for the answer any more."""
    for limit, most in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    with socket.socket(fileno=fd) as there, there.makefile("rb") as source:
        raw = source.read()
        # From here on nothing comes but the end of the other side, whose signal ends this process.
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        answer = msgspec.msgpack.encode(_answer(kind, raw, card))
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        with suppress(OSError):
            there.sendall(answer)
    os._exit(0)


def _answer(kind: str, raw: bytes, card: ModelCard) -> ReadBody:
    try:
        return READERS[kind](raw, card)
    except MemoryError:
        return _TOO_LARGE
    except (ApiError, TesseraError) as error:
        told = api_error(error)
        return _Refusal(told.status, told.message, told.param, told.code)
    except Exception:  # noqa: BLE001 - the edge of a process: the server's log tells
        what = "an error inside the server; its log says more"
        return _Refusal(500, what, None, None, traceback.format_exc())
