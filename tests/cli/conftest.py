"""Settings of tests that run commands."""

import pytest


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of progress: how soon one comes depends on what else the machine does."""
    monkeypatch.setattr("tessera.cli.output.QUIET_S", 3600.0)
