"""serve with quantised checkpoints and LoRA adapters: the greedy tokens of plain models."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from commands import used
from lora_factory import write_adapter
from packed_factory import answer, serve_words, serving, words, write_folder, write_words
from sampling import examples

PROMPT = [5, 17, 200, 31, 8, 90, 44]
# The prompt that other prompts share is more than a page.
LONG = [(7 * i) % 250 for i in range(40)]
NUM = examples(24, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "family"), [("mxfp4", "gpt_oss"), ("fp8-blocks", "qwen3"), ("gptq", "llama"), ("awq", "llama")]
)
def test_greedy_tokens_are_those_of_the_dequantised_model(method: str, family: str, tmp_path: Path) -> None:
    """24 tokens."""
    reference = write_folder(tmp_path, method, family)
    write_words(tmp_path)
    with serving(tmp_path) as url:
        found = answer(url, tmp_path.name, PROMPT)

    assert words(reference, PROMPT) == found


def test_adapters_are_chosen_by_name(tmp_path: Path) -> None:
    """Two adapters and their base at once, also after the same prompt: each answers as merged."""
    base = write_folder(tmp_path / "base", "awq", layers=1)
    write_words(tmp_path / "base")
    models = {"base": base}
    for seed, name in enumerate(("one", "two")):
        models[name] = write_adapter(tmp_path / name, base, seed)
    options = [word for name in ("one", "two") for word in ("--lora", f"{name}={tmp_path / name}")]
    asked = [(name, prompt) for prompt in (LONG, PROMPT, LONG) for name in models]

    def talk(said: dict[str, str]) -> tuple[list[list[str]], list[str]]:
        url = said["url"]
        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda ask: answer(url, ask[0], ask[1], NUM), asked))
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as listed:
            names = [card["id"] for card in json.load(listed)["data"]]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            answer(url, "three", PROMPT)
        return found, names

    (found, names), _ = used(talk, *serve_words(tmp_path / "base", *options))
    assert ["base", "one", "two"] == names
    asks = [(name, prompt) for name in models for prompt in (LONG, PROMPT)]
    own = {(name, len(prompt)): words(models[name], prompt, NUM) for name, prompt in asks}
    assert [own[name, len(prompt)] for name, prompt in asked] == found
    assert 3 == len({tuple(own[name, len(LONG)]) for name in models})
