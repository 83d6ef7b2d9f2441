"""Delivery: from what a step gave to what readers get, and the one end of every request.

In two halves, so that the next step can start between them: `settle` chooses tokens and frees the pages of
answers that they end, `deliver` makes text of them and wakes the readers. What the devices would wait for
belongs into the second.
"""

import time
from collections.abc import Callable, Sequence

from tessera.execute.stepper import StepDone
from tessera.serve.answer import ActiveRequest, WakeUps
from tessera.serve.meters import Meters
from tessera.serve.records import Finish, Reason, Token
from tessera.serve.sampling import choose
from tessera.serve.sequences import Due, SequenceBatch

NO_NUMBERS = "the model gave no numbers for this request. Check its weights and dtype."


class Delivery:
    """Used by the engine's thread."""

    def __init__(self, end: Sequence[int], meters: Meters, on_finish: Callable[[], None]) -> None:
        self._end, self._meters, self._on_finish = frozenset(end), meters, on_finish
        self._due: list[tuple[ActiveRequest, Token | int, Reason | None]] = []
        self._gaps: list[float] = []
        self._wake_ups = WakeUps()

    def settle(self, batch: SequenceBatch, done: StepDone, looked_at: Due) -> Sequence[ActiveRequest]:
        """Chooses tokens, and frees the pages of answers that end by them; gives whose."""
        due = [(row, request) for row, request in looked_at if not _noted(batch, done, row, request)]
        self._meters.stepped(batch.kind_of(done.step), done.seconds)
        if not due:
            return ()
        now, left = time.monotonic(), []
        for (_, request), chosen in zip(due, _chosen(done, due), strict=True):
            if chosen is None:
                self.finish(request, "error", request.pick.failure or NO_NUMBERS)
                left.append(request)
                continue
            number = chosen if isinstance(chosen, int) else chosen.number
            if request.first_s is None:
                request.first_s = now
                self._meters.first_token(len(request.ask.prompt), now - request.arrived_s)
            else:
                self._gaps.append(now - request.last_s)
            request.last_s = now
            request.add(number)
            reason = self._reason(request, number)
            if reason is not None:
                batch.leave(request)
                left.append(request)
            self._due.append((request, chosen, reason))
        self._meters.output_tokens += len(due)
        return left

    def _ends(self, request: ActiveRequest, number: int) -> bool:
        """True if the token says that the answer is over; it has no text then."""
        ask = request.ask
        return number in ask.stop_tokens or (number in self._end and not ask.ignores_end)

    def _reason(self, request: ActiveRequest, number: int) -> Reason | None:
        if self._ends(request, number) or request.pick.is_over:
            return "stop"
        return "length" if request.num_out >= request.ask.max_tokens else None

    def deliver(self) -> None:
        """Makes text of the tokens of the last steps and wakes their readers."""
        due, self._due = self._due, []
        for request, chosen, reason in due:
            if request.is_over:
                continue
            token = Token(chosen) if isinstance(chosen, int) else chosen
            is_end = self._ends(request, token.number)
            request.buffer.put("" if is_end else request.text_of(token.number), token)
            if request.watch.is_stopped:
                self.finish(request, "stop")
            elif reason is not None:
                self.finish(request, reason)
            else:
                self._wake_ups.add(request.buffer)
        self._wake_ups.flush()
        for request, _, _ in due:
            if not request.is_over:
                request.pick.prepare()
        if self._gaps:
            self._meters.next_tokens(self._gaps)
            self._gaps = []

    def finish(self, request: ActiveRequest, reason: Reason, message: str = "") -> None:
        request.is_over = True
        if request.batch is not None:
            request.batch.leave(request)
        rest = request.rest_of_text()
        if rest:
            request.buffer.put(rest, None)
        finish = Finish(
            reason, len(request.ask.prompt), request.num_out, message, tuple(request.prompt_notes)
        )
        request.buffer.finish(finish)
        self._wake_ups.add(request.buffer)
        self._meters.ended(finish, request.times())
        self._on_finish()


def _noted(batch: SequenceBatch, done: StepDone, row: int, request: ActiveRequest) -> bool:
    """Takes down the logprobs of a prompt's next token, where they are wanted; False if a token is due."""
    if not request.wants_prompt:
        return False
    at, num = batch.num_read(request), request.ask.prompt_logprobs or 0
    if at == len(request.prompt_notes) + 1:
        logs = done.outputs["logits"][row].float().log_softmax(-1)
        values, tokens = logs.topk(num)
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        number = request.ask.prompt[at]
        request.prompt_notes.append(Token(number, float(logs[number]), top))
    return True


def _chosen(done: StepDone, due: Due) -> Sequence[Token | int | None]:
    """A number where the model's own choice is all that is wanted, which is quicker than a token."""
    greedy: list[int] = done.outputs["next_tokens"].tolist()
    picks = [request.pick for _, request in due]
    if all(pick.is_plain for pick in picks):
        return [greedy[row] for row, _ in due]
    return choose(done.outputs["logits"], greedy, [row for row, _ in due], picks)
