"""tessera run --pick: plans tried out on these devices, and the fastest kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.errors import TesseraError
from tessera.ir import DeviceKind, Plan, need_one_batch

if TYPE_CHECKING:
    from tessera.execute.offline import Trial


@dataclass(frozen=True)
class Picked:
    """What each plan reached, and which was taken."""

    trials: "Sequence[Trial]"
    number: int

    @property
    def ahead(self) -> float:
        """By what share the plan is faster than the best of the others; a little below 0 where it is the
        first and as good."""
        best = max(t.per_s for t in self.trials if t.plan != self.number)
        return self.trials[self.number].per_s / best - 1.0

    def document(self, paths: Sequence[str]) -> dict[str, Any]:
        """For --json."""
        return {
            "number": self.number,
            "plan": paths[self.number],
            "policy": self.trials[self.number].policy,
            "ahead": round(self.ahead, 4),
            "trials": [
                {"plan": paths[t.plan], "policy": t.policy, "per_s": round(t.per_s, 3)} for t in self.trials
            ],
        }


def check_pick(plans: Sequence[Plan], is_picked: bool) -> None:
    """There must be a choice, and devices whose time is worth measuring, if plans are to be tried out."""
    if not is_picked:
        return
    if len(plans) < 2:
        raise TesseraError("there is one plan, and nothing to pick from", "Give several.", "--pick")
    for plan in plans:
        need_one_batch(plan, "trying plans out", "--pick")
    emulated = [d.name for d in plans[0].cluster.devices if d.kind is DeviceKind.EMU]
    if emulated:
        raise TesseraError(
            f"{', '.join(emulated)} compute on this machine's CPU, so how fast they are says nothing",
            "Compare the plans with `tessera simulate`.",
            "--pick",
        )


def picked_text(found: dict[str, Any], is_modelled: bool) -> str:
    """One line for people."""
    rates = {t["plan"]: t for t in found["trials"]}
    mine = rates.pop(found["plan"])
    other = max(rates.values(), key=lambda t: float(t["per_s"]))
    how = "modelled: dilated devices" if is_modelled else "measured here"
    return (
        f"picked {mine['policy']} ({found['plan']}): {mine['per_s']:,.1f} requests/s, {found['ahead']:+.1%} "
        f"against {other['policy']} ({how}, {len(found['trials'])} plans)"
    )
