"""One seated sequence, and the input tensors of a step that reads some tokens of some sequences.

Inputs are views of one set of buffers, which `StepInputs.fill` writes anew for each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.execute.stepper import StepCall, Tensors
from tessera.ir import BufferKind, Plan
from tessera.kernels import PAGE, of_group
from tessera.serve.answer import ActiveRequest
from tessera.serve.grammar import Guide
from tessera.serve.pages import Tables, first_seen
from tessera.serve.pictures import PictureInputs, SequencePictures
from tessera.serve.records import Shape, step_name
from tessera.serve.sampling import Choice, ChoiceInputs

OutputRows = Sequence[tuple[int, ActiveRequest]]


@dataclass(frozen=True)
class Steps:
    # Size in tokens -> number.
    number: dict[int, int]
    encode: int | None
    names: tuple[str, ...]
    inputs: tuple[frozenset[str], ...]

    @staticmethod
    def of(plan: Plan) -> "Steps":
        traces = [graph.trace for graph in plan.graphs]
        number = {t.step.context: n for n, t in enumerate(traces) if t.step.kind == "tokens"}
        encode = next((n for n, t in enumerate(traces) if t.step.kind == "encode"), None)
        inputs = (frozenset(t.buffers[b].name for b in t.buffers_of(BufferKind.INPUT)) for t in traces)
        return Steps(number, encode, tuple(step_name(trace.step) for trace in traces), tuple(inputs))

    def call(self, microbatch: int, number: int, inputs: Tensors, skips: tuple[str, ...] = ()) -> StepCall:
        """If a step's inputs are not recorded, it gets all."""
        names = self.inputs[number]
        if names:
            inputs = {name: tensor for name, tensor in inputs.items() if name in names}
        return StepCall(microbatch, number, inputs, skips)


class PageTable:
    """Pages of a sequence in one group of layers."""

    def __init__(self, window: int, pages: Sequence[int]) -> None:
        self.window, self.num_pages = window, len(pages)
        self.pages = np.zeros(max(8, 2 * len(pages)), dtype=np.int32)
        self.pages[: len(pages)] = pages
        # Leading pages behind the window, which are 0 in the table.
        self.num_behind = self.num_pages - int(np.count_nonzero(pages))

    @property
    def held(self) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        return self.pages[self.num_behind : self.num_pages]

    def pass_by(self, read: int) -> list[int]:
        """Release the pages that the next token does not see."""
        first, after = self.num_behind, max(self.num_behind, first_seen(read, self.window))
        passed: list[int] = self.pages[first:after].tolist()
        self.pages[first:after] = 0
        self.num_behind = after
        return passed

    def append(self, page: int) -> None:
        if self.num_pages == len(self.pages):
            self.pages = np.concatenate([self.pages, np.zeros_like(self.pages)])
        self.pages[self.num_pages] = page
        self.num_pages += 1


