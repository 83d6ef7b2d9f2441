"""When a slot more is worth opening: each one that decodes may slow the others down.

With k slots decoding, a decode of one of them takes pace(k). Where the devices still have room, pace(k + 1)
is pace(k), and a request that finds no seat opens a slot at once. Where they have none, the newcomers slow
down everybody who is seated, by pace(k + 1) / pace(k); then they wait for a seat until there are enough of
them. A slot that is opened too soon is not only a loss for a moment: with more slots everybody stays longer,
so the slot does not empty again, and a system that could serve its load with two slots stays at three.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.simulate.machine import Machine
from tessera.simulate.policy import Lane, Policy
from tessera.simulate.repeats import Repeats

# Waiting requests for each request that is seated and would take twice as long. Of several values tried on an
# 8B model, latencies were least, and varied least with the seed, around this one.
PER_SEATED = 0.2
# Decodes of every slot that a pace is taken from, after as many to settle.
SETTLE, RUNS = 4, 4
# Where others leave a slot no time it never gets so far; then this many times as many runs are enough.
MOST_RUNS = 8


@dataclass(eq=False)
class Patience:
    """Paces of policies, found when they are first asked for."""

    _paces: dict[tuple[Policy, int], float] = field(default_factory=dict)

    def opens(self, policy: Policy, num_open: int, num_seated: int, num_waiting: int) -> bool:
        """Is one more slot worth what it costs those who are seated?"""
        if not num_open or not policy.has_body:
            return True
        slower = self.pace_us(policy, num_open + 1) / self.pace_us(policy, num_open) - 1.0
        return num_waiting >= PER_SEATED * num_seated * slower

    def pace_us(self, policy: Policy, num_slots: int) -> float:
        """The time of one decode with so many slots decoding and nothing else going on."""
        key = (policy, num_slots)
        if key not in self._paces:
            usable = policy.table(frozenset())
            assert usable is not None, "without a lost device every lane can be used"
            table, lanes = usable
            self._paces[key] = _pace_us(policy, [lanes[table.take()] for _ in range(num_slots)])
        return self._paces[key]


def _pace_us(policy: Policy, lanes: Sequence[Lane]) -> float:
    shop = policy.shop
    machine = Repeats(Machine(shop.truth.plan, shop.scripts.wires.num_buses))
    for slot, lane in enumerate(lanes):
        machine.start(slot, policy.body(lane))
    done, start_us, before = [0] * len(lanes), 0.0, 0
    most = MOST_RUNS * (SETTLE + RUNS) * len(lanes)
    while min(done) < SETTLE + RUNS and sum(done) < most:
        ended = machine.run_until(None)
        assert ended is not None, "something always runs"
        done[ended] += 1
        if min(done) < SETTLE and 2 * sum(done) < most:
            start_us, before = machine.now_us, sum(done)
        machine.start(ended, policy.body(lanes[ended]))
    return (machine.now_us - start_us) * len(lanes) / (sum(done) - before)
