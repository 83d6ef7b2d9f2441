"""What the engine tells: decisions of the monitor, utilisation, and times for an observer."""

from collections.abc import Sequence

import pytest

from serving_factory import GREEDY, TOYS, ToyStepper, expected, read, read_all, service_of, until, wait_for
from tessera.adapt.capability import Capability, Point
from tessera.serve.meters import Meters, Times
from tessera.serve.records import Ask, Finish

LONG = Ask((1, 2, 3), 45, GREEDY, ignores_end=True)


def test_the_monitor_switches_policies_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd is served by the wide policy, one that comes later by the quick one; answers stay the same."""
    monkeypatch.setattr("tessera.serve.service.MIN_WINDOW_S", 0.5)
    quick = Capability("quick", 200.0, (Point(0.1, 1.0, 0.1), Point(190.0, 1.0, 2.0)))
    wide = Capability("wide", 1e4, (Point(0.1, 2.0, 0.2), Point(9e3, 2.0, 100.0)))
    asks = [Ask((n,), 30, GREEDY) for n in range(24)]
    stepper = ToyStepper(step_s=0.001)
    with service_of(stepper, capabilities=(quick, wide)) as service:
        assert "quick" == service.snapshot().policy
        found = wait_for(read_all(service, asks))
        crowded = list(stepper.opened)
        until(lambda: service.snapshot().policy == "quick")
        alone = wait_for(read(service, asks[0]))
        snapshot = service.snapshot()

    names = [plan.policy for plan in stepper.plans]
    assert "wide" in {names[policy] for _, policy in crowded}
    last, _ = stepper.log[-1]
    assert "quick" == names[[policy for number, policy in stepper.opened if number == last][-1]]
    assert ["wide", "quick"] == [decision.policy for decision in snapshot.decisions][:2]
    assert len(snapshot.decisions) == snapshot.decided["switch"]
    assert [expected(ask) for ask in asks] == [told.what for told in found]
    assert expected(asks[0]) == alone.what


def test_the_snapshot_shows_utilisation() -> None:
    """Devices and links are those of the stepper, with shares of the last seconds."""
    with service_of(ToyStepper()) as service:
        wait_for(read_all(service, [LONG] * 4))
        until(lambda: bool(service.snapshot().links) and service.snapshot().links[0][3] > 0)
        snapshot = service.snapshot()

    assert list(TOYS) == [device.name for device in snapshot.devices]
    assert 0.0 < snapshot.devices[0].utilisation <= 1.0
    assert ("toy:0", "toy:1") == snapshot.links[0][:2]
    assert (4 * 3, 4 * 45, 2 * 10) == (snapshot.prompt_tokens, snapshot.output_tokens, snapshot.pages)


class Notes(Meters):
    """Meters that keep everything."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[float] = []
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.kinds: set[str] = set()
        self.ends: list[tuple[Finish, Times]] = []

    def seated(self, queued_s: float) -> None:
        """Kept."""
        self.queued.append(queued_s)

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        """Kept."""
        super().first_token(prompt_tokens, seconds)
        self.first.append(seconds)

    def next_tokens(self, seconds: Sequence[float]) -> None:
        """Kept."""
        super().next_tokens(seconds)
        self.gaps += seconds

    def stepped(self, kind: str, seconds: float) -> None:
        """Kept."""
        self.kinds.add(kind)

    def ended(self, finish: Finish, times: Times) -> None:
        """Kept."""
        super().ended(finish, times)
        self.ends.append((finish, times))


def test_meters_see_every_token() -> None:
    """One first token and one end a request, a gap for every other token; the snapshot has quantiles."""
    notes = Notes()
    with service_of(ToyStepper(), meters=notes) as service:
        wait_for(read_all(service, [LONG] * 7))
    latency = service.snapshot().latency

    assert max(notes.first) == latency.first_token_p99_s
    assert sorted(notes.gaps)[len(notes.gaps) // 2 - 1] == latency.token_p50_s
    assert 7 == len(notes.queued) == len(notes.first) == len(notes.ends)
    assert 7 * 44 == len(notes.gaps)
    assert {"tokens-3", "tokens-8"} == notes.kinds
    for finish, times in notes.ends:
        assert "length" == finish.reason
        assert times.queued_s is not None
        assert times.first_token_s is not None
        assert 0.0 <= times.queued_s <= times.first_token_s <= times.whole_s
