"""The corpus of unsafe programs shows what each defence of capture is for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_defence_of_capture_refuses_something_alone() -> None:
    script = ROOT / "scripts" / "capture_defences.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
