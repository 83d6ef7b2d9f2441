"""Settings of tests that run commands."""

from collections.abc import Iterator

import pytest

from sampling import is_whole


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of progress: how soon one comes depends on what else the machine does."""
    monkeypatch.setattr("tessera.cli.output.QUIET_S", 3600.0)


@pytest.fixture(autouse=True, scope="module")
def _short_search() -> Iterator[None]:
    """Fewer mixes are looked at: how good plans are is asked elsewhere, here what is said of them."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_whole():
            patch.setattr("tessera.plan.search.local.MOST", 8)
            patch.setattr("tessera.plan.search.local.DEPTHS", (1.1, 1.35))
        yield
