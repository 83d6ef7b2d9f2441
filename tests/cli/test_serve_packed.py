"""serve with quantised checkpoints and LoRA adapters: the greedy tokens of plain models."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from lora_factory import write_adapter
from packed_factory import generated, write_folder, write_words

PROMPT = [5, 17, 200, 31, 8, 90, 44]
# The prompt that other prompts share is more than a page.
LONG = [(7 * i) % 250 for i in range(40)]


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[str]:
    """Address of a service on two emulated GPUs."""
    sizes = ["--devices", "emu:a100,emu:l40s", "--port", "0", "--seqs", "4", "--effort", "quick", "--json"]
    command = [sys.executable, "-m", "tessera", "serve", str(folder), *sizes, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def post(url: str, **body: Any) -> Any:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=120) as answer:
        return json.load(answer)


def answer(url: str, model: str, prompt: list[int]) -> list[str]:
    document = post(f"{url}/v1/completions", model=model, prompt=prompt, max_tokens=24, temperature=0)
    assert model == document["model"]
    return str(document["choices"][0]["text"]).split()


def words(model: Any, prompt: list[int]) -> list[str]:
    return [f"t{token}" for token in generated(model, prompt, 24)]


@pytest.mark.parametrize(
    ("method", "family"),
    [("mxfp4", "gpt_oss"), ("fp8-blocks", "qwen3"), ("gptq", "llama"), ("awq", "llama")],
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
    base = write_folder(tmp_path / "base", "awq")
    write_words(tmp_path / "base")
    models = {"base": base}
    for seed, name in enumerate(("one", "two")):
        models[name] = write_adapter(tmp_path / name, base, seed)
    options = [word for name in ("one", "two") for word in ("--lora", f"{name}={tmp_path / name}")]
    asked = [(name, prompt) for prompt in (LONG, PROMPT, LONG) for name in models]
    with serving(tmp_path / "base", *options) as url, ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda ask: answer(url, *ask), asked))
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as listed:
            names = [card["id"] for card in json.load(listed)["data"]]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            answer(url, "three", PROMPT)

    assert ["base", "one", "two"] == names
    assert [words(models[name], prompt) for name, prompt in asked] == found
    assert 3 == len({tuple(words(model, LONG)) for model in models.values()})
