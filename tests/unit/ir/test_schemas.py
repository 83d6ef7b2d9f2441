"""The JSON schemas of docs/schemas say what artifact files hold."""

import gzip
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from scripts.schemas import PLACE, schemas

from factories import make_chain, make_plan
from tessera.analyze import build_graph
from tessera.execute import lower
from tessera.ir import Kernel, Trace, save
from tessera.ir.files import FORMAT_VERSION
from tessera.simulate import simulate

SOURCE = Path(__file__).parents[3] / "src" / "tessera"
OUTLINES = SOURCE / "capture" / "outlines"


def contents(raw: bytes) -> tuple[Any, Any]:
    """Header and body of an artifact file as plain values."""
    head, _, body = raw.partition(b"\n")
    return json.loads(head), msgspec.msgpack.decode(body)


def problems(header: Any, body: Any) -> list[str]:
    """What the schemas find wrong with an artifact file."""
    found = []
    for name, value in (("header", header), (header["tessera"], body)):
        schema = json.loads((PLACE / f"{name}.json").read_text(encoding="utf-8"))
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

        assert problems(*contents((tmp_path / "file").read_bytes())) == []


def test_a_model_s_trace_fits_its_schema() -> None:
    """A trace of Llama 3 8B, as the package brings it with arguments of every sort, is valid."""
    path = next(OUTLINES.glob("*decode*.trace.gz"))

    assert problems(*contents(gzip.decompress(path.read_bytes()))) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("header", "version"), "one"),
        (("body", "buffers", 0, "kind"), "wait"),
        (("body", "buffers"), None),
        (("body", "buffers", 0, "size_bytes"), 6.4),
    ],
    ids=str,
)
def test_a_broken_artifact_does_not_fit(place: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    """A wrong word, a missing field and numbers of the wrong kind are found."""
    save(make_chain(3), tmp_path / "file")
    header, body = contents((tmp_path / "file").read_bytes())
    assert problems(header, body) == []

    holder = {"header": header, "body": body}
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value

    assert problems(header, body)


def test_descriptions_are_the_comments_of_the_records() -> None:
    """A field is described by the comment at its place in the source."""
    fields = schemas()["trace.json"]["$defs"][Trace.__name__]["properties"]

    assert "Results by name." == fields["outputs"]["description"]


def test_what_is_recorded_of_a_kernel_is_read() -> None:
    """Every field is an attribute that some module asks for."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    asked = set(re.findall(r"\.(\w+)\b", source))

    assert [] == [field.name for field in fields(Kernel) if field.name not in asked]


def test_outlines_of_the_package_are_of_this_format() -> None:
    """Others are not read, and their steps would be compiled."""
    headers = [contents(gzip.decompress(path.read_bytes()))[0] for path in OUTLINES.glob("*.gz")]

    assert {FORMAT_VERSION} == {header["version"] for header in headers}