class SeatedSequence:
    def __init__(
        self, request: ActiveRequest, turn: int, row: int, pictures: SequencePictures | None, can_give: bool
    ) -> None:
        self.request, self.turn, self.row, self.pictures = request, turn, row, pictures
        self._can_give = can_give
        self.tokens = request.sequence
        # Number of tokens after which it leaves, if it answers elsewhere.
        self.stop: int | None = None
        self.is_begun = self.was_begun = False
        # Includes those of running steps.
        self.read = 0
        # Running steps that read it; tokens that they will output, and the output row of the newest.
        self.num_running = self.num_due = self.ahead = 0
        self.num_published = self.num_wanted = 0
        # Tokens for which all tables have pages, and after which pages lie behind a window.
        self.tables: list[PageTable] = []
        self.room = self.passes_at = 0
        # Tokens that ended steps have not read, but for an answer's newest; predicted tokens of the answer.
        self.unread = self.unanswered = 0

    @property
    def left(self) -> int:
        """Tokens to read in this microbatch; 0 while it waits for a running step or a mask."""
        if self.request.can_wait:
            guide = self.request.pick.guide
            is_masked = guide is None or self.num_due > 0 or guide.is_ready
            if not is_masked or (self.num_running and self.waits):
                return 0
        if self.stop is not None:
            return self.stop - self.read
        if self.num_due:
            return len(self.tokens) + self.num_due - self.read - self.is_ending
        return len(self.tokens) - self.read

    @property
    def waits(self) -> bool:
        """True if its next step needs what the running one outputs."""
        guide = self.request.pick.guide
        has_mask = guide is None or (self._can_give and not guide.is_slow)
        return self.request.wants_prompt or not has_mask

    @property
    def is_ending(self) -> bool:
        """True if a running step outputs its last token."""
        return self.num_due > 0 and self.request.num_out + self.num_due >= self.request.ask.max_tokens

    def next_tokens(self, count: int) -> list[int]:
        """-1 - row stands for the running step's output in that row."""
        tokens = self.tokens[self.read : self.read + count]
        return tokens if len(tokens) == count else [*tokens, -1 - self.ahead]

    def forced_after(self, count: int) -> tuple[int, int] | None:
        """The prompt's token after the next `count` ones, and its alternatives, if its logprob is due."""
        request, at = self.request, self.read + count
        if at != len(request.prompt_notes) + 1:
            return None
        return request.ask.prompt[at], request.ask.prompt_logprobs or 0

    @property
    def num_pages(self) -> int:
        return sum(table.num_pages - table.num_behind for table in self.tables)

    @property
    def pages(self) -> list[list[int]]:
        """0 behind a window."""
        return [table.pages[: table.num_pages].tolist() for table in self.tables]

    def begin(self, windows: Sequence[int], tables: Tables, read: int, num_published: int) -> None:
        self.is_begun, self.read, self.num_published = True, read, num_published
        self.tables = [PageTable(window, pages) for window, pages in zip(windows, tables, strict=True)]
        self.room, self.passes_at = min(PAGE * table.num_pages for table in self.tables), 0

    def append(self, page: int) -> None:
        min(self.tables, key=lambda table: table.num_pages).append(page)
        self.room = min(PAGE * table.num_pages for table in self.tables)


