"""The published evaluation in its own set-up: its figures, our arithmetic on them, one real row."""

import json
import re
import runpy
from pathlib import Path

import pytest
from benchmarks.published import (
    clusters,
    costs,
    document,
    figures,
    monitor,
    offline,
    online,
    shares,
    solver,
)
from benchmarks.published.offline import OfflineCase, Rated
from benchmarks.published.setup import MODELS, PAIRS, POLICIES, cards, cluster, served, usd_per_hour
from benchmarks.published.tables import markdown

from online_factory import both_plans

ROOT = Path(__file__).resolve().parents[3]


def test_published_gains_are_recomputed_from_the_bars() -> None:
    """Median over the sum of both cards 1.15; over prefill/decode 1.52 on average and 2.32 at most."""
    over = offline.ratios(offline.fig6({}))["published, kernel_disaggregation"]

    assert 1.15 == pytest.approx(over["sum_of_cards"]["median"], abs=0.005)
    assert (1.515, 2.324) == pytest.approx(
        (over["prefill_decode"]["mean"], over["prefill_decode"]["most"]), abs=1e-3
    )
    assert 1.349 == pytest.approx(over["attention_ffn"]["mean"], abs=1e-3)


def test_measured_again_the_gain_over_the_sum_is_a_loss() -> None:
    """0.89 for Llama, 0.98 for gpt-oss."""
    bars = {name: m["bars"] for name, m in figures()["fig6"]["re_measured"]["models"].items()}
    ratios = {
        name: b["kernel_disaggregation"][0] / (b["left_card_alone"][0] + b["right_card_alone"][0])
        for name, b in bars.items()
    }

    assert {"llama_3_1_8b": 0.89, "gpt_oss_20b": 0.98} == pytest.approx(ratios, abs=0.01)


def test_every_policy_of_every_pair_has_a_row_in_figure_6() -> None:
    rows = offline.fig6(
        {OfflineCase("a100_l40s", "llama_3_1_8b", "prefill_decode", False): Rated(10.0, 1.0, "")}
    )

    assert set(PAIRS) == {row["pair"] for row in rows}
    assert {*POLICIES, "tessera_mix"} == {row["policy"] for row in rows}
    keys = {"pair", "model", "policy", "published", "re_measured", "ours", "ours_best_batch"}
    assert all(keys <= row.keys() for row in rows)
    chosen = [
        r
        for r in rows
        if (r["pair"], r["model"], r["policy"]) == ("a100_l40s", "llama_3_1_8b", "tessera_mix")
    ]
    assert [10.0] == [row["ours"] for row in chosen]


def test_table_3_divides_by_the_published_prices() -> None:
    """2.5 dollars for A100 + L40S."""
    rated = {
        OfflineCase("a100_l40s", "llama_3_1_8b", policy, False): Rated(rate, 1.0, "")
        for policy, rate in (("left_card_alone", 300.0), ("kernel_disaggregation", 500.0))
    }
    rows = offline.table3(offline.fig6(rated))
    ours = {r["policy"]: r["ours"] for r in rows if r["pair"] == "a100_l40s"}

    assert 2.5 == usd_per_hour(PAIRS["a100_l40s"])
    assert 1.0 == ours["kernel_disaggregation"]


def test_llama_alone_on_an_a100_is_as_fast_as_measured_again() -> None:
    """1,293 tokens per second with 32 sequences, 1,920 tokens in and 1,024 out."""
    model = MODELS["llama_3_1_8b"]
    steps = served(model, cluster(cards("a100_l40s", "left_card_alone")))
    plan = offline.published_plan(steps, model.load, "single")

    assert [32] == [group.sequences for group in plan.groups]
    found = offline.rate(OfflineCase("a100_l40s", "llama_3_1_8b", "left_card_alone", False))
    assert found is not None
    assert 1293 == pytest.approx(found.tokens_per_s, rel=0.08)


def test_mxfp4_experts_take_a_quarter_of_their_memory() -> None:
    """14 GB in place of 42."""
    steps = served(MODELS["gpt_oss_20b"], cluster(PAIRS["a100_l40s"]))

    assert 12.5e9 < steps.model_bytes.weights < 15e9


