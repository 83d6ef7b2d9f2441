"""Steps of tokens through the command line: captured, planned and run like any other."""

from pathlib import Path

import pytest

from commands import answer


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("tiny-llama", [(4, 4), (4, 24)]), pytest.param("tiny-mamba", [(4, 4)], marks=pytest.mark.slow)],
)
def test_a_plan_over_steps_of_several_sizes_runs_to_the_same_bits(
    model: str, sizes: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes share the pages; later runs are tokens of other sequences."""
    traces = []
    for sequences, tokens in sizes:
        traces.append(tmp_path / f"{tokens}.trace")
        what = ["--step", "tokens", "--batch", sequences, "--context", tokens, "--reserve", 256]
        answer("capture", model, *what, "-o", traces[-1], capsys=capsys)
    counts = ["--counts", ",".join(["3"] * len(sizes))]
    plan = tmp_path / "x.plan"
    devices = ["--devices", "emu:a100,emu:l40s", "--effort", "quick"]
    answer("plan", *traces, *counts, *devices, "-o", plan, capsys=capsys)
    found = answer("run", plan, "--verify", "--requests", "4", capsys=capsys)

    assert found["verified"] is True, found
