"""Design rules: who may import what."""

import subprocess
import sys
from pathlib import Path

import pytest

# A worker, and what a service has besides: torch is imported once.
STARTS = """
import sys
from tessera.execute.launcher import find_operator
find_operator("tessera.paged_attention.default")
print([name for name in sys.modules if name.startswith("tessera.capture")])
import tessera.serve.app, tessera.serve.rehearse, tessera.cli.start
print([name for name in ("transformers", "scipy", "torch._dynamo", "tessera.flow") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def starts() -> list[str]:
    """What a worker imports that it need not, and a service."""
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stdout.splitlines()


def test_stages_never_import_torch() -> None:
    """Planning works on a laptop: importing these stages does not import torch."""
    stages = ("ir", "analyze", "plan", "simulate", "profile", "report", "adapt")
    code = (
        "import importlib, sys\n"
        f"for stage in {stages}:\n"
        "    importlib.import_module(f'tessera.{stage}')\n"
        "    if 'torch' in sys.modules: sys.exit(stage)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert (0, "") == (found.returncode, found.stderr)


def test_ir_imports_the_standard_library_and_msgspec_only() -> None:
    """The records depend on their codec and on nothing else that has to be installed."""
    code = (
        "import sys; before = set(sys.modules); import tessera.ir; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - sys.stdlib_module_names - {'tessera', 'msgspec', 'typing_extensions'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == found.stdout.strip()


def test_help_does_not_import_torch() -> None:
    """`tessera --help` and `tessera gpus` answer at once."""
    code = (
        "import sys\nfrom tessera.cli import _main\n_main(['gpus', '--json'])\n"
        "sys.exit('torch' in sys.modules)"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode


def test_a_worker_finds_the_operator_of_a_trace_by_its_name(starts: list[str]) -> None:
    """It imports nothing of capture for it."""
    assert "[]" == starts[0]


def test_a_start_by_kept_plans_imports_no_model_code(starts: list[str]) -> None:
    """What builds and plans takes longer to import than all the rest."""
    assert "[]" == starts[1]


def test_stages_meet_only_in_ir() -> None:
    """The import contracts of pyproject.toml hold."""
    tool = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run([tool], capture_output=True, text=True, check=False)

    assert 0 == found.returncode, found.stdout