class StepInputs:
    def __init__(self, shape: Shape, picture_inputs: PictureInputs | None) -> None:
        self._shape, self._picture_inputs = shape, picture_inputs
        groups = range(len(shape.windows))
        by_token = ("tokens", "positions", "adapters", *(of_group("slots", group) for group in groups))
        by_row = ("lengths", *(of_group("page_starts", group) for group in groups))
        self._by_token = {name: np.zeros(shape.sizes[-1], dtype=np.int64) for name in by_token}
        self._by_row = {name: np.zeros(shape.rows, dtype=np.int32) for name in by_row}
        self._query_starts = np.zeros(shape.rows + 1, dtype=np.int32)
        self._pages = np.zeros(shape.num_page_entries, dtype=np.int32)
        self._fresh = np.zeros(shape.rows, dtype=np.bool_)
        self._rows = np.zeros(shape.rows, dtype=np.int32)
        self.choices = ChoiceInputs(shape.rows, shape.vocab_size)
        self._tensors = {size: self._views(size) for size in shape.sizes}

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        rows = self._shape.num_sequences(size)
        views: dict[str, Any] = {name: held[:size] for name, held in self._by_token.items()}
        views |= {name: held[:rows] for name, held in self._by_row.items()}
        views["query_starts"] = self._query_starts[: rows + 1]
        if not self._shape.is_flat:
            views["fresh"] = self._fresh[:rows]
        elif self._shape.has_rows:
            views["rows"] = self._rows[:rows]
        return {name: torch.from_numpy(view) for name, view in views.items()}

    def fill(self, planned: "list[Part]", size: int, output_rows: Sequence[int]) -> Tensors:
        """Inputs without masks."""
        tokens: list[int] = []
        for sequence, count, _ in planned:
            tokens += sequence.next_tokens(count)
        counts, reads = np.array([(n, s.read) for s, n, _ in planned]).T
        query_ends = counts.cumsum()
        total = int(query_ends[-1])
        positions = np.arange(total) - np.repeat(query_ends - counts - reads, counts)
        at: Any = slice(total)
        # By row: its last token.
        last = np.arange(total) if size <= self._shape.rows else query_ends - 1
        rows: Any = slice(len(last))
        sequence_rows = np.array([part.sequence.row for part in planned])
        if not self._shape.is_flat:
            at = rows = sequence_rows
            self._query_starts[: size + 1] = range(size + 1)
            self._fresh[:size] = True
            self._fresh[rows] = reads == 0
        else:
            self._rows[: len(planned)] = np.where(reads == 0, -1 - sequence_rows, sequence_rows)
            self._query_starts[1 : len(last) + 1] = last + 1
            self._query_starts[len(last) + 1 :] = total
        adapters = np.repeat([part.sequence.request.ask.adapter for part in planned], counts)
        by_token = {"tokens": tokens, "positions": positions, "adapters": adapters}
        by_row, num_entries = {"lengths": positions[last] + 1}, 0
        for group in range(len(self._shape.windows)):
            tables = [part.sequence.tables[group] for part in planned]
            behind, after = np.array([(table.num_behind, table.num_pages) for table in tables]).T
            ends = num_entries + (after - behind).cumsum()
            np.concatenate([table.held for table in tables], out=self._pages[num_entries : ends[-1]])
            num_entries = int(ends[-1])
            # Where the sequence's first page would stand.
            starts = np.repeat(ends - after, counts)
            by_row[of_group("page_starts", group)] = starts[last]
            pages = self._pages[starts + positions // PAGE].astype(np.int64)
            by_token[of_group("slots", group)] = pages * PAGE + positions % PAGE
        for name, values in by_token.items():
            self._by_token[name][:size] = 0
            self._by_token[name][at] = values
        for name, values in by_row.items():
            self._by_row[name][:] = 0
            self._by_row[name][rows] = values
        inputs = {
            **self._tensors[size],
            "pages": torch.from_numpy(self._pages[:num_entries]),
            **self.choices.fill(self._shape.num_sequences(size), _choices(planned, output_rows)),
        }
        if self._picture_inputs is None:
            return inputs
        pictures = [(s.pictures, s.read, count) for s, count, _ in planned if s.pictures is not None]
        return {**inputs, **self._picture_inputs.inputs(pictures, size)}


class Part(NamedTuple):
    sequence: SeatedSequence
    num_tokens: int
    # Its next token is an output of this step.
    is_due: bool

    @property
    def guide(self) -> Guide | None:
        request = self.sequence.request
        return request.pick.guide if self.is_due and not request.wants_prompt else None


@dataclass(frozen=True, slots=True)
class StartedStep:
    parts: list[Part]
    # By part.
    output_rows: Sequence[int]
    can_follow: bool
    # Parts whose masks follow.
    guided: list[int]
    # Pages that it fills; pages to release when it has ended.
    published: list[int]
    released: list[int] = field(default_factory=list)


def output_rows(shape: Shape, planned: Sequence[Part], size: int) -> Sequence[int]:
    """By part: the row of its last token."""
    if not shape.is_flat:
        return [part.sequence.row for part in planned]
    if size > shape.rows:
        return range(len(planned))
    return [end - 1 for end in accumulate(part.num_tokens for part in planned)]


def _choices(planned: Sequence[Part], output_rows: Sequence[int]) -> list[Choice]:
    choices = []
    for (sequence, count, is_due), row in zip(planned, output_rows, strict=True):
        request = sequence.request
        if request.wants_prompt and (forced := sequence.forced_after(count)) is not None:
            choices.append(Choice(row, request.pick, 0, forced=forced))
        elif is_due and not request.pick.is_plain:
            position = len(sequence.tokens) + sequence.num_due
            choices.append(Choice(row, request.pick, position, sequence.num_due))
    return choices


def skipped_outputs(planned: list[Part]) -> tuple[str, ...]:
    is_due = has_logprobs = False
    for part in planned:
        request = part.sequence.request
        has_logprobs |= request.wants_prompt or (part.is_due and request.pick.sampling.logprobs is not None)
        is_due |= part.is_due
    skipped = ("logits",) if has_logprobs else ("logits", "logprobs", "top_tokens")
    return skipped if is_due or has_logprobs else (*skipped, "next_tokens")
