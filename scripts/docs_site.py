"""The site that `make docs` builds: the repository's documents, where they are in the repository.

A hook of mkdocs. Pages keep their paths (`README.md`, `docs/guide.md`, `benchmarks/results/...`), so that a
link that works in a clone works on the site, and mkdocs itself finds those that lead nowhere. What documents
link to is taken in: a document and its own links, a source file as a page of code, a folder as a list of what
is in it, a picture or a JSON file as it is. So the site is whole without a forge and without a network.
"""

import ast
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = {".py": "python", ".ptx": "text", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The documents of the root and of docs, and what their links lead to."""
    site = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's own
    waiting = [*ROOT.glob("*.md"), *(file for file in ROOT.glob("docs/**/*") if file.is_file())]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        name = path.relative_to(ROOT).as_posix()
        if name in seen:
            continue
        seen.add(name)
        if _is_listed(path):
            site.append(File.generated(config, _page(name), content=_listing(path)))
        else:
            site.append(File.generated(config, name, abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += [target for target in _targets(path) if target.exists()]
    return site


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to sources and folders lead to their pages."""
    here = dirname(page.file.src_uri)

    def mended(link: re.Match[str]) -> str:
        name = normpath(f"{here}/{link[2]}" if here else link[2])
        if ":" in link[2] or not _is_listed(ROOT / name):
            return link[0]
        return f"{link[1]}{relpath(_page(name), here or '.')}{link[3]}"

    return LINK.sub(mended, markdown)


def _targets(path: Path) -> list[Path]:
    """Files and folders of the repository that a document links to."""
    links = [link[2] for link in LINK.finditer(path.read_text(encoding="utf-8")) if ":" not in link[2]]
    return [target for link in links if (target := (path.parent / link).resolve()).is_relative_to(ROOT)]


def _is_listed(path: Path) -> bool:
    """Whether the site has a page made of it, not the thing itself."""
    return path.is_dir() or (path.is_file() and path.suffix in CODE) or path.name in ("LICENSE", "NOTICE")


def _page(name: str) -> str:
    return f"{name}.md"


def _listing(path: Path) -> str:
    """The page of a source file or of a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_file():
        fence = "~" * 6
        return f"{head}{fence}{CODE.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n{fence}\n"
    rows = [f"| `{entry.name}` | {_says(entry)} |" for entry in sorted(path.iterdir()) if _shown(entry)]
    return "\n".join([f"{head}| | |", "|---|---|", *rows, ""])


def _shown(entry: Path) -> bool:
    return not entry.name.startswith((".", "__pycache__"))


def _says(entry: Path) -> str:
    """The first line of a module's docstring, or of a package's."""
    source = entry / "__init__.py" if entry.is_dir() else entry
    if source.suffix != ".py" or not source.is_file():
        return ""
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|")
