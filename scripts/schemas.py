"""JSON schemas of the artifacts, made from the records' own types: docs/schemas/KIND-VERSION.json.

    python scripts/schemas.py

An artifact file is a header, which is one line, and a body (`ir/files.py`); both have a schema. Descriptions
are the records' docstrings and the comments above their fields. What a schema cannot say (that every launch
is placed, that regions lie inside their buffers) the verifier of `ir/verify.py` does.
"""

import ast
import dataclasses
import inspect
import json
import types
from enum import Enum
from pathlib import Path
from typing import Any, ForwardRef, Union, get_args, get_origin, get_type_hints

import msgspec

from tessera.cli import COMMANDS
from tessera.cli.output import record_types
from tessera.ir.files import FORMAT_VERSION, KINDS

PLACE = Path(__file__).resolve().parents[1] / "docs" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = {int: "integer", str: "string", bool: "boolean", type(None): "null"}
# Infinity and "not a number" have no form in JSON.
FLOAT = {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/float"}]}
UNUSUAL = {
    "type": "object",
    "properties": {"float": {"enum": ["inf", "-inf", "nan"]}},
    "required": ["float"],
    "additionalProperties": False,
}

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """Every schema by its file's name."""
    made = {f"{kind}-{FORMAT_VERSION}.json": of_record(kind, record) for kind, record in KINDS.items()}
    return made | {f"header-{FORMAT_VERSION}.json": of_header()} | of_commands()


def of_commands() -> dict[str, Schema]:
    """What each command prints with `--json`."""
    found = {}
    for function in COMMANDS:
        if records := record_types(function):
            refs, parts = msgspec.json.schema_components(
                records, schema_hook=_path, ref_template="#/$defs/{name}"
            )
            title = f"The JSON of `tessera {function.__name__}`."
            head = {"$schema": DRAFT, "title": title, "anyOf": list(refs), "$defs": parts}
            found[f"command-{function.__name__}.json"] = head
    return found


def _path(tp: type) -> Schema:
    """A path is written as a string."""
    assert tp is Path, tp
    return {"type": "string"}


def of_header() -> Schema:
    """The first line of a file."""
    properties: Schema = {
        "tessera": {"enum": list(KINDS), "description": "What kind of artifact the body is."},
        "version": {"type": "integer", "minimum": 2, "maximum": FORMAT_VERSION},
        "bytes": {"type": "integer", "minimum": 0, "description": "Length of the body."},
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "Of the body."},
    }
    title = "The first line of an artifact file; the rest is its body."
    return {"$schema": DRAFT, "title": title} | _object(properties, list(properties))


def of_record(kind: str, record: type) -> Schema:
    """The body of one kind of artifact."""
    parts = _Parts({"float": UNUSUAL})
    reference = parts.of(record)
    title = f"The body of a Tessera {kind}, format {FORMAT_VERSION}."
    return {"$schema": DRAFT, "title": title} | reference | {"$defs": dict(sorted(parts.known.items()))}


def _object(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@dataclasses.dataclass
class _Parts:
    """The records and unions that a schema refers to by name."""

    known: dict[str, Schema]

    def of(self, tp: Any) -> Schema:
        """The schema of one type, as `ir/codec.py` writes it."""
        if dataclasses.is_dataclass(tp):
            return self._record(tp)
        if get_origin(tp) in (Union, types.UnionType):
            return self._union(tp)
        if get_origin(tp) is tuple:
            return self._tuple(get_args(tp))
        if tp is float:
            return FLOAT
        if isinstance(tp, type) and issubclass(tp, Enum):
            return {"enum": [member.value for member in tp]}
        return {"type": PLAIN[tp]}

    def _record(self, cls: Any) -> Schema:
        name = cls.__name__
        if name not in self.known:
            self.known[name] = {}  # a record may hold records of its own kind
            hints, comments, fields = get_type_hints(cls), _comments(cls), dataclasses.fields(cls)
            properties = {
                field.name: self.of(hints[field.name]) | _described(comments.get(field.name, ""))
                for field in fields
            }
            required = [field.name for field in fields if _is_required(field)]
            self.known[name] = {"description": inspect.getdoc(cls)} | _object(properties, required)
        return {"$ref": f"#/$defs/{name}"}

    def _tuple(self, items: tuple[Any, ...]) -> Schema:
        if len(items) == 2 and items[1] is Ellipsis:
            return {"type": "array", "items": self.of(items[0])}
        each = [self.of(item) for item in items]
        return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}

    def _union(self, tp: Any) -> Schema:
        """A choice; records carry their names. One that holds itself is called Arg: there is one such."""
        options = get_args(tp)
        if not any(_is_recursive(option) for option in options):
            return {"anyOf": [self._option(option) for option in options]}
        if "Arg" not in self.known:
            own = {"type": "array", "items": {"$ref": "#/$defs/Arg"}}
            self.known["Arg"] = {}
            self.known["Arg"] = {"anyOf": [own if _is_recursive(o) else self._option(o) for o in options]}
        return {"$ref": "#/$defs/Arg"}

    def _option(self, tp: Any) -> Schema:
        if not dataclasses.is_dataclass(tp):
            return self.of(tp)
        name: str = getattr(tp, "__name__", "")
        return _object({name: self.of(tp)}, [name])


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    """Whether a file always has it: what equals a default is left out."""
    return field.default is dataclasses.MISSING


def _is_recursive(tp: Any) -> bool:
    return any(isinstance(item, str | ForwardRef) for item in get_args(tp))


def _described(text: str) -> Schema:
    return {"description": text} if text else {}


def _comments(cls: type) -> dict[str, str]:
    """What the source says of each field: the comment lines above it, or the comment behind it."""
    lines = inspect.getsource(cls).splitlines()
    (tree,) = ast.parse(inspect.cleandoc("\n".join(lines))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            line = node.lineno - 2
            while lines[line].strip().startswith("#"):
                above.insert(0, lines[line].strip(" #"))
                line -= 1
            _, _, behind = lines[node.lineno - 1].partition("  # ")
            found[node.target.id] = " ".join(above) or behind
    return found


def main() -> None:
    """Writes all of them."""
    PLACE.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (PLACE / name).write_text(json.dumps(schema, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(schemas())} schemas of format {FORMAT_VERSION} in {PLACE.relative_to(PLACE.parents[1])}")


if __name__ == "__main__":
    main()
