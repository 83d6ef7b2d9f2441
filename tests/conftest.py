"""Settings of all tests."""

import gc
import importlib
import importlib.util
import io
import logging
import os
import signal
import ssl
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import forked
import sampling

# There are as many processes as cores, or more. Threads of torch besides wait for one another, and burn a
# third of all time doing so. Before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is compiled once is kept, whatever the surroundings say: hundreds of processes would do it again.
sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = False, ""
# Plans and measurements of tests, whose models have fewer layers, are not found by the user's commands.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parents[1] / "build" / "test-cache")
# Kernels are found again in one place. Inductor moves Triton's from its first compilation in a process on, so
# that a later run, whose processes have other files, would compile them again.
os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))

# Folders whose tests start processes and sockets: they wait much and compute little. Their files take turns
# with the others, so that cores are not idle, and are begun by this part of a run, so that none is the last.
BEGUN_BY = 0.8
TIMED = ("unit/serve", "unit/execute", "unit/compile", "unit/profile/test_measured", "cli/")
# A launch of a served step is measured this long: prices of this CPU are used, and not judged.
LAUNCH_S = 0.01
# Reruns of tests marked `rerun` that one session may need.
MAX_RERUNS = 3


# Folders whose tests use traces and do not judge them.
PLANNED = (
    "unit/serve",
    "unit/execute",
    "unit/compile",
    "unit/paper",
    "unit/plan",
    "unit/simulate",
    "cli/",
    "rules/",
)


@pytest.fixture(autouse=True, scope="session")
def _few_layers() -> None:
    """Tiny built-in models have two layers in a sample."""
    if not sampling.is_whole():
        from tessera.capture.models import catalog

        for name, model in (catalog.LANGUAGE | catalog.DENOISERS).items():
            if name.startswith("tiny-"):
                sampling.with_few_layers(model[1])


@pytest.fixture(autouse=True, scope="session")
def _one_parser() -> Iterator[None]:
    """The parser of the command line is built once; it keeps nothing from one command to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_trust() -> Iterator[None]:
    """Certificates of authorities are read once: every client of httpx would read them again."""
    make = ssl.create_default_context
    read = cache(lambda path: make(cafile=path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ssl,
            "create_default_context",
            lambda *a, **k: read(k["cafile"]) if [*k] == ["cafile"] else make(*a, **k),
        )
        yield


@pytest.fixture(autouse=True, scope="module")
def _in_short(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where plans are only used, models are not built and steps are not recorded again."""
    with pytest.MonkeyPatch.context() as patch:
        if not sampling.is_whole() and any(part in request.node.nodeid for part in PLANNED):
            from kept_models import built
            from kept_traces import recorded, recorded_sizes, recorded_workload

            patch.setattr("tessera.capture.models.hf._workload", built)
            paper = [name for name in ("benchmarks.paper.library",) if name in sys.modules]
            for module in ("tessera.flow", "tessera.capture", *paper):
                patch.setattr(importlib.import_module(module), "record_step", recorded)
            for module in ("tessera.planning", "tessera.capture", *paper):
                patch.setattr(importlib.import_module(module), "record_sizes", recorded_sizes)
            for module in ("tessera.serve.planning", "tessera.serve.steps"):
                patch.setattr(importlib.import_module(module), "record", recorded_workload)
            store = importlib.import_module("tessera.profile.store")
            until = store.until
            patch.setattr(store, "until", lambda cap_s: until(min(cap_s, LAUNCH_S)))
        yield


@pytest.fixture(autouse=True, scope="module")
def _products() -> Iterator[None]:
    """After a 16-bit product that a CPU cannot do, torch computes all others of the process by other code:
    their bits would not be those of workers, which had no such product.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", True)
        yield


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged, also by the HTTP server, whose loggers keep it to themselves."""
    text = io.StringIO()
    handler, loggers = logging.StreamHandler(text), [logging.getLogger(), logging.getLogger("uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
    yield text
    for logger in loggers:
        logger.removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-all`."""
    parser.addoption(
        "--whole",
        action="store_true",
        help="slow tests too, whole proofs, and other random examples each time",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Several processes keep the order of files: the slowest have few tests, and xdist runs them last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    gc.disable()  # until tests are collected: what is imported stays
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start what is in the background so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # It looks through all loggers six times for each test; warnings are on standard error all the same.
    config.pluginmanager.set_blocked("logging-plugin")
    is_whole = bool(config.getoption("--whole"))
    sampling.set_whole(is_whole)
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # Other work on the machine makes an example slow; that is no failure. A sample is always the same.
        num = sampling.examples(100, 30)
        settings.register_profile("tessera", deadline=None, derandomize=not is_whole, max_examples=num)
        settings.load_profile("tessera")
        if not is_whole:
            # Nor does it depend on what is imported by then: constants in its source, read in every process.
            from hypothesis.internal.conjecture import providers

            providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Libraries are imported once for all processes."""
    plain = [spec for spec in specs if spec.popen and not spec.python]
    if sys.platform == "linux" and plain:
        python = forked.command(len(plain), config.pluginmanager.hasplugin("_cov"))
        threading.Thread(target=forked.rewrite_asserts, args=(config,), daemon=True).start()
        for spec in plain:
            spec.python = python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait beside files that compute; slow tests only with `--whole`; a test marked `rerun` is
    tried twice.
    """
    file_of = {item: item.nodeid.partition("::")[0] for item in items}
    files = dict.fromkeys(file_of.values())
    timed = [file for file in files if any(part in file for part in TIMED)]
    others = [file for file in files if file not in timed]
    turns = {file: BEGUN_BY * number / len(timed) for number, file in enumerate(timed)}
    turns |= {file: number / len(others) for number, file in enumerate(others)}
    items.sort(key=lambda item: (turns[file_of[item]], file_of[item]))
    can_rerun = importlib.util.find_spec("pytest_rerunfailures") is not None
    for item in items:
        if item.get_closest_marker("slow") is not None and not sampling.is_whole():
            item.add_marker(pytest.mark.skip(reason="slow: make test-all"))
        if can_rerun and item.get_closest_marker("rerun") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Number of reruns, with the tests that needed one."""
    reruns = terminalreporter.stats.get("rerun", [])
    terminalreporter.write_line(f"reruns: {len(reruns)} (at most {MAX_RERUNS})")
    for report in reruns:
        terminalreporter.write_line(f"  rerun: {report.nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """More reruns than allowed fail the session."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and len(reporter.stats.get("rerun", [])) > MAX_RERUNS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """From here on there is garbage; what is there by now stays, and is not looked through again."""
    gc.freeze()
    gc.set_threshold(50_000)  # traces and plans stay: one look in 700 at all of them takes 4 % of all time
    gc.enable()
