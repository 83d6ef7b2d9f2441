"""Which step the rows of a microbatch run next."""

from collections.abc import Sequence

from serving_factory import GREEDY, KINDS, toy_plans
from tessera.execute.stepper import StepDone
from tessera.serve.records import Ask, Shape, StepKind
from tessera.serve.rows import MAX_CHUNKS, ActiveRequest, RowBatch, Steps
from tessera.serve.text import ByteText


def request_of() -> ActiveRequest:
    """One token in, many out."""
    return ActiveRequest(Ask((1,), 9, GREEDY), ByteText().reader(), ())


def rows_of() -> RowBatch:
    """Many rows, one of them with an answer in progress."""

    def settle(
        rows: RowBatch, done: StepDone, kind: StepKind, due: Sequence[tuple[int, ActiveRequest]]
    ) -> list[ActiveRequest]:
        for _, request in due:
            request.add(1)
        return []

    made = RowBatch(0, Shape(1, 32, 48, 4, 258), Steps.of(toy_plans(["only"], 1)[0]), settle)
    made.rows[0] = request_of()
    return made


def kinds_until_decode(rows: RowBatch, num_waiting: int) -> list[str]:
    """The steps that run before the next decode; new requests come in at once."""
    kinds: list[str] = []
    while "decode" not in kinds:
        if rows.takes:
            rows.add(request_of())
        call = rows.next_step(num_waiting)
        assert call is not None
        kinds.append(KINDS[call.step])
        rows.end(StepDone(0, call.step, {}, 0.0))
    return kinds


def test_empty_rows_are_filled_before_a_decode() -> None:
    """One answer, many rows, and requests that wait for them: several chunks come first, within a limit."""
    assert MAX_CHUNKS == kinds_until_decode(rows_of(), 99).count("chunk")


def test_nobody_who_waits_means_no_delay() -> None:
    """A single prompt beside a single answer takes turns with it, however many rows are empty."""
    assert 1 == kinds_until_decode(rows_of(), 0).count("chunk")


def test_nothing_to_do_is_said_so() -> None:
    """When the last request has left, there is no next step."""
    rows = rows_of()
    (request,) = rows.requests()
    rows.leave(request)

    assert rows.next_step(0) is None
