"""Which GPUs can be rented for a model, and why the others cannot."""

from collections.abc import Sequence

from tessera.advise.records import Market
from tessera.errors import PlanInfeasible, TesseraError
from tessera.ir import Trace
from tessera.plan.rent import Offer
from tessera.profile import Gpu, gpu, known_gpus


def offers_of(market: Market, traces: Sequence[Trace]) -> tuple[list[Offer], list[tuple[str, str]]]:
    """GPUs that can be rented and can run the model, and the others with the reason."""
    wanted = [gpu(name) for name in market.gpus] or list(known_gpus())
    providers = {p for g in known_gpus() for p, _ in g.prices}
    if market.provider and market.provider not in providers:
        known = ", ".join(sorted(providers))
        raise TesseraError(f"no price of '{market.provider}' is known", f"Known: {known}.", "--provider")
    offers, skipped = [], []
    for one in wanted:
        why = _unfit(one, market, traces)
        if why:
            skipped.append((one.name, why))
        else:
            offers.append(Offer(one.name, one.vendor, one.prices))
    if not offers:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped[:4])
        raise PlanInfeasible(f"no GPU is left to rent ({reasons})", "Name others with --gpus.")
    return offers, skipped


def _unfit(one: Gpu, market: Market, traces: Sequence[Trace]) -> str:
    if not one.prices:
        return "no price is known"
    if market.provider and market.provider not in dict(one.prices):
        return f"{market.provider} does not quote it"
    if one.bf16_tflops is None and _uses_bf16(traces):
        return "it has no units for bfloat16"
    return ""


def _uses_bf16(traces: Sequence[Trace]) -> bool:
    return any(
        view is not None and view.dtype == "bfloat16"
        for trace in traces
        for launch in trace.launches
        for view in launch.outputs
    )
