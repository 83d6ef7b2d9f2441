"""Keys: who may use the server.

With at least one key, every path needs `Authorization: Bearer KEY` except those of `OPEN`: /health, for load
balancers, and the live page itself, which holds no figures and asks for the key. All keys are compared, in
constant time, so that how long an answer takes says nothing about them.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.errors import TesseraError
from tessera.serve.openai_errors import ApiError, response_of

OPEN = frozenset({"/", "/health"})
# Where the name of the client is kept for the queue, in which clients take turns.
CLIENT = "tessera.client"
MIN_KEY_CHARS = 8


class Keys:
    """An ASGI layer that refuses strangers and names clients."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through under a client's name, or answers 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = self._number(scope) if self._hashes else None
        if self._hashes and number is None and scope["path"] not in OPEN:
            error = ApiError(401, _complaint(scope), code="invalid_api_key")
            await response_of(error)(scope, receive, send)
            return
        host = (scope.get("client") or ("", 0))[0]
        scope[CLIENT] = f"key {number}" if number is not None else host
        await self._app(scope, receive, send)

    def _number(self, scope: Scope) -> int | None:
        given = _hash(_bearer(scope))
        # No early end: every key is compared.
        same = [hmac.compare_digest(given, known) for known in self._hashes]
        return same.index(True) if any(same) else None


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes:
    value: bytes = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
    word, _, key = value.partition(b" ")
    return key.strip() if word.lower() == b"bearer" else b""


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
