"""Workspaces of captured products belong to the graph."""

import pytest
import torch

from tessera.execute.cuda.share import own_workspaces

CLEAR = "_cuda_clearCublasWorkspaces"


def test_workspaces_are_cleared_around_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, so that the capture allocates its own, and after, so that nobody else uses them; errors too."""
    seen: list[str] = []
    monkeypatch.setattr(torch._C, CLEAR, lambda: seen.append("cleared"), raising=False)

    def broken() -> None:
        with own_workspaces():
            seen.append("captured")
            raise RuntimeError("a capture that broke")

    with pytest.raises(RuntimeError, match="broke"):
        broken()
    assert ["cleared", "captured", "cleared"] == seen


def test_a_torch_without_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cleared, and nothing fails."""
    monkeypatch.delattr(torch._C, CLEAR, raising=False)

    ran = False
    with own_workspaces():
        ran = True

    assert ran
