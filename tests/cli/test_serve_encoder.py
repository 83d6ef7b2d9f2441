"""`tessera serve` of a folder with an encoder: embeddings, and what it says where nobody watches."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'serve'")
openai = pytest.importorskip("openai", reason="needs openai")

from commands import used  # noqa: E402
from tessera.cli.output import progress  # noqa: E402
from text_factory import make_text_folder  # noqa: E402

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder with weights and a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoints") / "small-bert"
    path.mkdir()
    make_text_folder(path)
    config = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=64)
    transformers.BertModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def told(folder: Path) -> tuple[dict[str, Any], list[float], str]:
    """What the command said first, the vector that it gave, and all that it wrote to standard error."""

    def ask(said: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
        with openai.OpenAI(base_url=f"{said['url']}/v1", api_key="unused", max_retries=0) as client:
            return said, client.embeddings.create(model="small-bert", input="quartz").data[0].embedding

    transformers.utils.logging.enable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.cli.output.QUIET_S", 0.0)  # what is over soon is told too
        found, errors = used(ask, "serve", folder, "--port", "0", "--json")
    return *found, errors


def test_an_encoder_is_served_by_its_folder(told: tuple[dict[str, Any], list[float], str]) -> None:
    """One line says where it is and how long its vectors are."""
    said, vector, _ = told

    assert {"model": "small-bert", "dimensions": 32, "max_len": 64}.items() <= said.items()
    assert 32 == len(vector)


def test_progress_is_plain_lines_where_nobody_watches(told: tuple[dict[str, Any], list[float], str]) -> None:
    """Each thing that is done is told; no bars of ours and none of transformers', which loads weights."""
    lines = told[2].splitlines()
    assert ["tessera: serving", "tessera: building"] == [line.rpartition(" ")[0] for line in lines[:2]]
    assert not any(letter in told[2] for letter in "\r\x1b█%")


def test_what_is_over_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("counting", 3) as advance:
        advance("one")

    assert not capsys.readouterr().err


def test_of_many_things_the_latest_is_told_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand steps are no thousand lines; a few are told each."""
    monkeypatch.setattr("tessera.cli.output.QUIET_S", 0.0)
    with progress("counting", 1000) as advance:
        for number in range(1000):
            advance(f"number {number}")
    counted = capsys.readouterr().err.splitlines()
    with progress("starting") as advance:
        for what in ("building", "planning", "planning"):
            advance(what)

    assert "tessera: counting (0 of 1000)" == counted[0]
    assert len(counted) < 5
    assert [f"tessera: {what}" for what in ("starting", "building", "planning")] == (
        capsys.readouterr().err.splitlines()
    )
