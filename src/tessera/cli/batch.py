"""tessera batch: a file of requests in OpenAI's batch format, answered by a server or a model.

Every line of the input is {"custom_id", "method": "POST", "url", "body"}; every line of the output {"id",
"custom_id", "response": {"status_code", "request_id", "body"}, "error"}, in the order of completion. A line
is written when its answer is complete: the same command continues after a kill.

Not handled: input that changes between two runs.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, get_args

import msgspec
import typer

from tessera.cli.chat import ApiClient, ServerOptions
from tessera.cli.output import FILE, Record, option, progress
from tessera.cli.plan_model import EffortOption
from tessera.errors import LoadError, TesseraError

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
# Statuses of a busy or starting server; tries, and the first pause, which doubles.
BUSY = (429, 502, 503, 504)
MAX_TRIES, PAUSE_S = 8, 0.5
REQUEST = "batch_req_"
# Beginning of every answer, also of one that a kill cut short.
START = f'{{"id": "{REQUEST}'.encode()


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: str
    url: BatchUrl
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class BatchAnswer(msgspec.Struct, frozen=True):
    custom_id: str
    response: dict[str, Any]


class BatchRun(Record, frozen=True):
    requests: int
    # By an earlier run.
    done_before: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    output: Path
    seconds: float = 0.0


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one per line.", **FILE)],
    output: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", dir_okay=False, help="Answers; continued if it exists.")
    ],
    server: ServerOptions,
    target: str | None = option(
        None, "Server, as http://127.0.0.1:8000, or a model.", shown="the requests' model"
    ),
    effort: EffortOption = "full",
    at_once: int = option(64, "Requests in flight.", min=1, max=1024),
) -> BatchRun:
    """Answer a file of requests in OpenAI's batch format.

    A second run goes on where one was stopped.
    """
    requests = _requests(source)
    with _opened(output) as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TesseraError("another batch writes to this file", "Wait for it.", str(output)) from None
        done = _done(out, output)
        rest = [request for name, request in requests.items() if name not in done]
        counts = {"failed": 0, "prompt_tokens": 0, "output_tokens": 0}
        if rest:
            with server.client(target or _model(rest, source), effort) as client:
                for line in _answers(client, rest, at_once):
                    out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    out.flush()
                    _count(counts, line["response"])
    return BatchRun(requests=len(requests), done_before=len(requests) - len(rest), output=output, **counts)


def _opened(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():
        raise TesseraError("not a regular file", "Name one, or a new one.", str(path))
    try:
        return path.open("ab+")
    except OSError as error:
        raise TesseraError(f"cannot write: {error.strerror}", "Choose another place.", str(path)) from None


def _requests(path: Path) -> dict[str, BatchRequest]:
    requests: dict[str, BatchRequest] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            request = _request(line, f"{path}:{number}")
            if requests.setdefault(request.custom_id, request) is not request:
                message = f"custom_id '{request.custom_id}' appears twice"
                raise TesseraError(message, "Give every request another one.", f"{path}:{number}")
    if not requests:
        raise TesseraError("the file has no request", "Write one JSON object per line.", str(path))
    return requests


def _request(line: bytes, place: str) -> BatchRequest:
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        remedy = f"Use POST and one of {', '.join(get_args(BatchUrl))}."
        raise TesseraError(f"not a request of OpenAI's batch format: {error}", remedy, place) from None
    if request.body.get("stream"):
        raise TesseraError("a batch does not stream", 'Leave "stream" out.', place)
    return request


def _done(out: BinaryIO, path: Path) -> set[str]:
    """A line that a kill cut short is removed."""
    out.seek(0)
    names, end = set(), 0
    for line in out:
        is_cut = not line.endswith(b"\n")
        name = None if is_cut else _name(line)
        if name is None and not (is_cut and START.startswith(line[: len(START)])):
            remedy = "Name a new file, or the output of the same batch."
            raise TesseraError("the file holds other lines than answers", remedy, str(path))
        if name is None:
            break
        names.add(name)
        end += len(line)
    out.truncate(end)
    out.seek(0, os.SEEK_END)
    return names


def _name(line: bytes) -> str | None:
    """None: the line is no answer."""
    try:
        return msgspec.json.decode(line, type=BatchAnswer).custom_id
    except msgspec.MsgspecError:
        return None


def _model(requests: Iterable[BatchRequest], path: Path) -> str:
    models = {str(request.body.get("model") or "") for request in requests}
    if len(models) != 1 or "" in models:
        remedy = "Name the server or the model: --target."
        raise TesseraError(f"the requests name {len(models - {''})} models", remedy, str(path))
    return models.pop()


def _answers(client: ApiClient, requests: list[BatchRequest], at_once: int) -> Iterator[dict[str, Any]]:
    # Nobody waits for its threads after an interruption.
    with progress("answering", len(requests)) as advance, ThreadPool(at_once) as threads:
        for line in threads.imap_unordered(partial(_answer, client), requests):
            advance("answering")
            yield line


def _answer(client: ApiClient, request: BatchRequest) -> dict[str, Any]:
    for number in range(MAX_TRIES):
        if number:
            time.sleep(PAUSE_S * 2 ** (number - 1))
        status, document = client.post(request.url, request.body)
        if status not in BUSY:
            name = f"{REQUEST}{secrets.token_hex(12)}"
            response = {"status_code": status, "request_id": document.get("id") or name, "body": document}
            return {"id": name, "custom_id": request.custom_id, "response": response, "error": None}
    message = f"the server is busy: {document['error']['message']}"
    raise LoadError("busy", message, "Run the command again to continue.", client.url)


def _count(counts: dict[str, int], response: dict[str, Any]) -> None:
    usage = response["body"].get("usage") or {}
    counts["failed"] += response["status_code"] != 200
    counts["prompt_tokens"] += usage.get("prompt_tokens") or 0
    counts["output_tokens"] += usage.get("completion_tokens") or 0
