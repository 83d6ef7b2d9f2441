"""The benchmark of coverage in short: unlike architectures through the whole flow, on two workers."""

import json
from pathlib import Path

import pytest
from benchmarks.coverage import RESULTS, check, markdown
from benchmarks.coverage_models import MODELS, SHORT

from sampling import some_of
from tessera.execute.processes import FORKSERVER

pytest.importorskip("transformers")


# The rest of the list goes the same ways.
ALWAYS = ("t5",)


@pytest.mark.parametrize("name", some_of(SHORT, ALWAYS))
def test_an_architecture_is_captured_planned_and_verified(name: str) -> None:
    """From a configuration alone, with every output and state equal bit for bit."""
    model = next(model for model in MODELS if model.name == name)
    if model.library == "diffusers":
        pytest.importorskip("diffusers")

    row = check(model, is_served=False, method=FORKSERVER)

    assert [True, True, True] == [row.get(stage) for stage in ("captured", "planned", "verified")]


def test_a_reason_is_a_note_below_the_table() -> None:
    """What failed is told once, by number."""
    text = markdown([{"name": "gpt9", "class": "A", "captured": True, "planned": "a gpt9 is too large"}])

    assert "| gpt9 | A | - | yes | no (1) | - | - |" in text
    assert "1. it is too large" in text


def test_the_documents_show_the_results() -> None:
    """docs/models.md has the table of the results that are kept."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    root = Path(__file__).parents[3]

    assert markdown(rows) in (root / "docs" / "models.md").read_text(encoding="utf-8")
