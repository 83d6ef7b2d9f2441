"""Keys: who may use the server.

With at least one key, every path needs `Authorization: Bearer KEY` except those of `OPEN`: /health, for load
balancers, and the live page itself, which holds no figures and asks for the key. All keys are compared, in
constant time, so that how long an answer takes says nothing about them.

Without a key, a server that listens on loopback answers to this machine's names only. Otherwise a page from
elsewhere, whose name its owner lets point to 127.0.0.1 for a moment, could use it through the browser.
"""

import hashlib
import hmac
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.errors import TesseraError
from tessera.serve.openai.errors import AMBIGUOUS, ApiError

OPEN = frozenset({"/", "/health"})
# Where the name of the client is kept for the queue, in which clients take turns.
CLIENT = "tessera.client"
MIN_KEY_CHARS = 8


class Keys:
    """An ASGI layer that refuses strangers and names clients."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], is_local: bool = False) -> None:
        self._app, self._is_local = app, is_local
        self._hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through under a client's name, or answers 400, 401 or 403."""
        if scope["type"] == "http":
            number = self._number(scope) if self._hashes else None
            error = self._refusal(scope, number)
            if error is not None:
                await error.response(scope, receive, send)
                return
            host = (scope.get("client") or ("", 0))[0]
            scope[CLIENT] = f"key {number}" if number is not None else host
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, number: int | None) -> ApiError | None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            message = "both Content-Length and Transfer-Encoding say where the body ends; send one of them"
            return ApiError(400, message, code=AMBIGUOUS)
        if self._hashes:
            is_welcome = number is not None or scope["path"] in OPEN
            return None if is_welcome else ApiError(401, _complaint(scope), code="invalid_api_key")
        if self._is_local and not is_local_name(_header(scope, b"host").decode("latin-1")):
            message = "This server answers to localhost only; start it with --api-key to be called otherwise."
            return ApiError(403, message, code="unknown_host")
        return None

    def _number(self, scope: Scope) -> int | None:
        given = _hash(_bearer(scope))
        # No early end: every key is compared.
        same = [hmac.compare_digest(given, known) for known in self._hashes]
        return same.index(True) if any(same) else None


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes:
    word, _, key = _header(scope, b"authorization").partition(b" ")
    return key.strip() if word.lower() == b"bearer" else b""


def _header(scope: Scope, name: bytes) -> bytes:
    value: bytes = next((v for k, v in scope["headers"] if k == name), b"")
    return value


def is_local_name(host: str) -> bool:
    """True if a Host header names this machine; an empty one, of HTTP/1.0, is no browser's."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    return name in {"", "localhost", "::1"} or name.endswith(".localhost") or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _complaint(scope: Scope) -> str:
    if not _bearer(scope):
        return "This server needs a key: send the header 'Authorization: Bearer KEY'."
    return "The key is not one of this server's."


def read_keys(given: Iterable[str]) -> tuple[str, ...]:
    """Keys from the command line: each is a key, or @FILE with one key a line."""
    keys: list[str] = []
    for word in given:
        keys += _from_file(Path(word[1:])) if word.startswith("@") else [word]
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            message = f"a key needs {MIN_KEY_CHARS} or more printable ASCII characters without blanks"
            raise TesseraError(message, "Make one: openssl rand -hex 24.", "--api-key")
    return tuple(dict.fromkeys(keys))


def _from_file(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(f"cannot read the keys: {error}", place=str(path)) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise TesseraError("a file without a key", "Write one key a line.", str(path))
    return keys
