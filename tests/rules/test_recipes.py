"""CONTRIBUTING's recipes work: what each of them adds is added to a copy of the source, and used there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera_ptx import analyze

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(\w+)`\s+(?:in|of)\s+\[`[^`]+`\]\(([^)]+)\)")
KERNEL = """
.version 8.0
.target sm_80
.address_size 64

.visible .entry doubled(.param .u64 out, .param .u64 x)
{
    .reg .f32 %f<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [x];
    ldx.global.f32 %f1, [%rd2];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd1], %f2;
    ret;
}
"""
# Every command is one process; this is one for all of them.
USE = """
import contextlib, io, json, sys
from tessera.cli import _main

def said(*words):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        _main([*words, "--json"])
    return json.loads(text.getvalue())

said("capture", "my-model", "--step", "decode", "--batch", "4", "--context", "1", "-o", "my.trace")
plan = ("plan", "my.trace", "--devices", "emu:my-card,emu:l40s", "--microbatches", "2",
        "--effort", "quick", "-o", "my.plan")
found = {"best": said(*plan), "halves": said(*plan, "--policy", "halves")}
found["run"] = said("run", "my.plan", "--verify", "--transport", "counted", "--requests", "2")
found["ptx"] = said("analyze", "my.ptx")
json.dump(found, open("found.json", "w"))
"""


def follow(source: Path) -> None:
    """Makes the changes of all recipes in a copy of the source."""
    for name, text in BLOCK.findall(TEXT):
        path = source.parent / name
        before = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            table = json.loads(before)
            table.append(json.loads(text))
            after = json.dumps(table)
        elif "opcodes" in name:
            after = before.replace('_ROWS = """\n', f'_ROWS = """\n{text}')
        else:
            after = f"{before}\n\n{text}"
        path.write_text(after, encoding="utf-8")


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the commands say that use everything that was added."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(ROOT / "src", folder / "src")
    follow(folder / "src")
    (folder / "my.ptx").write_text(KERNEL)
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found | {"stderr": done.stderr}


def test_the_recipes_are_there() -> None:
    """A device, a transport, a policy, an opcode and an architecture each have a block."""
    assert 5 == len(BLOCK.findall(TEXT))


def test_a_gpu_is_planned_for(used: dict[str, Any]) -> None:
    """A row of the table is a device by its name."""
    assert "emu:my-card" in str(used["best"]["devices"])


def test_a_policy_is_planned_and_compared_with(used: dict[str, Any]) -> None:
    """A policy makes a plan of its own, and no throughput plan falls below it."""
    assert "halves" == used["halves"]["policy"]
    assert used["best"]["throughput"] >= used["best"]["baselines"]["halves"] > 0


def test_a_model_runs_over_a_transport(used: dict[str, Any]) -> None:
    """The added model, divided, has its own bits over the added transport, which sent them."""
    assert used["run"]["verified"] is True
    assert re.search(r"device \d sent [1-9]\d* bytes", used["stderr"])


def test_an_opcode_is_understood(used: dict[str, Any]) -> None:
    """A kernel with the opcode is immovable without its row, and read and written memory is known with it."""
    (unknown,) = analyze(KERNEL)
    assert not unknown.movable
    (kernel,) = used["ptx"]["kernels"]
    assert kernel["movable"]
    assert [(a["param"], a["read"], a["write"]) for a in kernel["accesses"]] == [
        (0, False, True),
        (1, True, False),
    ]


@pytest.mark.parametrize(("name", "path"), NAMED.findall(TEXT))
def test_a_name_is_in_its_file(name: str, path: str) -> None:
    """What CONTRIBUTING says is in a file is there."""
    assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8"))
