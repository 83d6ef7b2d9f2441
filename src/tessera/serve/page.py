"""The live page: one HTML file without a byte from elsewhere, and the rule that keeps it so.

The page reads /v1/state every second and /v1/plan when the policy changes. Its script and style are named by
their hashes in the Content-Security-Policy, so that the browser runs nothing else, whatever a name may hold.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    """The page and its Content-Security-Policy."""

    html: str
    policy: str


def live_page() -> Page:
    """Reads the page that is installed with the package."""
    html = files("tessera.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _hashes(html: str, tag: str) -> str:
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in bodies
    )
