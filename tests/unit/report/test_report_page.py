"""The page."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser import browser
from report_factory import make_cluster, make_plan, make_timeline
from tessera.ir import Clock, Plan, Span, Timeline
from tessera.plan import explain
from tessera.report import write_report

VOID = {"meta", "wbr", "br", "hr", "link", "img"}
MANY = 50_000


class Balance(HTMLParser):
    """Collects the text and fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(plan: Plan, timeline: Timeline, folder: Path) -> str:
    """The page written for a plan and a run."""
    path = folder / "page.html"
    write_report(folder, [("one", plan, timeline)], path)
    return path.read_text(encoding="utf-8")


def parsed(page: str) -> Balance:
    """The page as a browser would nest it."""
    found = Balance()
    found.feed(page)
    found.close()
    assert [] == found.open
    return found


def crowded(num: int, tracks: tuple[str, ...] = ("emu:a100", "emu:l40s")) -> Timeline:
    """Many short spans of ever different requests, with names longer than any page wants."""
    spans = []
    for n in range(num):
        track = tracks[n % len(tracks)]
        label = f"kernel_{n}_" + "x" * 300
        spans.append(Span(track, label, n, n % 8, 1.0 * n, n + 0.9, is_transfer=" -> " in track))
    return Timeline(Clock.SIMULATED, tuple(spans), tuple((n, 0.0, n + 0.9) for n in range(num)))


def test_page_shows_plan_and_run(tmp_path: Path) -> None:
    """Devices, links, baselines, lanes, a layer and the verdict are all on the page."""
    text = parsed(page_of(make_plan(), make_timeline(make_plan()), tmp_path)).text

    wanted = (
        "emu:a100 -> emu:l40s",
        "prefill/decode split",
        "Lane 1",
        "mlp.gate_proj",
        "1.14x",
        explain(make_plan()).verdict,
    )
    assert [] == [word for word in wanted if word not in text]


def test_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    """Nothing on the page names another place or runs code."""
    page = page_of(make_plan(), make_timeline(make_plan()), tmp_path)

    assert not re.search(r"(?i)https?:|src=|href=(?!'#)|@import|url\(", page)
    assert not parsed(page).seen & {"script", "link", "img", "iframe", "object"}


def test_page_escapes_names(tmp_path: Path) -> None:
    """A name that looks like markup is text."""
    evil = "<script>alert('x')</script>\"&"
    plan = make_plan(cluster=make_cluster((evil, "b")), best_baseline=evil)
    spans = (Span(evil, evil, 0, 0, 0.0, 1.0), Span(f"{evil} -> b", evil, 0, 0, 1.0, 2.0, is_transfer=True))
    found = parsed(page_of(plan, Timeline(Clock.SIMULATED, spans, ((0, 0.0, 2.0),)), tmp_path))

    assert "script" not in found.seen
    assert evil in found.text


@pytest.mark.parametrize("clock", list(Clock))
def test_page_says_whose_clock(tmp_path: Path, clock: Clock) -> None:
    """The run's clock is named beside its figures."""
    text = parsed(page_of(make_plan(), make_timeline(make_plan(), clock=clock), tmp_path)).text

    assert f"requests, {clock}" in text
    assert f"in which each was busy, {clock}" in text


def test_page_of_many_spans_stays_small(tmp_path: Path) -> None:
    """Fifty thousand spans of as many requests make less than two megabytes."""
    assert len(page_of(make_plan(), crowded(MANY), tmp_path).encode()) < 2_000_000


def test_page_of_many_links_stays_small(tmp_path: Path) -> None:
    """So do fifty thousand spans on two hundred links; those not drawn are counted."""
    links = tuple(f"d{a} -> d{b}" for a in range(15) for b in range(15) if a != b)
    page = page_of(make_plan(), crowded(MANY, links), tmp_path)

    assert len(page.encode()) < 2_000_000
    assert "172 less busy links are not drawn" in page


def test_overview_is_faint_where_a_track_is_partly_busy(tmp_path: Path) -> None:
    """A track busy for a fifth of every column is drawn at the lowest level only."""
    spans = tuple(Span("emu:a100", "k", 0, 0, 1.0 * n, n + 0.2) for n in range(9000))
    page = page_of(make_plan(), Timeline(Clock.SIMULATED, spans, ((0, 0.0, 9000.0),)), tmp_path)

    assert {"0.25"} == set(re.findall(r"opacity='([\d.]+)'", page))


def test_page_of_an_empty_run(tmp_path: Path) -> None:
    """A run without requests says that nothing ran."""
    assert "Nothing ran" in page_of(make_plan(), Timeline(Clock.SIMULATED, (), ()), tmp_path)


def test_axis_has_round_times(tmp_path: Path) -> None:
    """A run of 36.9 ms is marked every five milliseconds, and no mark sticks out on the right."""
    spans = (Span("emu:a100", "k", 0, 0, 0.0, 36_900.0),)
    page = page_of(make_plan(), Timeline(Clock.SIMULATED, spans, ((0, 0.0, 36_900.0),)), tmp_path)

    axis = re.findall(r"left:[\d.]+%'>([\d.,]+)</span>", page)
    assert ["0", "5", "10", "15", "20", "25", "30", "35"] == axis


def test_a_page_of_plans_opens_with_the_best(tmp_path: Path) -> None:
    """Each has one rate, what it gains, and a link to the rest; raw detail is folded away."""
    plans = [(name, make_plan(throughput_per_s=per_s)) for name, per_s in (("low", 47.0), ("high", 53.1))]
    path = tmp_path / "page.html"
    shown = [(name, plan, make_timeline(plan)) for name, plan in plans]
    write_report(tmp_path, shown, path)
    with browser() as opened:
        page = opened.new_page(viewport={"width": 390, "height": 844})
        page.goto(path.as_uri())
        rows = page.locator("nav a")

        assert ["high", "low"] == rows.locator("b").all_inner_texts()
        assert "1.14x data-parallel" in rows.first.inner_text()
        assert "13,186 tokens/s" in rows.first.inner_text()
        assert rows.last.bounding_box()["y"] < 844 / 2
        assert 390 == page.evaluate("document.documentElement.scrollWidth")
        assert not page.get_by_text("one colour per request").first.is_visible()
