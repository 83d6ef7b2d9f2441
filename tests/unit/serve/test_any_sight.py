"""Pictures for models without code of their own: what is answered is what transformers generates."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import seeing
from seeing import data_url, tokens_of
from tessera.serve.records import Ask, Sampling, ServeSpec
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel, served
from tessera.serve.text import MARK, FolderText

SPEC = ServeSpec(microbatches=2, rows=2, capacity=240, max_batch_tokens=24, random_weights=True, joined=False)
NAMES = ("llava", "aya_vision")
SAID = (f"{MARK} judge", f"vow {MARK} my {MARK}", "quartz")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name."""
    return {name: seeing.make_seeing_folder(name, tmp_path_factory.mktemp(name)) for name in seeing.MAKERS}


@cache
def model_of(folder: str) -> ServedModel:
    return served(folder, SPEC)


def ask_of(folder: str, said: str, *seeds: int) -> Ask:
    """A chat with a picture for each of its marks."""
    reader, words = model_of(folder).picture_reader, FolderText(Path(folder))
    assert reader is not None
    urls = [data_url(seeing.random_picture(seed)) for seed in seeds]
    prompt, pictures = reader.placed(
        words.chat([{"role": "user", "content": said}]), [reader.pixels_of(url) for url in urls]
    )
    return Ask(tuple(prompt), 6, Sampling(temperature=0.0), ignores_end=True, pictures=pictures)


def answered(made: ServedModel, asks: Sequence[Ask]) -> tuple[list[list[int]], int]:
    """Answers of one service to all at once, and its preemptions."""

    async def together(service: Service) -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(service, ask) for ask in asks)))

    with seeing.running(made) as service:
        return asyncio.run(together(service)), service.snapshot().preemptions


@pytest.mark.parametrize("name", NAMES)
def test_answers_about_pictures_are_those_of_generate(folders: dict[str, str], name: str) -> None:
    """One picture, two, or none, in prompts that share steps; the tokens of the processor stand for each."""
    folder = folders[name]
    asks = [ask_of(folder, said, *range(said.count(MARK))) for said in SAID]

    found, _ = answered(model_of(folder), asks)

    module = model_of(folder).workloads[-1].module
    assert [seeing.generated(module, ask) for ask in asks] == found


def test_the_same_words_about_another_picture_are_another_question(folders: dict[str, str]) -> None:
    """Also where what was read of the first prompt is found again."""
    folder = folders["llava"]
    first, other = (ask_of(folder, SAID[0], seed) for seed in (0, 3))
    asks = [first, other, first, other]

    found, _ = answered(model_of(folder), asks)

    module = model_of(folder).workloads[-1].module
    assert seeing.generated(module, first) != seeing.generated(module, other)
    assert [seeing.generated(module, ask) for ask in asks] == found


def test_pictures_that_are_put_aside_are_seen_again(folders: dict[str, str]) -> None:
    """Where pages run out, a prompt with its picture is read anew."""
    folder = folders["llava"]
    asks = [replace(ask_of(folder, SAID[1], seed, seed + 1), max_tokens=40) for seed in range(2)]
    small = served(folder, replace(SPEC, microbatches=1, pool_tokens=144))

    found, preemptions = answered(small, asks)

    assert preemptions
    assert [seeing.generated(small.workloads[-1].module, ask) for ask in asks] == found


def test_attention_in_both_directions_is_not_served(folders: dict[str, str]) -> None:
    """Gemma 3 reads text, and says why."""
    made = model_of(folders["gemma3"])

    assert made.picture_reader is None
    assert "attention in both directions" in made.text_only


def test_a_folder_without_a_processor_reads_text(folders: dict[str, str], tmp_path: Path) -> None:
    """Nobody knows what its pixels are."""
    shutil.copytree(folders["llava"], tmp_path, dirs_exist_ok=True)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)

    assert "no preprocessor_config.json" in served(str(tmp_path), SPEC).text_only
