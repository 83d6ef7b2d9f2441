"""Checks the claims of docs/claims.md on this machine, without a GPU, and prints a verdict for each.

    python scripts/artifact.py [--only costs,published]      (make artifact)

A claim is a command, what is read from its JSON, and the range in which it must be. Commands that several
claims share run once. Exit code 1 if a claim fails.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800.0
COSTS = ("-m", "benchmarks.bench_costs", "--published", "--json")
MONITOR = ("-m", "benchmarks.bench_online", "--quick", "--json")
PUBLISHED = ("-m", "benchmarks.paper", "--as-published", "--quick", "--json")
VERIFY = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tiny.py")
RATIO, STEADY = "measured / expected", 0.6
SERVICES = ROOT / "benchmarks/results/services_h200_202611.json"


@dataclass(frozen=True)
class Claim:
    """`read` takes the command's document; without a command, nothing."""

    name: str
    command: tuple[str, ...]
    read: Callable[[Any], float]
    least: float
    most: float

    def verdict(self, document: Any) -> tuple[bool, str]:
        try:
            value = self.read(document)
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            return False, f"not found: {error!r}"
        return self.least <= value <= self.most, f"{value:.3f}, expected {self.least:g} to {self.most:g}"


def bar(model: str, policy: str) -> Callable[[Any], float]:
    """Ours as published over the one measured again, of figure 6 on A100 + L40S."""

    def read(found: Any) -> float:
        wanted = {"pair": "a100_l40s", "model": model, "policy": policy}
        row = next(r for r in found["figures"]["fig6"] if wanted.items() <= r.items())
        return float(row["ours"] / row["re_measured"])

    return read


def solver(devices: int, kernels: int) -> Callable[[Any], float]:
    """Seconds of a solve."""

    def read(found: Any) -> float:
        rows = found["figures"]["fig12b"]
        return float(
            next(1e-3 * r["ours"] for r in rows if (r["devices"], r["kernels"]) == (devices, kernels))
        )

    return read


def rate(policy: str) -> Callable[[Any], float]:
    """The rate of gpt-oss at 50 ms a token over the one measured again."""

    def read(found: Any) -> float:
        rows = found["figures"]["fig7"]
        row = next(r for r in rows if (r["pair"], r["policy"]) == ("a100_l40s", policy))
        return float(row["ours"] / float(str(row["re_measured"]).removeprefix("above ")))

    return read


def served_error(_: Any) -> float:
    """Largest error of expected rates on dilated devices; the load that did not become steady is left out."""
    rows = json.loads(SERVICES.read_text(encoding="utf-8"))
    ratios = [float(v.get(RATIO, 1.0)) for v in rows.values() if isinstance(v, dict)]
    return max(abs(1.0 - r) for r in ratios if r > STEADY)


def over_sum(column: str) -> Callable[[Any], float]:
    """Median of kernel disaggregation over the sum of both cards alone."""
    return lambda found: float(found["ratios"][f"{column}, kernel_disaggregation"]["sum_of_cards"]["median"])


llama, gpt_oss = partial(bar, "llama_3_1_8b"), partial(bar, "gpt_oss_20b")
CLAIMS = (
    Claim("costs-steps", COSTS, lambda d: max(abs(r["error"]) for r in d["steps"]), 0.0, 0.08),
    Claim("costs-classes", COSTS, lambda d: float(d["classes_within"]), 1.0, 1.0),
    Claim("published-llama-a100", PUBLISHED, llama("left_card_alone"), 0.92, 1.08),
    Claim("published-llama-l40s", PUBLISHED, llama("right_card_alone"), 0.92, 1.08),
    Claim("published-llama-replicas", PUBLISHED, llama("request_distribution"), 0.9, 1.1),
    Claim("published-llama-split", PUBLISHED, llama("prefill_decode"), 0.9, 1.1),
    Claim("published-gpt-oss-split", PUBLISHED, gpt_oss("prefill_decode"), 0.85, 1.15),
    Claim("published-gpt-oss-replicas", PUBLISHED, gpt_oss("request_distribution"), 0.85, 1.15),
    Claim("published-over-sum", PUBLISHED, over_sum("published"), 1.14, 1.16),
    Claim("online-split", PUBLISHED, rate("prefill_decode"), 1.0, 3.0),
    Claim("online-a100", PUBLISHED, rate("left_card_alone"), 0.75, 1.35),
    Claim("solver-2x1000", PUBLISHED, solver(2, 1000), 0.0, 1.0),
    Claim("solver-4x1000", PUBLISHED, solver(4, 1000), 0.0, 10.0),
    Claim("monitor", MONITOR, lambda d: float(d["worst_ratio_to_better_fixed"]), 0.0, 1.1),
    Claim("services-measured", (), served_error, 0.0, 0.15),
    Claim("bit-equality", VERIFY, lambda _: 0.0, 0.0, 0.0),
)


def outcome(command: tuple[str, ...]) -> tuple[Any, str]:
    """The JSON that a command prints, and why there is none."""
    if not command:
        return None, ""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["failed"])[-1]
    try:
        return json.loads(done.stdout), ""
    except ValueError:
        return {}, ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks the claims of docs/claims.md.")
    parser.add_argument("--only", default="", help="claims whose names begin so, comma-separated")
    names = tuple(filter(None, parser.parse_args(argv).only.split(",")))
    claims = [c for c in CLAIMS if not names or c.name.startswith(names)]
    documents: dict[tuple[str, ...], tuple[Any, str]] = {}
    failed = 0
    for claim in claims:
        if claim.command not in documents:
            start = time.monotonic()
            if claim.command:
                print(f"... python {' '.join(claim.command)}", flush=True)
            documents[claim.command] = outcome(claim.command)
            if claim.command:
                print(f"    {time.monotonic() - start:.0f} s", flush=True)
        found, why = documents[claim.command]
        holds, words = (False, why) if why else claim.verdict(found)
        failed += not holds
        print(f"{'holds' if holds else 'FAILS':6} {claim.name:28} {words}", flush=True)
    print(f"{len(claims) - failed} of {len(claims)} claims hold")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
