"""Settings of all tests."""

import importlib.util

import pytest

# Real processes, sockets and clocks: another process of the machine can make one late. Such a test is tried
# once more, and the summary shows that it was.
TIMED = ("unit/serve", "unit/execute", "unit/compile", "cli/")

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # Other work on the machine makes an example slow; that is no failure. The same examples in every run.
    settings.register_profile("tessera", deadline=None, derandomize=True)
    settings.load_profile("tessera")


def pytest_configure(config: pytest.Config) -> None:
    """Several processes keep the order of files: the slowest have few tests, and xdist runs them last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that depend on the clock."""
    if importlib.util.find_spec("pytest_rerunfailures") is None:
        return
    for item in items:
        if any(part in item.nodeid for part in TIMED):
            item.add_marker(pytest.mark.flaky(reruns=1))
