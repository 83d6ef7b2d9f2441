"""The JSON schemas of docs/schemas say what artifact files hold."""

import gzip
import json
from pathlib import Path

import jsonschema
import pytest
from scripts.schemas import PLACE, schemas

from factories import make_chain, make_plan
from tessera.analyze import build_graph
from tessera.execute import lower
from tessera.ir import Trace, save
from tessera.ir.files import FORMAT_VERSION
from tessera.simulate import simulate

OUTLINES = Path(__file__).parents[3] / "src" / "tessera" / "capture" / "outlines"


def problems(text: str) -> list[str]:
    """What the schemas find wrong with an artifact file."""
    head, _, body = text.partition("\n")
    header = json.loads(head)
    found = []
    for name, value in (("header", header), (header["tessera"], json.loads(body))):
        schema = json.loads((PLACE / f"{name}-{FORMAT_VERSION}.json").read_text(encoding="utf-8"))
        errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
        found += [f"{name}: {error.json_path}: {error.message}" for error in errors]
    return found


def test_schemas_are_those_of_the_records() -> None:
    """docs/schemas has what `python scripts/schemas.py` makes of today's records."""
    committed = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in PLACE.glob("*.json")}

    assert {name: committed.get(name) for name in schemas()} == schemas(), "run python scripts/schemas.py"


def test_every_artifact_fits_its_schema(tmp_path: Path) -> None:
    """What `save` writes of each kind is valid."""
    plan = make_plan([make_chain(3)], [[[0, 1, 0]]])
    graph = build_graph(make_chain(3))
    for record in (graph.trace, graph, plan.costs[0], plan, lower(plan)[0][0], simulate(plan, 2)):
        save(record, tmp_path / "file")

        assert problems((tmp_path / "file").read_text(encoding="utf-8")) == []


def test_a_model_s_trace_fits_its_schema() -> None:
    """A trace of Llama 3 8B, as the package brings it with arguments of every sort, is valid."""
    path = next(OUTLINES.glob("*decode*.trace.gz"))

    assert problems(gzip.decompress(path.read_bytes()).decode()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": ', '"version": 9'),
        ('"kind":"temporary"', '"kind":"wait"'),
        ('"buffers":', '"storages":'),
        ('"size_bytes":64', '"size_bytes":6.4'),
    ],
)
def test_a_broken_artifact_does_not_fit(old: str, new: str, tmp_path: Path) -> None:
    """A version to come, a wrong word, an unknown field and a number of the wrong kind are found."""
    save(make_chain(3), tmp_path / "file")
    right = (tmp_path / "file").read_text(encoding="utf-8")

    assert problems(right) == []
    assert problems(right.replace(old, new, 1))


def test_descriptions_are_the_comments_of_the_records() -> None:
    """A field is described by the comment at its place in the source."""
    fields = schemas()[f"trace-{FORMAT_VERSION}.json"]["$defs"][Trace.__name__]["properties"]

    assert "What the step returns, by name." == fields["outputs"]["description"]
