"""Keys: who is let in, what is open, and how keys are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from http_factory import Running, Scripted, running  # noqa: E402
from tessera.cli.serve_options import read_keys  # noqa: E402
from tessera.errors import TesseraError  # noqa: E402
from tessera.serve.limits import is_local_name  # noqa: E402

KEYS = ("first-secret", "second-secret")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def service() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def server(service: Scripted) -> Iterator[Running]:
    with running(service, keys=KEYS) as found:
        yield found


def asked(server: Running, path: str, header: str | None) -> Any:
    headers = {} if header is None else {"Authorization": header}
    return httpx.get(server.url + path, headers=headers)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/version", "/v1/plan", "/v1/state", "/openapi.json", "/x"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Basic first-secret", "Bearer first-secre"]
)
def test_strangers_see_nothing(server: Running, path: str, header: str | None) -> None:
    """Without a right key every path is 401 in OpenAI's shape, whether it exists or not."""
    answer = asked(server, path, header)

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/"])
def test_health_and_the_empty_page_are_open(server: Running, path: str) -> None:
    """A load balancer needs no key, nor does the page, which asks for one."""
    assert asked(server, path, None).status_code == 200


def test_health_is_asked_without_a_body(server: Running) -> None:
    """Load balancers that send HEAD are answered too."""
    assert httpx.head(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(server: Running, service: Scripted, key: str) -> None:
    """Each key lets in, under a client's name of its own for the queue."""
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=CHAT, headers={"Authorization": f"bearer {key}"}
    )

    assert answer.status_code == 200
    assert service.asks[-1].client == f"key {KEYS.index(key)}"


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST.:80", True),
        ("my.localhost:1", True),
        ("[::1]:8000", True),
        ("", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("localhost.evil.example", False),
        ("192.168.0.7:8000", False),
    ],
)
def test_local_server_answers_to_local_names(host: str, is_ours: bool) -> None:
    """A page whose name points to this machine for a moment is not let in."""
    assert is_local_name(host) == is_ours


def test_other_names_are_refused() -> None:
    """Without a key, a local server refuses a request for another name with 403, and serves its own."""
    with running(Scripted(), is_local=True) as server:
        assert httpx.get(f"{server.url}/version").status_code == 200
        answer = httpx.get(f"{server.url}/version", headers={"Host": "evil.example"})

    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "unknown_host"


def test_keys_come_from_words_and_files(tmp_path: Path) -> None:
    """A word is a key, @FILE has one a line; comments and doubles are dropped."""
    path = tmp_path / "keys"
    path.write_text("# ours\nfrom-a-file\n\nfrom-a-word\n")

    assert read_keys(["from-a-word", f"@{path}"]) == ("from-a-word", "from-a-file")


@pytest.mark.parametrize("word", ["short", "with blank", "nön-ascii-key", "", "@/no/such/file"])
def test_bad_keys_are_refused(word: str) -> None:
    """A key that no header can carry, a short one, and a missing file are one line."""
    with pytest.raises(TesseraError):
        read_keys([word])
