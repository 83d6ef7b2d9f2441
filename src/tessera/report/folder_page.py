"""The page of a folder: a summary of its plans, best first; then each of them, then its evaluation."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tessera.report.figures import best_baseline, gain
from tessera.report.page import Shown, headline_text, plan_part, write_shell
from tessera.report.page_paper import paper_part, read_paper
from tessera.report.units import ratio


def write_report(
    folder: Path, plans: Sequence[tuple[str, Shown]], evaluation: Path | None, path: Path
) -> None:
    """Writes one file; `plans` are (name, what to show), `evaluation` is the paper.json of `bench paper`."""
    ordered = sorted(plans, key=lambda named: -(gain(named[1].plan, named[1].plan) or 0.0))
    parts = [(f"plan-{n}", plan_part(shown, "2")) for n, (_, shown) in enumerate(ordered)]
    rows = [_row(f"plan-{n}", name, shown) for n, (name, shown) in enumerate(ordered)]
    if evaluation is not None:
        parts.append(("evaluation", paper_part(read_paper(evaluation), evaluation.parent)))
        about = "<span class='said'>figures beside what was published</span>"
        rows.append(f"<a href='#evaluation'><b>evaluation</b><span></span>{about}</a>")
    title = folder.resolve().name
    note = "<p class='note'>Best first, by what each gains over its best coarser policy.</p>" if plans else ""
    body = "\n".join(
        [
            f"<h1 class='title'>{escape(title)}</h1>",
            f"{note}<section><nav>{''.join(rows)}</nav></section>",
            *(f"<article id='{anchor}'>{html}</article>" for anchor, html in parts),
        ]
    )
    write_shell(path, title, body, "Every figure says whether it was measured, simulated or modelled.")


def _row(anchor: str, name: str, shown: Shown) -> str:
    """One plan of the summary: what it is of, its rate, what it gains and the verdict."""
    plan = shown.plan
    factor, best = gain(plan, plan), best_baseline(plan)
    gained = "" if factor is None or best is None else f"{ratio(factor)} {best.name}, modelled"
    where = f"{plan.unit.graphs[0].trace.step.model}, {plan.policy} plan on {', '.join(plan.cluster.names)}"
    return (
        f"<a href='#{anchor}'><span><b>{escape(name)}</b><small>{escape(where)}</small></span>"
        f"<span><strong>{escape(headline_text(plan))}</strong><small>simulated</small></span>"
        f"<span class='said'>{escape(gained)}<small>{escape(shown.verdict)}</small></span></a>"
    )
