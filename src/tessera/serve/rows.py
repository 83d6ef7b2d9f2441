"""Request and Rows: where every request stands, and which step a microbatch of a service runs next.

A request is a sequence of tokens, its prompt and what was chosen so far, of which the model has read a part.
When it has read all, the next token is due. So a prompt in chunks, a prompt read by decodes, an answer, and
an answer that starts anew on another device are all the same thing.

A microbatch is a batch of rows and a spare row, with state of its own, and runs one step at a time:

    encode  makes embeddings of one picture (vision-language models; see `sight`)
    chunk   reads up to `chunk` tokens of one prompt into the spare row
    insert  copies the spare row's state into row `row` of the batch
    decode  reads one token a row, each at its own position

A model without chunks (`chunk` is 0) reads its prompt by decoding; its spare row stays empty, so `insert`
clears a row. A row without a request reads token 0 at position 0, in state that the next insert overwrites;
tokens and positions of a chunk after `last` are not looked at.

Steps alternate: after a chunk comes a decode if any row waits for one, so a long prompt never stops the
answers beside it. Only while most rows are empty and requests wait for them, up to `MAX_CHUNKS` chunks come
before a decode: a decode costs the same for few rows as for all, so it pays to fill them first.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tessera.execute.stepper import StepCall, StepDone, Tensors
from tessera.ir import BufferKind, Plan, need_one_batch
from tessera.serve.answer import AnswerBuffer
from tessera.serve.meters import Times
from tessera.serve.records import Ask, Shape, StepKind
from tessera.serve.sampling import Pick
from tessera.serve.sight import Seeing, Sight
from tessera.serve.text import Reader, StopWatch

# Chunks between two decodes, at most: so much longer may a token take.
MAX_CHUNKS = 4


class ActiveRequest:
    """One ask on its way. Changed by the engine's thread, but for `is_cancelled`."""

    __slots__ = (
        "arrived_s",
        "ask",
        "buffer",
        "first_s",
        "is_cancelled",
        "is_over",
        "last_s",
        "num_out",
        "pick",
        "read",
        "reader",
        "rows",
        "seated_s",
        "sequence",
        "watch",
    )

    def __init__(self, ask: Ask, reader: Reader, end: Sequence[int]) -> None:
        self.ask, self.reader = ask, reader
        self.sequence = list(ask.prompt)
        # Tokens of the sequence that the model has read, and tokens chosen.
        self.read = self.num_out = 0
        self.watch = StopWatch(ask.stop)
        self.buffer = AnswerBuffer()
        # How the next token is chosen.
        self.pick = Pick.of(ask, end)
        self.rows: RowBatch | None = None
        self.is_cancelled = self.is_over = False
        self.arrived_s = time.monotonic()
        self.seated_s: float | None = None
        self.first_s: float | None = None
        self.last_s = 0.0

    def add(self, number: int) -> None:
        """The next token."""
        self.sequence.append(number)
        self.num_out += 1
        self.pick.add(number)

    def text_of(self, number: int) -> str:
        """What a token adds to the answer for certain."""
        text = self.reader.feed(number)
        if not self.ask.stop:
            return text
        return self.watch.skip(text) if self.num_out < self.ask.min_tokens else self.watch.feed(text)

    def rest_of_text(self) -> str:
        """What is certain at the end of the answer."""
        if self.watch.is_stopped:
            return ""
        return self.watch.feed(self.reader.flush()) + self.watch.flush()

    def times(self) -> Times:
        """For the observer."""
        start = self.arrived_s
        queued = None if self.seated_s is None else self.seated_s - start
        first = None if self.first_s is None else self.first_s - start
        return Times(queued, first, time.monotonic() - start)


@dataclass(frozen=True)
class Steps:
    """The steps of a served unit: their numbers, and the inputs that each one has."""

    number: dict[str, int]
    inputs: dict[str, frozenset[str]]

    @staticmethod
    def of(plan: Plan) -> "Steps":
        """As all plans that are loaded together have them."""
        need_one_batch(plan, "a service")
        traces = {graph.trace.step.kind: graph.trace for graph in plan.graphs}
        inputs = {
            kind: frozenset(trace.buffers[b].name for b in trace.buffers_of(BufferKind.INPUT))
            for kind, trace in traces.items()
        }
        return Steps({kind: number for number, kind in enumerate(traces)}, inputs)

    def call(self, microbatch: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...]) -> StepCall:
        """A step, with the inputs that it has; all of them where nobody recorded it."""
        names = self.inputs[kind]
        given = {name: tensor for name, tensor in inputs.items() if name in names} if names else inputs
        return StepCall(microbatch, self.number[kind], given, skips)


# What a step gave: its rows, the kind, and (row of its outputs, request) of every token that is due. Gives
# the requests that leave by it.
Due = Sequence[tuple[int, "ActiveRequest"]]
Settle = Callable[["RowBatch", StepDone, StepKind, Due], Sequence["ActiveRequest"]]


