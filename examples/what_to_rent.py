"""What to rent: which GPUs carry a load at the least price, and does a second kind of card help?

    python examples/what_to_rent.py

Llama 3 8B, 8 requests a second of 1,024 + 256 tokens, at most 50 ms a token. Sets of one kind of card and of
several are tried, each at its own best batch. All figures are modelled and simulated, and prices carry their
date. `tessera advise` is the same as a command, with every GPU that has a price.
"""

from tessera.advise import Market, RentedLoad
from tessera.advise.search import advise
from tessera.errors import PlanInfeasible

LOAD = RentedLoad("llama-3-8b", rate_per_s=8, prompt=1024, output=256, tpot_ms=50)
MARKETS = {"A100": ("a100",), "L40S": ("l40s",), "both": ("a100", "l40s")}


def answer(gpus: tuple[str, ...]) -> str:
    """The cheapest set of up to three of these GPUs, in one line."""
    try:
        best = advise(LOAD, Market(gpus, max_devices=3))[0].advised
    except PlanInfeasible as error:
        return str(error)
    per_million = (best.usd_per_1k_requests or 0.0) / LOAD.output * 1000
    return (
        f"{' + '.join(best.gpus)} at ${best.usd_per_hour or 0.0:.2f} an hour carry "
        f"{best.requests_per_s:.1f} requests/s (simulated): ${per_million:.2f} for a million tokens"
    )


def main() -> None:
    """Asks each market."""
    for name, gpus in MARKETS.items():
        print(f"{name}: {answer(gpus)}", flush=True)


if __name__ == "__main__":
    main()
