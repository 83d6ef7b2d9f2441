"""Stepper: the interface between what decides (`scheduler`) and what runs.

    WorkerStepper   one worker process per device (`worker_stepper`)
    VirtualStepper  a virtual clock and modelled costs (`simulate.stepper`)

A microbatch is opened on one lane of a loaded plan and runs one step at a time. Microbatches of one home
(`lanes`) share pages.

Imports no torch: tensors pass through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tessera.errors import MismatchError, TesseraError
from tessera.execute.lanes import Lanes, LoadedLane, PageBuffers
from tessera.ir import Clock, Plan, Program, Span, Timeline, Trace

Tensors = Mapping[str, Any]
WorkerState = Literal["starting", "ready", "lost"]


@dataclass(frozen=True, slots=True)
class StepCall:
    microbatch: int
    # Index in `Plan.graphs` of its lane's plan.
    step: int
    # A table may be given in part, its first bytes; the step must not depend on the rest.
    inputs: Tensors = field(default_factory=dict)
    skips: tuple[str, ...] = ()
    wants_state: bool = False
    scale: float = 1.0
    # Its late inputs (`kernels.choice.LATE_INPUTS`) follow.
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class StepDone:
    microbatch: int
    step: int
    outputs: Tensors
    seconds: float
    # Flat bytes; empty unless asked for.
    state: Tensors = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)
    # Before this step, by GPU.
    idle_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """These microbatches are closed and their state is gone."""

    device: str
    microbatches: tuple[int, ...]
    message: str
    # In a row, this one included.
    failures: int = 1
    # None: never restarted.
    retry_s: float | None = 0.0
    # False if blamed for a time-out without proof; such retries are not counted.
    is_certain: bool = True

    @property
    def text(self) -> str:
        place = f"device {self.device}: "
        return place + self.message.removeprefix(place)


@dataclass(frozen=True, slots=True)
class DeviceBack:
    device: str


@dataclass(frozen=True, slots=True)
class PageMove:
    """Pages between the homes of two microbatches, in order; the source keeps its own.

    With `rows`, state by row goes along; neither microbatch may run a step meanwhile.
    """

    number: int
    source: int
    destination: int
    # Equally many; never page 0.
    from_pages: tuple[int, ...]
    to_pages: tuple[int, ...]
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    number: int
    # Empty: all bytes are at the destination.
    failure: str = ""
    seconds: float = 0.0
    num_bytes: int = 0


Event = StepDone | Moved | DeviceLost | DeviceBack


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    state: WorkerState
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Totals since the start."""

    busy_s: Mapping[str, float]
    # (source, destination) -> bytes
    moved: Mapping[tuple[str, str], int]
    devices: Mapping[str, DeviceStatus] = field(default_factory=dict)
    # Mixture of experts -> rows by expert, of mixtures with parts on a CPU.
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Stepper(Protocol):
    """A context manager, used by one thread except `wake`."""

    # A policy is an index into them.
    plans: tuple[Plan, ...]
    lanes: Lanes

    def load(self, plans: Sequence[Plan]) -> None:
        """Replaces the plans by others for the same devices.

        Open microbatches keep their lanes. Pages of homes that neither a loaded plan nor an open microbatch
        has are freed. Raises if a device lacks memory for all, or if a step reads weights that the workers
        did not start with.
        """

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        """Opens a microbatch on a lane taken from `lanes`; its state is zeros by default."""

    def close(self, microbatch: int) -> None:
        """Closes a microbatch that runs nothing. The caller gives its lane back."""

    def can_queue(self, microbatch: int) -> bool:
        """True if a step can be queued behind the running one."""

    def start(self, call: StepCall) -> None:
        """Begins or queues a step."""

    def give(self, microbatch: int, inputs: Tensors) -> None:
        """Sends late inputs of the microbatch's only step."""

    def move(self, move: PageMove) -> None:
        """Begins a move that ends with `Moved`.

        Steps go on meanwhile. No running step may write these pages, and nothing may use those at the
        destination before the end.
        """

    def take(self, timeout_s: float | None) -> Event | None:
        """The next event; None after the timeout or a wake."""

    def wake(self) -> None:
        """Makes `take` return; from any thread."""

    def use(self) -> DeviceUse:
        """For metrics."""

    def now_s(self) -> float:
        """Real or virtual clock."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a move takes from one device to another."""

    source: int
    destination: int
    # See `memory.StatePlace`.
    places: tuple[tuple[int, int], tuple[int, int]]
    buffers: list[tuple[str, int]]
    from_pages: Sequence[int]
    to_pages: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return len(self.from_pages) * sum(size for _, size in self.buffers)