def test_a_curve_passes_the_limit_between_two_rates() -> None:
    curve = online.Curve(10.0, ((1.0, 20.0, 60.0), (2.0, 40.0, 70.0), (3.0, 60.0, 80.0)))

    assert (2.5, None) == (curve.rate_at(50.0, 1), curve.rate_at(50.0, 2))


def test_the_document_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cases, printed as the command prints them: names of figures, and of the columns of each row."""
    few = [case for case in offline.cases() if case.policy == "left_card_alone"]
    few = [case for case in few if case.model == "llama_3_1_8b" and not case.is_best]
    chosen: list[document.Task] = [(monitor.fig11, (True,)), (costs.document, ())]
    chosen += [(offline.rate, (case,)) for case in few]
    chosen += [(shares.shares, ("llama_3_1_8b",))]
    assert set(chosen) <= set(document.tasks(True))
    monkeypatch.setattr(document, "tasks", lambda is_quick: chosen)
    monkeypatch.setattr(monitor, "WINDOWS_MS", (300,))
    monkeypatch.setattr(monitor, "BETAS", ())
    monkeypatch.setattr(monitor, "USUAL", ())
    monkeypatch.setattr(monitor, "ERRORS", ())
    monkeypatch.setattr(monitor, "NUM_REQUESTS", 40)
    monkeypatch.setattr(monitor, "LENGTHS", "fixed:2,2")
    monkeypatch.setattr("benchmarks.row_service.metrics.LEAST", 50)
    monkeypatch.setattr("benchmarks.row_service.metrics.REFINED", 0)
    monkeypatch.setattr(monitor, "_plans", lambda: both_plans(2))  # Llama's take long to make
    instances = {"published": {"2_devices": {"50": 1.0}}, "re_measured": {"rows": {}}}
    monkeypatch.setattr(solver, "figures", lambda: {"fig12b_solver": instances})

    found = json.loads(json.dumps(document.run(True, 1), allow_nan=False))

    names = {"fig2b", "fig3", "fig6", "fig7", "fig9", "fig10", "fig11", "fig12a", "fig12b", "table3"}
    assert names == set(found["figures"])
    keys = {"pair", "model", "policy", "published", "re_measured", "ours", "ours_best_batch"}
    assert all(rows and all(keys <= row.keys() for row in rows) for rows in found["figures"].values())
    made = [row for row in found["figures"]["fig6"] if row["ours"] is not None]
    assert set(PAIRS) == {row["pair"] for row in made}
    assert {"ours_switches", "ours_switch_ms", "ours_switch_by_pages_ms"} <= found["figures"]["fig11"][
        0
    ].keys()
    assert markdown(found).count("\n## fig") == len(names) - 1


@pytest.mark.slow
def test_quick_has_fewer_tasks() -> None:
    assert len(document.tasks(True)) < len(document.tasks(False))


def test_every_claim_of_the_artifact_is_documented() -> None:
    """docs/claims.md has a row for each name, and no other."""
    claims = runpy.run_path(str(ROOT / "scripts/artifact.py"))["CLAIMS"]
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "docs/claims.md").read_text(encoding="utf-8"), re.M)

    assert [claim.name for claim in claims] == listed


def test_a_large_mixture_on_two_groups_is_bounded_by_its_best_split() -> None:
    """Dividing kernels is at least as good as any other policy, and less than all policies' limits allow."""
    rates = clusters.large_rates()

    assert rates["kernel_disaggregation"] >= max(rates.values()) - 1e-6
    assert rates["prefill_decode"] < rates["request_distribution"]
    assert {row["pair"] for row in clusters.fig9({})} == {"two_a100_one_l40s", "eight_b200_eight_h100"}


def test_blocks_and_phases_are_told_apart() -> None:
    """Figure 3 has both phases and both blocks of gpt-oss; every share is a percentage."""
    found = {"gpt_oss_20b": shares.shares("gpt_oss_20b")}
    rows = shares.fig3(found)

    assert [row["published"] for row in rows] == [45, 57, 71, 33]
    assert all(0 < row["ours"] < 100 for row in rows)
    assert next(row for row in shares.fig2b(found) if row["model"] == "gpt_oss_20b")["ours"] > 30
