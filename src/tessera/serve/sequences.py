"""SequenceBatch: the sequences of one microbatch, and the tokens its next step reads.

A sequence is a prompt and its answer so far, of which the model has read a part; when all is read, the next
token is due. A step has one of a few sizes and holds decoding sequences first, one token each, then prompt
chunks in arrival order. In sizes up to `rows` every token has a row of its own.

A sequence begins when there are pages for all its tokens. When pages run out, the newest one moves elsewhere
(`evict`) or is preempted; it needs more pages than it released, so it begins again only after another has
ended.

Where recurrent layers keep a state by row (`has_rows`), a sequence keeps its row and shares no pages. Where
tokens cannot be packed (not `is_flat`), a step overwrites rows without a token: a sequence that cannot take
part is preempted, or the step waits.

While a step runs, the next one can be planned (`can_look_ahead`): an unknown token is named by its row in the
running step's outputs. An answer that has ended has read a token too many, which is dropped. Masks of
grammars follow when the token is known (`late_inputs`); without its mask in time, a sequence reads its token
again. One that needs more of the running step's outputs, or whose masks take long, sits the step out.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from tessera.capture.models.examples import PIXELS
from tessera.execute.stepper import StepCall, StepDone, Tensors
from tessera.kernels import PAGE
from tessera.kernels.choice import max_edits
from tessera.serve.answer import ActiveRequest
from tessera.serve.grammar import PATIENCE_S, Guide, prepare_masks
from tessera.serve.pages import PagePool, Tables, listed, num_extended
from tessera.serve.pictures import PictureInputs, SequencePictures
from tessera.serve.records import Counts, Shape
from tessera.serve.step_inputs import (
    OutputRows,
    Part,
    SeatedSequence,
    StartedStep,
    StepInputs,
    Steps,
    output_rows,
    skipped_outputs,
)

# Most keys that are read once more, by further rows of one sequence in a step with a row for each token.
MAX_READ_AGAIN = 1 << 15
# Sequences that must take part in a step planned ahead, for each one that waits.
LEAST_AHEAD = 3
# Returns the requests that end.
Settle = Callable[["SequenceBatch", StepDone, OutputRows], Sequence[ActiveRequest]]


@dataclass(frozen=True)
class BatchConfig:
    """Common to the microbatches of an engine."""

    settle: Settle
    counts: Counts
    picture_inputs: PictureInputs | None = None
    is_caching: bool = True
    # Something reads step inputs.
    is_filled: bool = True
    # Called, from any thread, when a sequence need not wait for its mask any more.
    on_masks: Callable[[], None] = lambda: None


class SequenceBatch:
    is_kept = True

    def __init__(
        self,
        number: int,
        shape: Shape,
        steps: Steps,
        config: BatchConfig,
        pool: PagePool,
        evict: Callable[[ActiveRequest], bool] = lambda request: False,
        can_give: bool = False,
    ) -> None:
        """`can_give`: masks may follow an ordered step."""
        self.number, self._shape, self._steps, self._config = number, shape, steps, config
        self._counts, self._evict, self._can_give = config.counts, evict, can_give
        self._picture_inputs = config.picture_inputs
        # True if a sequence may read a token again.
        self._can_repeat = shape.is_flat and not shape.has_rows
        self._step_s = 0.0
        self._evicted: set[SeatedSequence] = set()
        self.pool, self._is_caching = pool, pool.is_caching
        self._inputs = StepInputs(shape, config.picture_inputs) if config.is_filled else None
        self._num_edits, self._max_edits = 0, max_edits(shape.rows, shape.vocab_size)
        self._part_sizes = shape.part_sizes
        # With pages, and waiting; in arrival order.
        self._begun: list[SeatedSequence] = []
        self._aside: list[SeatedSequence] = []
        self.by_request: dict[ActiveRequest, SeatedSequence] = {}
        self._guides: dict[ActiveRequest, Guide] = {}
        self._num_turns = 0
        self._unused_rows = list(range(shape.rows))
        # Shared pages count once per table.
        self._num_entries = 0
        self._num_wanted = 0
        self.num_coming = 0
        self.num_unread = self.num_unanswered = 0
        self._published: list[int] = []
        self._num_reading = 0
        # Running steps, oldest first; the sequence whose picture is encoded; whether tokens were read since.
        self._started: deque[StartedStep] = deque()
        self._encoding: SeatedSequence | None = None
        self._has_read = False

    @property
    def num_used(self) -> int:
        return len(self.by_request)

    @property
    def num_free(self) -> int:
        return self._shape.rows - len(self.by_request) - self.num_coming

    @property
    def is_reading(self) -> bool:
        return self._num_reading > 0 or bool(self._aside)

    def _count_work(self, sequence: SeatedSequence, unread: int, unanswered: int) -> None:
        self.num_unread += unread - sequence.unread
        self.num_unanswered += unanswered - sequence.unanswered
        sequence.unread, sequence.unanswered = unread, unanswered

    @property
    def takes(self) -> bool:
        """True if there are pages for all waiting requests."""
        return self.num_free > 0 and self._num_wanted <= self.pool.num_free

    @property
    def can_move(self) -> bool:
        """True if reading again pays: token by token it is as slow as answering."""
        return bool(self._part_sizes)

    def requests(self) -> list[ActiveRequest]:
        return list(self.by_request)

    def state(self) -> None: ...

    def add(self, request: ActiveRequest, goes_on: bool = False) -> None:
        """`goes_on`: the sequence answers elsewhere, after its tokens are read."""
        sequence = self._seated(request)
        if goes_on:
            sequence.stop = len(sequence.tokens)
        self._wait(sequence)

    def _seated(self, request: ActiveRequest, row: int | None = None) -> SeatedSequence:
        seen = self._picture_inputs
        pictures = None if seen is None else SequencePictures(request.ask.pictures, seen.form)
        row = heappop(self._unused_rows) if row is None else row
        sequence = SeatedSequence(request, self._num_turns, row, pictures, self._can_give)
        self._num_turns += 1
        self.by_request[request] = sequence
        if request.pick.guide is not None:
            self._guides[request] = request.pick.guide
        self._count_work(sequence, len(sequence.tokens), max(1, request.predicted - request.num_out))
        request.batch = self
        return sequence

    def expect(self, num_pages: int) -> bool:
        if self.num_free < 1 or self._num_entries + num_pages > self._shape.num_page_entries:
            return False
        self.num_coming += 1
        self._num_entries += num_pages
        return True

    def cancel(self, num_pages: int) -> None:
        self.num_coming -= 1
        self._num_entries -= num_pages

    def take_row(self) -> int | None:
        """None: a running step writes all that are unused."""
        written = {part.sequence.row for step in self._started for part in step.parts}
        row = min((row for row in self._unused_rows if row not in written), default=None)
        if row is not None:
            self._unused_rows.remove(row)
            heapify(self._unused_rows)
        return row

    def give_row(self, row: int) -> None:
        heappush(self._unused_rows, row)

    def arrive(
        self, request: ActiveRequest, pages: Tables, read: int, num_expected: int, row: int | None
    ) -> None:
        """`pages` hold the first `read` tokens."""
        self.num_coming -= 1
        sequence = self._seated(request, row)
        sequence.begin(self._shape.windows, pages, read, 0)
        self._num_entries += sequence.num_pages - num_expected
        self._pass_by(sequence)
        self._count_work(sequence, len(sequence.tokens) - read, sequence.unanswered)
        sequence.was_begun = True
        insort(self._begun, sequence, key=lambda s: s.turn)
        self._publish(sequence, read)
        self._filled()

    def depart(self, request: ActiveRequest) -> Tables:
        """No step may read it; its pages are the caller's."""
        pages = self.by_request[request].pages
        self.pool.share(listed(pages))
        self.leave(request)
        return pages

    def hold(self, request: ActiveRequest, is_held: bool = True) -> None:
        sequence = self.by_request[request]
        sequence.stop = sequence.read if is_held else None
        self._evicted.discard(sequence)

    def position(self, request: ActiveRequest) -> tuple[Tables, int] | None:
        """Page tables, and tokens read by ended steps."""
        sequence = self.by_request.get(request)
        if sequence is None or not sequence.is_begun:
            return None
        running = sum(p.num_tokens for step in self._started for p in step.parts if p.sequence is sequence)
        return sequence.pages, sequence.read - running

    def clear(self) -> None:
        for step in self._started:
            self.pool.filled(step.published)
            self.pool.give_back(step.released)
        self._started.clear()
        for request in self.requests():
            self.leave(request)

    def preempted(self) -> list[ActiveRequest]:
        return [sequence.request for sequence in self._aside if sequence.was_begun]

    def leave(self, request: ActiveRequest) -> None:
        request.batch = None
        sequence = self.by_request.pop(request, None)
        self._guides.pop(request, None)
        if sequence is None:
            return
        self._count_work(sequence, 0, 0)
        self._evicted.discard(sequence)
        self.give_row(sequence.row)
        if sequence.is_begun:
            self._release(sequence)
        else:
            self._aside.remove(sequence)
            self._num_wanted -= sequence.num_wanted

    @property
    def can_look_ahead(self) -> bool:
        return len(self._started) == 1 and self._started[0].can_follow

    def next_step(self) -> StepCall | None:
        if (call := self._encode_next()) is not None:
            return call
        if any(self._shape.windows):
            for sequence in self._begun:
                if sequence.read >= sequence.passes_at:
                    self._pass_by(sequence)
        if self._guides:
            seated = self.by_request
            waiting = (guide for request, guide in self._guides.items() if not seated[request].num_running)
            prepare_masks(waiting, self._config.on_masks, PATIENCE_S if self._shape.is_flat else None)
        planned = self._plan()
        if not planned:  # empty, or all wait for a picture or a running step
            return self._encode_next()
        size, skips = self._size_of(planned), skipped_outputs(planned)
        rows = output_rows(self._shape, planned, size)
        num_waiting = sum(s.request.can_wait and s.waits for s, _, _ in planned)
        can_follow = self._picture_inputs is None and (LEAST_AHEAD + 1) * num_waiting <= len(planned)
        guided = [n for n, part in enumerate(planned) if part.guide is not None] if self._guides else []
        is_open = any(planned[number].sequence.num_due for number in guided)
        inputs: Tensors = {}
        if self._inputs is not None:
            guides = [] if is_open else [planned[number].guide for number in guided]
            inputs = {**self._inputs.fill(planned, size, rows), **self._inputs.choices.masks(guides)}
        published, self._published = self._published, []
        self._started.append(StartedStep(planned, rows, can_follow, guided, published))
        for row, (sequence, num_tokens, is_due) in zip(rows, planned, strict=True):
            sequence.read += num_tokens
            sequence.num_running += 1
            if is_due:
                sequence.num_due += 1
                sequence.ahead = row
        self._has_read = True
        call = self._steps.call(self.number, self._steps.number[size], inputs, skips)
        return replace(call, is_open=True) if is_open else call

    def late_inputs(self) -> Tensors:
        (step,) = self._started
        parts = [step.parts[number] for number in step.guided]
        seated = set(self.by_request.values())
        guides = [part.guide if part.sequence in seated else None for part in parts]
        # The step runs meanwhile, about as long as the last one did.
        patience_s = max(PATIENCE_S, self._step_s) if self._can_repeat else None
        prepare_masks(filter(None, guides), self._config.on_masks, patience_s)
        for at, (number, guide) in enumerate(zip(step.guided, guides, strict=True)):
            if guide is not None and not guide.is_ready:
                sequence, guides[at] = step.parts[number].sequence, None
                step.parts[number] = Part(sequence, 0, is_due=False)
                sequence.read -= sequence.is_begun
                sequence.num_due -= 1
        return self._inputs.choices.masks(guides) if self._inputs is not None else {}

    def end(self, done: StepDone) -> Sequence[ActiveRequest]:
        if self._encoding is not None:
            assert self._encoding.pictures is not None, "a picture was encoded for it"
            self._encoding.pictures.take(done.outputs["image"])
            self._encoding = None
            return self._config.settle(self, done, ())
        ended, seated = self._started.popleft(), self.by_request
        rows = []
        self._step_s = done.seconds
        self.pool.filled(ended.published)
        self.pool.give_back(ended.released)
        for row, (sequence, num_tokens, is_due) in zip(ended.output_rows, ended.parts, strict=True):
            request = sequence.request
            sequence.num_due -= is_due
            sequence.num_running -= 1
            if seated.get(request) is not sequence:
                continue
            if sequence.unread:
                unread = max(0, sequence.unread - num_tokens)
                self._count_work(sequence, unread, sequence.unanswered)
            if is_due and sequence.unanswered > 1:
                sequence.unanswered -= 1
                self.num_unanswered -= 1
            if is_due or request.wants_prompt:
                rows.append((row, request))
        left = self._config.settle(self, done, rows)
        for request in left:
            self.leave(request)
        if self._is_caching:
            for sequence, _, _ in ended.parts:
                if sequence.is_begun and sequence.read // PAGE > sequence.num_published:
                    self._publish(sequence, sequence.read)
            self._filled()
        return left

    def _filled(self) -> None:
        pages, self._published = self._published, []
        if self._started:
            self._started[-1].published.extend(pages)
        else:
            self.pool.filled(pages)

    def _give_back(self, pages: Sequence[int]) -> None:
        """Pages are free when no running step of this microbatch reads or writes them."""
        if self._started:
            self._started[-1].released.extend(pages)
        else:
            self.pool.give_back(pages)

    def kind_of(self, step: int) -> str:
        return self._steps.names[step]

    def _encode_next(self) -> StepCall | None:
        """Encode the next picture before its tokens are read; decoding runs between two."""
        has_read, self._has_read = self._has_read, False
        if self._picture_inputs is None or (not has_read and any(s.left == 1 for s in self._begun)):
            return None
        for sequence in self._begun:
            assert sequence.pictures is not None, "every sequence of such a model has them"
            pixels = sequence.pictures.pixels_after(sequence.read)
            if pixels is not None:
                assert self._steps.encode is not None, "such a model has the step"
                self._encoding = sequence
                return self._steps.call(self.number, self._steps.encode, {PIXELS: pixels})
        return None

    def _plan(self) -> list[Part]:
        answering: list[tuple[int, SeatedSequence]] = []
        reading: list[tuple[int, SeatedSequence]] = []
        for sequence in self._begun:
            if left := sequence.left:
                (answering if left == 1 else reading).append((left, sequence))
        num_left = len(answering) + sum(left for left, _ in reading) + sum(s.left for s in self._aside)
        budget = self._budget(num_left)
        num_preempted = self._counts.preemptions
        planned: list[Part] = []
        self._num_reading, self._num_edits = len(reading), 0
        for left, sequence in (*answering, *reading):
            count = self._count(sequence, left, budget)
            end = sequence.read + count
            if count and ((end <= sequence.room and sequence.is_begun) or self._grow(sequence, end)):
                planned.append(Part(sequence, count, count == left))
                budget -= count
        if not self._shape.is_flat and not self._keep_rows(planned):
            return []
        if self._evicted or self._counts.preemptions != num_preempted:
            planned = [part for part in planned if part.sequence.is_begun and part.sequence.left]
        if self._is_caching:
            for sequence, count, _ in planned:
                if (sequence.read + count) // PAGE > sequence.num_published:
                    self._publish(sequence, sequence.read + count)
        # After the others, so that a new sequence can share pages filled in this step.
        while budget > 0 and self._aside and self._begin(sequence := self._aside[0]):
            left = sequence.left
            self._num_reading += left > 1
            count = self._count(sequence, left, budget)
            if count:
                planned.append(Part(sequence, count, count == left))
                self._publish(sequence, sequence.read + count)
                budget -= count
        return planned

    def _keep_rows(self, planned: list[Part]) -> bool:
        """Preempt sequences whose rows a step would overwrite; False if it must wait for a running one."""
        taking = {part.sequence for part in planned}
        begun = [s for s in self._begun if s.read and not s.is_ending] if planned else []
        left_out = [sequence for sequence in begun if sequence not in taking]
        if left_out and self._started:
            return False
        for sequence in left_out:
            self._preempt(sequence)
        return True

    def _budget(self, total: int) -> int:
        """A step costs what its size costs.

        If less than half of the difference to the next smaller size would be used, that size is filled.
        """
        for smaller, size in pairwise(self._part_sizes):
            if total <= (smaller + size) / 2:
                return smaller
        return self._shape.sizes[-1]

    def _count(self, sequence: SeatedSequence, left: int, budget: int) -> int:
        count = left if left < budget else budget
        if (num_edits := sequence.request.pick.num_edits) and count == left:
            if self._num_edits and self._num_edits + num_edits > self._max_edits:
                return 0  # it waits for a step with fewer edits
            self._num_edits += num_edits
        if count == 1 and self._shape.is_flat and sequence.pictures is None:
            return 1
        if count > 1 and (not self._part_sizes or sequence.request.wants_prompt):
            count = 1
        return count if sequence.pictures is None else sequence.pictures.bounded(sequence.read, count)

    def _size_of(self, planned: list[Part]) -> int:
        num, sizes = sum(part.num_tokens for part in planned), self._shape.sizes
        if num > len(planned) and not self._fits_rows(planned, num):
            sizes = self._part_sizes
        elif not self._shape.is_flat:
            num = 1 + max(part.sequence.row for part in planned)
        return next(size for size in sizes if size >= num)

    def _fits_rows(self, planned: list[Part], num_tokens: int) -> bool:
        """True if every token can have a row: short parts of prompts are cheaper so than in a larger step."""
        if num_tokens > self._shape.rows or not self._shape.is_paged or self._picture_inputs is not None:
            return False
        return sum((n - 1) * (s.read + n) for s, n, _ in planned) <= MAX_READ_AGAIN

    def _begin(self, sequence: SeatedSequence) -> bool:
        """One page per other sequence must be left."""
        if sequence.num_due:  # preempted while a step read its next token
            return False
        request = sequence.request
        windows, cached = self._shape.windows, request.cached(self.pool, self)
        num, spare = len(cached[0]), len(self._begun) * len(windows)
        ends = self._shape.ends(len(sequence.tokens) + sequence.num_due + 1, num * PAGE)
        entries = self._shape.num_page_entries - self._num_entries
        if not self.pool.has_room(cached, ends, spare) or num_extended(cached, ends) + spare > entries:
            return False
        self._aside.remove(sequence)
        self._num_wanted -= sequence.num_wanted
        sequence.begin(windows, self.pool.extended(cached, ends), num * PAGE, num)
        self._count_work(sequence, len(sequence.tokens) - sequence.read, sequence.unanswered)
        self._num_entries += sequence.num_pages
        insort(self._begun, sequence, key=lambda s: s.turn)
        if self._is_caching and not sequence.was_begun:
            self._counts.prefix_queries += len(request.sequence)
            self._counts.prefix_hits += sequence.read
        sequence.was_begun = True
        return True

    def _pass_by(self, sequence: SeatedSequence) -> None:
        tables = [table for table in sequence.tables if table.window]
        for table in tables:
            if passed := table.pass_by(sequence.read):
                self._num_entries -= len(passed)
                self._give_back(passed)
        sequence.passes_at = min((PAGE * (t.num_behind + 1) + t.window - 1 for t in tables), default=0)

    def _grow(self, sequence: SeatedSequence, end: int) -> bool:
        """False if there is no page, or the sequence was preempted itself."""
        while sequence.room < end and sequence.is_begun:
            if self.pool.num_free and self._num_entries < self._shape.num_page_entries:
                sequence.append(self.pool.take())
                self._num_entries += 1
            elif self._evicted:  # pages come back when it has gone
                return False
            elif self._can_evict(self._begun[-1]) and self._evict(self._begun[-1].request):
                self._evicted = {s for s in self._begun if s.stop == s.read}
            elif self._started:  # nothing is free before the running step has ended
                return False
            else:
                self._preempt(self._begun[-1])
        return sequence.is_begun

    def _can_evict(self, sequence: SeatedSequence) -> bool:
        return self._shape.is_flat and sequence.stop is None and not sequence.num_running

    def _preempt(self, sequence: SeatedSequence) -> None:
        self._release(sequence)
        self._wait(sequence)
        self._count_work(sequence, len(sequence.tokens), sequence.unanswered)
        self._counts.preemptions += 1

    def _publish(self, sequence: SeatedSequence, end: int) -> None:
        """Planned steps fill the pages up to `end`; a sequence that finds them reads them later."""
        first, after = sequence.num_published, min(end, len(sequence.tokens)) // PAGE
        if first < after and self._is_caching:
            keys = sequence.request.keys(after)
            for group, table in enumerate(sequence.tables):
                for index in range(max(first, table.num_behind), after):
                    page = int(table.pages[index])
                    if self.pool.publish(page, keys[index], self, group):
                        self._published.append(page)
            sequence.num_published = after

    def _release(self, sequence: SeatedSequence) -> None:
        self._begun.remove(sequence)
        self._give_back(listed(sequence.pages))
        self._num_entries -= sequence.num_pages
        sequence.is_begun = False

    def _wait(self, sequence: SeatedSequence) -> None:
        if sequence.stop is not None:
            sequence.stop = len(sequence.tokens)
        tokens = len(sequence.tokens) + sequence.num_due + 1
        sequence.read, sequence.num_wanted = 0, sum(self._shape.ends(tokens, 0))
        insort(self._aside, sequence, key=lambda s: s.turn)
        self._num_wanted += sequence.num_wanted