class RowBatch:
    """What an open microbatch holds."""

    def __init__(
        self, number: int, shape: Shape, steps: Steps, settle: Settle, sight: Sight | None = None
    ) -> None:
        self.number, self._shape, self._steps, self._settle = number, shape, steps, settle
        self.rows: list[ActiveRequest | None] = [None] * shape.rows
        # Who is in the spare row, for which row of the batch, and whether its prompt is whole there.
        self.reading: ActiveRequest | None = None
        self._place = 0
        self._is_read = False
        self._seeing = None if sight is None else Seeing(sight, shape.rows)
        # The step that runs, and (row, request) that it is for.
        self._kind: StepKind | None = None
        self._flight: list[tuple[int, ActiveRequest]] = []
        # Since the last decode.
        self._num_chunks = 0

    @property
    def num_used(self) -> int:
        """Rows with a request, or kept for one."""
        return len(self.rows) - self.num_free

    @property
    def num_free(self) -> int:
        """Rows for more requests."""
        return self.rows.count(None) - (self.reading is not None)

    @property
    def takes(self) -> bool:
        """True if a request can begin here now."""
        return self.reading is None and None in self.rows

    @property
    def can_move(self) -> bool:
        """By chunks; without them a request reads again what it has at the pace of an answer."""
        return bool(self._shape.chunk)

    def requests(self) -> list[ActiveRequest]:
        """Everybody here."""
        return [r for r in (*self.rows, self.reading) if r is not None]

    def state(self) -> None:
        """Zeros."""

    def add(self, request: ActiveRequest) -> None:
        """A request begins."""
        self.reading, self._place = request, self.rows.index(None)
        request.rows = self
        # A model without chunks reads in the batch; its spare row is ready at once.
        self._is_read = not self._shape.chunk
        request.read = 0
        if self._seeing is not None:
            self._seeing.begin(request.ask.picture)

    def leave(self, request: ActiveRequest) -> None:
        """A request goes, wherever it stands; a step that runs for it is not looked at."""
        request.rows = None
        if self.reading is request:
            self.reading = None
        elif request in self.rows:
            self.rows[self.rows.index(request)] = None

    def next_step(self, num_waiting: int) -> StepCall | None:
        """The next step; None: there is nothing to do."""
        reading, seeing = self.reading, self._seeing
        if reading is not None and self._is_read:
            if seeing is not None:
                seeing.insert(self._place)
            row = torch.tensor([self._place])
            return self._begin("insert", {"row": row}, [(self._place, reading)])
        has_rows = self.rows.count(None) < len(self.rows)
        if reading is not None and not (has_rows and self._num_chunks >= self._most_chunks(num_waiting)):
            if seeing is not None and seeing.is_blind:
                return self._begin("encode", seeing.encode(), [(0, reading)])
            return self._begin("chunk", self._chunk(reading), [(0, reading)])
        if has_rows:
            flight = [(row, request) for row, request in enumerate(self.rows) if request is not None]
            return self._begin("decode", self._decode(flight), flight)
        return None

    def end(self, done: StepDone) -> Sequence[ActiveRequest]:
        """The step that ran has ended; who leaves by it."""
        kind, flight = self._kind, [(row, r) for row, r in self._flight if not r.is_over]
        assert kind is not None, "a microbatch ends what it began"
        self._kind, self._flight = None, []
        return self._settle(self, done, kind, self._read(kind, flight, done))

    def _read(
        self, kind: StepKind, flight: list[tuple[int, ActiveRequest]], done: StepDone
    ) -> list[tuple[int, ActiveRequest]]:
        """Notes what was read; whose next token is due, by row of the outputs."""
        if kind == "encode":
            if self._seeing is not None and flight:
                self._seeing.image = done.outputs["image"]
            return []
        if kind == "insert":
            for row, request in flight:
                self.rows[row], self.reading = request, None
            return []
        due, width = [], self._width(kind)
        for row, request in flight:
            request.read = min(request.read + width, len(request.sequence))
            if request.read == len(request.sequence):  # all is read: the output is the next token
                due.append((row, request))
        if kind == "decode":
            self._num_chunks = 0
        else:
            self._num_chunks += 1
            self._is_read = bool(due)
        return due

    def _most_chunks(self, num_waiting: int) -> int:
        """Chunks before the next decode: as many as rows could join each decoding one, within limits."""
        decoding = len(self.rows) - self.rows.count(None)
        return max(1, min(MAX_CHUNKS, min(self.num_free, num_waiting) // decoding))

    def _width(self, kind: StepKind) -> int:
        """Tokens of a request that a step reads, at most."""
        return self._shape.chunk if kind == "chunk" else int(kind == "decode")

    def _begin(self, kind: StepKind, inputs: Tensors, flight: list[tuple[int, ActiveRequest]]) -> StepCall:
        self._kind, self._flight = kind, flight
        width = self._width(kind)
        due = [r for _, r in flight if width and r.read + width >= len(r.sequence)]
        if due:
            skips: tuple[str, ...] = ("logits",) if all(request.pick.is_plain for request in due) else ()
        else:
            skips = ("logits", "next_tokens")
        return self._steps.call(self.number, kind, inputs, skips)

    def _chunk(self, request: ActiveRequest) -> Tensors:
        width, start = self._shape.chunk, request.read
        tokens = request.sequence[start : start + width]
        last = len(tokens) - 1
        # What stands behind the last token is not looked at.
        tokens += [0] * (width - len(tokens))
        made = {
            "tokens": torch.tensor([tokens]),
            "positions": torch.arange(start, start + width)[None],
            "last": torch.tensor([last]),
        }
        return made if self._seeing is None else self._seeing.chunk(made)

    def _decode(self, flight: Sequence[tuple[int, ActiveRequest]]) -> Tensors:
        tokens, positions = [0] * len(self.rows), [0] * len(self.rows)
        for row, request in flight:
            positions[row] = at = request.read
            tokens[row] = request.sequence[at]
        made = {"tokens": torch.tensor(tokens)[:, None], "positions": torch.tensor(positions)[:, None]}
        return made if self._seeing is None else self._seeing.decode(made)
