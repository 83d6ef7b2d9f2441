"""The reference of the Python API from its docstrings: docs/api.md.

    python scripts/api_reference.py

A test fails when the page is not what this makes. Only what `import tessera` offers is listed.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import tessera
from tessera import api

PLACE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """\
# Python API

Made from docstrings by `python scripts/api_reference.py`. [What stays the same](compatibility.md).

"""
ORDER = (
    *("plan", "ModelPlan", "Load", "LLM", "SamplingParams", "Completion", "serve", "Server"),
    *("capture", "CudaKernel"),
)
# Modules left out of types, for reading.
MODULES = re.compile(r"\b(?:tessera|collections|pathlib|typing)(?:\.\w+)*\.(?=[A-Z])")


def page() -> str:
    assert set(ORDER) == set(tessera.PUBLIC)
    overview = inspect.cleandoc(api.__doc__ or "")
    lines = [HEAD + _text(overview), *(line for name in ORDER for line in _entry(name))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _entry(name: str) -> Iterator[str]:
    thing: Any = getattr(tessera, name)
    if inspect.ismodule(thing):  # a package that can be called
        thing = getattr(__import__(tessera.PUBLIC[name], fromlist=[name]), name)
    yield from ("", f"## tessera.{name}", "", "```python", _signature(thing, f"tessera.{name}"), "```", "")
    yield _text(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing):
        return
    if "__init__" in vars(thing) and not is_dataclass(thing) and (text := thing.__init__.__doc__):
        yield from ("", _text(inspect.cleandoc(text)))
    for method, value in _members(thing):
        function = value.func if hasattr(value, "func") else value
        yield from ("", f"### {name}.{method}", "")
        if callable(function) and function is value:
            yield from ("```python", _signature(function, method), "```", "")
        yield _text(inspect.getdoc(value) or "")


def _members(thing: type) -> list[tuple[str, Any]]:
    """Public methods and properties with docstrings, in the order of the source; inherited ones last."""
    found: dict[str, Any] = {}
    for kind in thing.__mro__:
        if kind.__module__.startswith("tessera"):
            for name, value in vars(kind).items():
                if not name.startswith("_") and not isinstance(value, str | tuple) and inspect.getdoc(value):
                    found.setdefault(name, value)
    documented = (property, type(found.get("figures")), type(page))
    return [(name, value) for name, value in found.items() if isinstance(value, documented)]


def _signature(thing: Any, name: str) -> str:
    signature = inspect.signature(thing)
    parts = [MODULES.sub("", str(part)) for part in signature.parameters.values() if part.name != "self"]
    result = signature.return_annotation
    shown = result.__name__ if inspect.isclass(result) and not get_args(result) else str(result)
    ends = "" if result in (inspect.Signature.empty, None) else f" -> {MODULES.sub('', shown.strip(chr(39)))}"
    line = f"{name}({', '.join(parts)}){ends}"
    return line if len(line) < 110 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){ends}"


def _text(text: str) -> str:
    """A docstring as Markdown: code blocks, and a list of its arguments."""
    lines, is_code = [], False
    for line in text.splitlines():
        if argument := re.fullmatch(r" {4}(\w+): (.+)", line):
            lines.append(f"- `{argument[1]}`: {argument[2]}")
            continue
        indented = line.startswith("    ")
        if indented != is_code and line:
            lines.append("```python" if indented else "```")
            is_code = indented
        lines.append("" if line == "Args:" else line[4:] if is_code else line)
    return "\n".join([*lines, "```"] if is_code else lines).replace("\n\n```\n", "\n```\n\n") + "\n"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
    print(PLACE)
