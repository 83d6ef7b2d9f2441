"""A real browser for tests of pages; skips by name where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = {"width": 360, "height": 740}


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a screen."""
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs a browser: chromium or google-chrome")
    with sync.sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def width_of(page: Any) -> int:
    """How wide the page is, with what has to be scrolled to sideways."""
    width: int = page.evaluate("document.documentElement.scrollWidth")
    return width
