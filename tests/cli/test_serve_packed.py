"""serve with quantised checkpoints: the greedy tokens of the dequantised model."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from packed_factory import generated, write_folder, write_words

PROMPT = [5, 17, 200, 31, 8, 90, 44]


@pytest.mark.parametrize(
    ("method", "family"),
    [("mxfp4", "gpt_oss"), ("fp8-blocks", "qwen3"), ("gptq", "llama"), ("awq", "llama")],
)
def test_greedy_tokens_are_those_of_the_dequantised_model(method: str, family: str, tmp_path: Path) -> None:
    """On two emulated GPUs, 24 tokens."""
    reference = write_folder(tmp_path, method, family)
    write_words(tmp_path)
    words = ["--devices", "emu:a100,emu:l40s", "--port", "0", "--seqs", "4", "--effort", "quick", "--json"]
    command = [sys.executable, "-m", "tessera", "serve", str(tmp_path), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            body = {"model": tmp_path.name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = json.load(answer)["choices"][0]["text"]
        finally:
            process.terminate()

    assert [f"t{token}" for token in generated(reference, PROMPT, 24)] == text.split()