def routes_of(
    move: PageMove, lanes: Lanes, source: LoadedLane | None, destination: LoadedLane | None
) -> list[Route]:
    """No pages are moved within a home; raises TesseraError."""
    place = f"move {move.number}"
    if source is None or destination is None:
        raise TesseraError("one of its microbatches is not open", place=place)
    if source.home is None or destination.home is None:
        message = "state that is not in the pages of a home does not move"
        raise TesseraError(message, "Plan with a home.", place)
    if len(move.from_pages) != len(move.to_pages):
        remedy = "Give as many places as pages."
        raise TesseraError(f"pages {move.from_pages} cannot go to pages {move.to_pages}", remedy, place)
    routes: list[Route] = []
    if source.home != destination.home and move.from_pages:
        homes = {home.number: home.buffers for home in lanes.homes.values()}
        ends = ((source.home, -1), (destination.home, -1))
        buffers = (homes[source.home], homes[destination.home])
        routes += _routes(place, ends, buffers, move.from_pages, move.to_pages, 1)
    if move.rows is not None:
        ends = ((source.number, move.source), (destination.number, move.destination))
        routes += _routes(place, ends, (source.rows, destination.rows), move.rows[:1], move.rows[1:], 0)
    return routes


def _routes(
    place: str,
    ends: tuple[tuple[int, int], tuple[int, int]],
    buffers: tuple[PageBuffers, PageBuffers],
    from_pages: Sequence[int],
    to_pages: Sequence[int],
    first: int,
) -> list[Route]:
    """`first`: lowest page that may be moved."""
    one, other = buffers
    if {n: x.page_bytes for n, x in one.items()} != {n: x.page_bytes for n, x in other.items()}:
        raise MismatchError("the state of the two homes differs", "Plan both for the same model.", place)
    for pages, held in ((from_pages, one), (to_pages, other)):
        limit = min((x.num_pages for x in held.values()), default=1 << 63)
        if not all(first <= page < limit for page in pages):
            remedy = "Give pages of both homes, page 0 not among them."
            raise TesseraError(f"pages {from_pages} cannot go to pages {to_pages}", remedy, place)
    parts_by_pair: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, buffer in one.items():
        parts_by_pair.setdefault((buffer.device, other[name].device), []).append((name, buffer.page_bytes))
    return [Route(*pair, ends, parts, from_pages, to_pages) for pair, parts in parts_by_pair.items()]


if TYPE_CHECKING:
    from tessera.execute.messages import Done


class SpanLog:
    def __init__(self, plan: Plan, scale: float = 1.0) -> None:
        """Times are divided by `scale`, that of dilated devices."""
        self._plan, self._us = plan, 1e6 / scale
        self.begin(0.0)

    def begin(self, origin_s: float) -> None:
        self._spans: dict[int, list[Span]] = {}
        self._requests: dict[int, int] = {}
        self._origin_s = origin_s
        self.cpu_us = dict.fromkeys(self._plan.cluster.names, 0.0)

    def open(self, microbatch: int, request: int) -> None:
        self._requests[microbatch] = request

    def forget(self, request: int) -> None:
        self._spans.pop(request, None)

    def add(
        self,
        device: int,
        done: "Done",
        program: Program,
        trace: Trace,
        microbatch: int,
        offsets_s: Sequence[float],
    ) -> None:
        """`offsets_s`: from each device's clock to the stepper's."""
        request = self._requests.get(microbatch)
        if request is None:
            return
        names = self._plan.cluster.names
        spans = self._spans.setdefault(request, [])
        shift_s = offsets_s[device] - self._origin_s
        for launch, start, stop, cpu_s in done.spans:
            label = trace.kernel_of(launch).name
            begin, end = (start + shift_s) * self._us, (stop + shift_s) * self._us
            spans.append(Span(names[device], label, request, microbatch, begin, end))
            self.cpu_us[names[device]] += cpu_s * self._us
        for number, start, stop in done.transfers:
            transfer = program.transfers[number]
            begin = (start + offsets_s[transfer.src] - self._origin_s) * self._us
            track, label = f"{names[transfer.src]} -> {names[transfer.dst]}", f"{transfer.num_bytes} bytes"
            # Clocks of two machines differ; a span must not end before it starts.
            end = max(begin, (stop + shift_s) * self._us)
            spans.append(Span(track, label, request, microbatch, begin, end, True))

    def timeline(self) -> Timeline:
        spans = sorted(
            (s for row in self._spans.values() for s in row), key=lambda s: (s.start_us, s.stop_us)
        )
        ends = {number: max(s.stop_us for s in row) for number, row in self._spans.items() if row}
        requests = tuple((number, 0.0, stop) for number, stop in sorted(ends.items()))
        return Timeline(Clock.MEASURED, tuple(spans), requests)
