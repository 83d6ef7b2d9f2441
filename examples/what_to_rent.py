"""What to rent: which GPUs carry a load at the least price, and does a second kind of card help?

    python examples/what_to_rent.py

Llama 3 8B, 12 requests a second of 1,024 + 256 tokens, at most 50 ms a token. Sets of one kind of card and of
several are tried, each at its own best batch, and compared at that rate: what they carry beyond it earns
nothing. All figures are modelled and simulated. `tessera advise` is the same as a command, with every GPU
that has a price.
"""

from tessera.advise import Market, RentedLoad
from tessera.advise.search import advise
from tessera.errors import PlanInfeasible

LOAD = RentedLoad("llama-3-8b", rate_per_s=12, prompt=1024, output=256, tpot_ms=50)
MARKETS = {"A100": ("a100",), "L40S": ("l40s",), "both": ("a100", "l40s")}


def answer(gpus: tuple[str, ...]) -> str:
    """The cheapest set of up to three of these GPUs, in one line."""
    try:
        best = advise(LOAD, Market(gpus, max_devices=3))[0].advised
    except PlanInfeasible as error:
        return str(error)
    usd = best.usd_per_hour or 0.0
    per_million = usd / 3600 / (LOAD.rate_per_s * LOAD.output) * 1e6
    return (
        f"{' + '.join(best.gpus)} at ${usd:.2f} an hour: ${per_million:.2f} for a million tokens at "
        f"{LOAD.rate_per_s:g} requests/s, of {best.requests_per_s:.1f} that they carry (simulated)"
    )


def main() -> None:
    """Asks each market."""
    for name, gpus in MARKETS.items():
        print(f"{name}: {answer(gpus)}", flush=True)


if __name__ == "__main__":
    main()
