"""The live page: its documents, and the page itself in a real browser."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from browser import PHONE, browser, width_of  # noqa: E402
from http_factory import MODEL, Scripted, running, wait_until  # noqa: E402
from report_factory import make_plan  # noqa: E402
from tessera.ir import Group, Load, Role, ServicePlan  # noqa: E402
from tessera.serve.app import (  # noqa: E402
    NUM_DECISIONS,
    live_page,
    plan_document,
    state_document,
)
from tessera.serve.records import Snapshot  # noqa: E402

KEY = "page-secret"


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as found:
        yield found


def test_page_loads_nothing_from_elsewhere() -> None:
    """No address, no event attribute; and the policy lets nothing else run than the page's own script."""
    html, policy = live_page()

    assert not re.search(r"https?://|@import|\ssrc=|\son\w+=", html)
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2


def test_plan_document_says_where_every_step_runs() -> None:
    """Launches of each step of each group add up over the devices."""
    policy = make_policy()
    document = plan_document(policy)

    assert document["modelled"] is True
    for shown, group in zip(document["groups"], policy.groups, strict=True):
        assert "mixed" == shown["role"]
        for step, graph in zip(shown["steps"], group.plan.unit.graphs, strict=True):
            assert step["step"] == f"tokens-{graph.trace.step.context}"
            assert sum(step["launches"].values()) == len(graph.trace.launches)
    assert list(policy.cluster.names) == document["devices"]
    assert document["why"][0]


def test_state_document_keeps_the_last_decisions() -> None:
    """The state tells the newest decisions, not all since the start."""
    snapshot = Scripted().snapshot()
    many = tuple(snapshot.decisions) * 50

    document = state_document(type(snapshot)(**{**snapshot.__dict__, "decisions": many}))

    assert len(document["decisions"]) == 20


def make_policy() -> ServicePlan:
    plan = make_plan()
    graphs = tuple(
        replace(g, trace=replace(g.trace, step=replace(g.trace.step, kind="tokens", context=size)))
        for size, g in enumerate(plan.unit.graphs, 4)
    )
    costs = tuple(
        replace(c, trace_digest=graph.trace.digest) for c, graph in zip(plan.costs, graphs, strict=True)
    )
    plan = replace(plan, lanes=plan.lanes[:1], unit=replace(plan.unit, graphs=graphs), costs=costs)
    return ServicePlan(MODEL, "throughput", Load(8, 8), (Group(Role.MIXED, plan, 2, 1),))


def test_plan_route_names_the_policy_in_force() -> None:
    """GET /v1/plan has the policy, a document a plan, and the decisions."""
    with running(Scripted(), plans=(make_policy(),)) as server:
        document = httpx.get(f"{server.url}/v1/plan").json()

    assert document["policy"] == "throughput"
    assert len(document["plans"]) == 1
    assert document["decisions"][0]["kind"] == "switch"


def test_page_shows_what_the_service_does(opened: Any) -> None:
    """In a browser: devices, queue, decisions and placement, which follow the service until it is gone."""
    service = Scripted()
    page = opened.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    with running(service, plans=(make_policy(),)) as server:
        page.goto(server.url)
        page.wait_for_selector("#status.live")
        assert page.inner_text("h1") == MODEL
        assert page.inner_text("#waiting") == "3"
        assert [x.inner_text() for x in page.query_selector_all("#devices .name")] == ["emu:a100", "emu:l40s"]
        assert page.inner_text("#devices .value b") == "75 %"
        # Text of the service is text, whatever it looks like.
        assert "<b>latency</b>" in page.inner_text("#decisions")
        assert page.locator("#lanes .split").count() >= 2
        assert ("200 ms / 1.3 s", "21 ms / 40 ms") == tuple(
            map(page.inner_text, ("#first-token", "#per-token"))
        )
        assert "mixed on emu:a100" == page.inner_text("#groups .name")
        assert "2 of 8, 1 on their way" in page.inner_text("#groups .value")
        assert "1,234" == page.inner_text("#moved")
        assert ("75 %", "0 of 8") == tuple(map(page.inner_text, ("#prefix", "#pages")))
        assert "ready, restarted 2 times" in page.inner_text("#devices .bar:last-child")
        # A minute ago, by the clock of who looks.
        told = page.inner_text("#decisions time").split(":")
        passed_s = page.evaluate(
            "(t) => (Date.now() - new Date().setHours(...t)) / 1000", list(map(int, told))
        )
        assert passed_s % 86400 == pytest.approx(60, abs=10)
        # The picture of a layer: its blocks, and what crosses between the devices.
        assert page.locator("#layer .block.d1").count() > 0
        assert "KB" in page.inner_text("#layer")
        service.running = 5
        wait_until(lambda: bool(page.inner_text("#running") == "5"))
        assert page.evaluate("document.querySelector('#spark polyline').points.length") >= 2
        # Latency over time: a line of medians, and one of 99th percentiles above it.
        for name in ("first", "token"):
            drawn = f"#{name}-spark polyline"
            half, most = page.evaluate(
                "x => [...document.querySelectorAll(x)].map(y => y.points[0].y)", drawn
            )
            assert half > most
    page.wait_for_selector("#status.gone")
    page.close()
    assert [x for x in faults if "ERR_CONNECTION" not in x] == []


class LongServed(Scripted):
    """With as many decisions as the state tells."""

    newest_s = 100.0

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        times_s = [*range(NUM_DECISIONS - 1), self.newest_s]
        return replace(found, decisions=tuple(replace(found.decisions[0], at_s=time_s) for time_s in times_s))


def test_page_shows_new_plans_after_many_decisions(opened: Any) -> None:
    """The number of decisions that the state tells stays the same then."""
    page, service = opened.new_page(), LongServed()
    with running(service, plans=(make_policy(),)) as server:
        page.goto(server.url)
        page.wait_for_selector("#status.live")
        with page.expect_request("**/v1/plan", timeout=5000):
            service.newest_s += 1.0
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone(opened: Any, scheme: Any, tmp_path: Path) -> None:
    """At 360 pixels nothing has to be scrolled to sideways, in light and in dark."""
    page = opened.new_page(viewport=PHONE, color_scheme=scheme)
    with running(Scripted(), plans=(make_policy(),)) as server:
        page.goto(server.url)
        page.wait_for_selector("#status.live")
        assert width_of(page) <= PHONE["width"]
        page.screenshot(path=tmp_path / f"live-{scheme}.png", full_page=True)
    page.close()


def test_page_asks_for_the_key_once(opened: Any) -> None:
    """Under --api-key the page shows nothing until it has a right key, and keeps it for the tab."""
    page = opened.new_page()
    with running(Scripted(), keys=[KEY]) as server:
        page.goto(server.url)
        page.wait_for_selector("#door:not([hidden])")
        assert not page.is_visible("#main")
        page.fill("#key", "not-the-key")
        page.click("button")
        wait_until(lambda: "not one of this server's" in page.inner_text("#door-note"))
        page.fill("#key", KEY)
        page.click("button")
        page.wait_for_selector("#status.live")
        page.reload()
        page.wait_for_selector("#status.live")
        assert not page.is_visible("#door")
    page.close()
