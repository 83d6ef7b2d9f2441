"""tessera chat: a conversation in the terminal; and `ApiClient`, the HTTP client of chat and batch.

A model is served meanwhile on a free port of loopback, with a key of its own.
"""

import json
import re
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from typing import Annotated, Any

import typer

from tessera.cli.output import HIDDEN, Record, option
from tessera.cli.plan import LinkOption
from tessera.cli.plan_model import Effort, EffortOption
from tessera.cli.serve import answering
from tessera.cli.serve_options import DevicesOption, KeyOption, MaxModelLen, ServeConfig, key_of
from tessera.errors import LoadError, TesseraError, first_line

HELP = "Type a message, or: /reset for a new conversation, /exit to end."
PROMPT = "> "
HOST_PORT = re.compile(r"[\w.-]+:\d+(/.*)?$")


@dataclass(frozen=True)
class ApiClient:
    url: str
    key: str = ""
    # Without a byte.
    timeout_s: float | None = 600.0

    @contextmanager
    def _answer(self, path: str, body: object = None) -> Iterator[Any]:
        """An answer of any status; LoadError where there is none, or none of such a server."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        raw = None if body is None else _encoded(body)
        try:
            request = urllib.request.Request(self.url.rstrip("/").removesuffix("/v1") + path, raw, headers)
            response = urllib.request.urlopen(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            response = error
        except (OSError, ValueError, HTTPException) as error:
            reason = first_line(getattr(error, "reason", error))
            remedy = "Start it: tessera serve MODEL."
            raise LoadError("connection", f"cannot reach the server: {reason}", remedy, self.url) from None
        try:
            with response:
                yield response
        except (OSError, ValueError, LookupError, TypeError, HTTPException) as error:
            message = f"the answer is cut off, or not one of OpenAI's API: {error}"
            raise LoadError("connection", message, place=self.url) from None

    def post(self, path: str, body: object) -> tuple[int, dict[str, Any]]:
        with self._answer(path, body) as response:
            return response.status, _document(response)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._answer(path, body | {"stream": True}) as response:
            self._check(response)
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def model(self) -> str:
        with self._answer("/v1/models") as response:
            self._check(response, "See --api-key.")
            return str(json.load(response)["data"][0]["id"])

    def _check(self, response: Any, remedy: str = "") -> None:
        if response.status != 200:
            raise TesseraError(_document(response)["error"]["message"], remedy, self.url)


def _encoded(body: object) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TesseraError(f"the request cannot be written as JSON: {error}") from None


def _document(response: Any) -> dict[str, Any]:
    raw = response.read()
    if response.status == 200:
        return {**json.loads(raw)}
    with suppress(ValueError, TypeError, LookupError):
        document: dict[str, Any] = json.loads(raw)
        if document["error"]["message"]:
            return document
    return {"error": {"message": f"{response}: {raw[:200].decode(errors='replace')}"}}


@contextmanager
def client_of(model: str, config: ServeConfig) -> Iterator[ApiClient]:
    """The model is served meanwhile."""
    key = secrets.token_hex(16)
    with answering(model, replace(config, port=0, api_key=[key], drain=0.0)) as (url, _):
        yield ApiClient(url, key, None)


@dataclass(frozen=True)
class ServerOptions:
    devices: DevicesOption = None
    link: LinkOption = None
    max_model_len: MaxModelLen = None
    api_key: KeyOption = ""

    @contextmanager
    def client(self, target: str, effort: Effort) -> Iterator[ApiClient]:
        if HOST_PORT.match(target):
            target = f"http://{target}"
        if target.startswith(("http://", "https://")):
            yield ApiClient(target, key_of(self.api_key))
            return
        config = ServeConfig(**asdict(self) | {"api_key": None}, effort=effort)
        with client_of(target, config) as client:
            yield client


class ChatTurn(Record, frozen=True):
    """One answer; people have read it as it came."""

    model: Annotated[str, HIDDEN]
    content: Annotated[str, HIDDEN]
    finish_reason: Annotated[str | None, HIDDEN]


def chat(
    target: Annotated[
        str,
        typer.Argument(metavar="URL | MODEL", help="Server, as http://127.0.0.1:8000, or a model to serve."),
    ],
    server: ServerOptions,
    effort: EffortOption = "quick",
    system: str = option("", "System message."),
    temperature: float | None = option(None, "Temperature; 0: greedy.", shown="the server's", min=0, max=2),
    max_tokens: int | None = option(None, "Maximum tokens of an answer.", shown="the context's rest", min=1),
) -> Iterator[ChatTurn | str]:
    """Talk to a server, or to a model that is served meanwhile.

    Reads one message per line from the terminal or standard input; the answer appears as it is generated.
    """
    values = {"temperature": temperature, "max_completion_tokens": max_tokens}
    options = {name: value for name, value in values.items() if value is not None}
    opening = [{"role": "system", "content": system}] if system else []
    with server.client(target, effort) as client:
        model, messages = client.model(), list(opening)
        if sys.stdin.isatty():
            typer.echo(f"{model} at {client.url}. {HELP}", err=True)
        while (line := _line()) is not None and line != "/exit":
            if line == "/reset":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                turn = yield from _turn(client, {"model": model, "messages": messages, **options})
                yield turn
                messages.append({"role": "assistant", "content": turn.content})


def _line() -> str | None:
    try:
        line = input(PROMPT if sys.stdin.isatty() else "").strip()
        line.encode()  # half of a pair stands for a byte that is no text
    except EOFError:
        return None
    except UnicodeError:
        raise TesseraError("the message is no UTF-8 text", place="standard input") from None
    return line


def _turn(client: ApiClient, body: dict[str, Any]) -> Generator[str, None, ChatTurn]:
    pieces, reason = [], None
    for chunk in client.stream("/v1/chat/completions", body):
        if "error" in chunk:
            raise TesseraError(chunk["error"]["message"], place=client.url)
        for choice in chunk["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            reason = choice["finish_reason"] or reason
            yield pieces[-1]
    yield "\n"
    if reason is None:
        raise LoadError("connection", "the answer ended early", "Ask again.", client.url)
    return ChatTurn(model=body["model"], content="".join(pieces), finish_reason=reason)
