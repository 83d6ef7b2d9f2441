"""The monitor is logic alone."""

import subprocess
import sys


def test_the_monitor_needs_neither_torch_nor_another_stage() -> None:
    """Importing it imports no torch and nothing of capture, plan, execute or simulate."""
    others = ("torch", "tessera.capture", "tessera.plan", "tessera.execute", "tessera.simulate")
    code = f"import sys, tessera.adapt.controller; sys.exit(any(name in sys.modules for name in {others!r}))"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
