"""Processes of one test run, forked from one that has imported the libraries: 9 s of CPU time for each.

xdist starts this file as its Python (`command`); it hands its standard streams to a fork, and ends with it.
If there is nobody to fork from, as after a crash, it is the plain interpreter. Tessera itself is imported
after the fork where its coverage is measured.
"""

import contextlib
import gc
import importlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import types
import unittest.mock
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

# What most files of tests import, by themselves or through Tessera.
LIBRARIES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "scipy.optimize",
    "diffusers.models.transformers",
    "matplotlib.figure",
    "fastapi",
    "openai",
    "ray",
    "pytest",
)
OWN = ("tessera.cli.start", "tessera.serve.app", "tessera.compile", "tessera.execute.cuda.worker")
MAX_CODE = 1 << 16


def rewrite_asserts(config: Any) -> None:
    """pytest's rewritten code of the test files, written once: every process would do it by itself."""
    with contextlib.suppress(AttributeError, ImportError, OSError, SyntaxError):  # then they do
        from _pytest.assertion import rewrite

        for argument in config.args:
            path = Path(argument.partition("::")[0])
            for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
                code = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
                rewrite.try_makedirs(code.parent)
                if rewrite._read_pyc(file, code) is None:
                    source, rewritten = rewrite._rewrite_test(file, config)
                    rewrite._write_pyc(config.stash[rewrite.assertstate_key], rewritten, source, code)


def command(number: int, is_measured: bool) -> str:
    """The Python of as many processes; whether the lines that they run are counted."""
    path = os.path.join(tempfile.mkdtemp(prefix="tessera-tests-"), "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(number)
        words = [sys.executable, __file__, path]
        libraries = LIBRARIES if is_measured else LIBRARIES + OWN
        given = [str(server.fileno()), str(number), *libraries]
        subprocess.Popen([*words, *given], pass_fds=[server.fileno()])
    return shlex.join(words)


def serve(path: str, server: socket.socket, number: int, libraries: list[str]) -> None:
    """Forks, and waits for the forks."""
    for library in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    with contextlib.suppress(ImportError):
        # The digest of all of Triton, which every process that compiles a kernel would make: 1.5 s.
        importlib.import_module("triton.runtime.cache").triton_key()
    gc.collect()
    gc.freeze()
    is_own = OWN[0] in libraries  # else coverage counts lines of workers too, from their start
    for _ in range(number):
        link, _ = server.accept()
        code, fds, _, _ = socket.recv_fds(link, MAX_CODE, 3)
        if not os.fork():
            server.close()
            if is_own:
                serve_workers()
            become(code.decode(), fds)
            return  # now the link closes
        for fd in (*fds, link.detach()):
            os.close(fd)
    server.close()
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    with contextlib.suppress(ChildProcessError, KeyboardInterrupt):
        while True:
            os.wait()


def serve_workers() -> None:
    """multiprocessing's server of workers, which would import torch again: a fork of this process."""

    def fork(path: bytes, words: list[str], passed: list[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            patch.stop()
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in passed:
                    with contextlib.suppress(OSError):  # the listing's own
                        os.close(fd)
            forkserver.main(passed[0], passed[1], [])
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    patch = unittest.mock.patch.object(util, "spawnv_passfds", fork)
    patch.start()
    forkserver.ensure_running()
    patch.stop()


def become(code: str, fds: list[int]) -> None:
    """`python -c CODE` with these standard streams."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    main = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = ["-c"], main
    exec(code, vars(main))


def follow(path: str, words: list[str]) -> None:
    """Returns when the fork has ended."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(path)
        socket.send_fds(link, [words[-1].encode()], [0, 1, 2])
    except OSError:
        os.execv(sys.executable, [sys.executable, *words])
    for fd in (0, 1):
        os.close(fd)
    with contextlib.suppress(OSError):
        link.recv(1)


if __name__ == "__main__":
    if sys.argv[2].isdecimal():
        serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4:])
    else:
        follow(sys.argv[1], sys.argv[2:])
