"""JSON schemas of artifacts and of commands' JSON: docs/schemas/KIND.json and command-NAME.json.

    python scripts/schemas.py

An artifact file is a header, one line of JSON, and a body, one record in MessagePack (`ir/files.py`). Both
have a schema. Descriptions are the records' docstrings and the comments at their fields. Rules that a schema
cannot express (every launch is placed, regions lie inside their buffers) are in `ir/verify.py`.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from tessera.cli import COMMANDS
from tessera.cli.bench import bench_serve
from tessera.cli.output import Record
from tessera.ir.files import FORMAT_VERSION, KINDS, Header

PLACE = Path(__file__).resolve().parents[1] / "docs" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """Every schema by its file name."""
    bodies = {
        f"{kind}.json": schema_of(record, f"The body of a Tessera {kind}, format {FORMAT_VERSION}.")
        for kind, (record, _) in KINDS.items()
    }
    return bodies | {"header.json": schema_of(Header, "The first line of an artifact file.")} | of_commands()


def of_commands() -> dict[str, Schema]:
    """What each command prints with `--json`."""
    made = {}
    for function in (*COMMANDS, bench_serve):
        name = function.__name__.replace("_", "-")
        if records := record_types(function):
            roots, parts = msgspec.json.schema_components(
                records, schema_hook=_path, ref_template="#/$defs/{name}"
            )
            head = {"$schema": DRAFT, "title": f"The JSON of `tessera {name.replace('-', ' ')}`."}
            made[f"command-{name}.json"] = {**head, "anyOf": roots, "$defs": parts}
    plain: dict[str, Schema] = json.loads(json.dumps(made))  # tuples become lists, as in the file
    return plain


def record_types(function: Callable[..., Any]) -> tuple[type[Record], ...]:
    """The records that a command may print, from its return annotation."""

    def records(hint: Any) -> Iterator[type[Record]]:
        if isinstance(hint, type) and issubclass(hint, Record):
            yield hint
        for part in get_args(hint):
            yield from records(part)

    return tuple(records(get_type_hints(function).get("return")))


def _path(tp: type) -> Schema:
    """A path is written as a string."""
    assert tp is Path, tp
    return {"type": "string"}


def schema_of(record: type, title: str) -> Schema:
    """The schema of a record and of all records in it, with descriptions of their fields."""
    (root,), parts = msgspec.json.schema_components([record], ref_template="#/$defs/{name}")
    classes = {cls.__name__: cls for cls in _classes(record)}
    for name, part in parts.items():
        for field, text in _comments(classes[name]).items() if name in classes else ():
            if text:
                part["properties"][field]["description"] = text
    schema = {"$schema": DRAFT, "title": title} | root | {"$defs": dict(sorted(parts.items()))}
    plain: Schema = json.loads(json.dumps(schema))  # defaults that are tuples become lists, as in the file
    return plain


def _classes(tp: Any, seen: frozenset[type] = frozenset()) -> set[type]:
    """The records inside a type."""
    if args := get_args(tp):
        return {cls for arg in args for cls in _classes(arg, seen)}
    if tp in seen or not (dataclasses.is_dataclass(tp) or hasattr(tp, "__struct_fields__")):
        return set()
    inner = (_classes(hint, seen | {tp}) for hint in get_type_hints(tp).values())
    return {tp}.union(*inner)


def _comments(cls: type) -> dict[str, str]:
    """Field -> the comment lines above it, or the comment behind it."""
    lines = inspect.getsource(cls).splitlines()
    (tree,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    assert isinstance(tree, ast.ClassDef)
    comments = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            line = node.lineno - 2
            while lines[line].strip().startswith("#"):
                above.insert(0, lines[line].strip(" #"))
                line -= 1
            _, _, behind = lines[node.lineno - 1].partition("  # ")
            comments[node.target.id] = " ".join(above) or behind
    return comments


def main() -> None:
    """Writes all of them."""
    PLACE.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (PLACE / name).write_text(json.dumps(schema, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(schemas())} schemas of format {FORMAT_VERSION} in {PLACE.relative_to(PLACE.parents[1])}")


if __name__ == "__main__":
    main()
