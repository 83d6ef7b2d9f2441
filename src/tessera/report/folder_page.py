"""The page of a folder: its plans one after another, then its evaluation."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tessera.report.page import Shown, plan_part, write_shell
from tessera.report.page_paper import paper_part, read_paper


def write_report(
    folder: Path, plans: Sequence[tuple[str, Shown]], evaluation: Path | None, path: Path
) -> None:
    """Writes one file; `plans` are (name, what to show), `evaluation` is the paper.json of `bench paper`."""
    parts = [(f"plan-{n}", name, plan_part(shown, "2")) for n, (name, shown) in enumerate(plans)]
    if evaluation is not None:
        parts.append(("evaluation", "evaluation", paper_part(read_paper(evaluation), evaluation.parent)))
    links = "".join(f"<a href='#{anchor}'>{escape(name)}</a>" for anchor, name, _ in parts)
    title = folder.resolve().name
    body = "\n".join(
        [
            f"<h1 class='title'>{escape(title)}</h1>",
            f"<nav>{links}</nav>" if len(parts) > 1 else "",
            *(f"<article id='{anchor}'>{html}</article>" for anchor, _, html in parts),
        ]
    )
    write_shell(path, title, body, "Every figure says whether it was measured, simulated or modelled.")
