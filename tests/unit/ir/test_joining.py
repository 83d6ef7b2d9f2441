"""Traces that cannot be the steps of one request."""

from dataclasses import replace

import pytest

from factories import make_chain
from tessera.analyze import build_graph
from tessera.errors import TesseraError
from tessera.flow import check_joined
from tessera.ir import Graph, Trace, View
from tessera.ir.graph import MAX_RUNS, check_counts, check_steps


def step(kind: str, model: str = "made", launches: int = 2) -> Trace:
    """A trace of one kind of step."""
    trace = make_chain(launches)
    return replace(trace, step=replace(trace.step, kind=kind, model=model))


REFUSED = [
    ([step("prefill", "llama"), step("decode", "mamba")], "several models: llama, mamba.* by itself"),
    ([step("decode"), step("decode")], "traces 1 and 2 are the same decode.*--counts"),
    ([step("decode"), step("prefill")], "before the prefill.*in the order"),
]


@pytest.mark.parametrize(("traces", "message"), REFUSED)
def test_steps_that_are_no_request_are_refused(traces: list[Trace], message: str) -> None:
    """With what is wrong and what to give instead."""
    with pytest.raises(TesseraError, match=message):
        check_steps(traces)


def test_an_encode_returns_what_the_prefill_reads() -> None:
    """In the same size; a longer prefill is refused with the sizes of both."""
    encode, prefill = step("encode"), step("prefill")
    last, (read, *others) = len(encode.buffers) - 1, prefill.buffers
    size = encode.buffers[last].size_bytes
    encode = replace(encode, outputs=(("encoded", View(last, "uint8", (size,), (1,))),))

    def joined(num_bytes: int) -> list[Graph]:
        buffers = (replace(read, name="encoded", size_bytes=num_bytes), *others)
        return [build_graph(encode), build_graph(replace(prefill, buffers=buffers))]

    check_joined(joined(size))
    with pytest.raises(TesseraError, match=f"'encoded' has {size} bytes in encode and {2 * size} in prefill"):
        check_joined(joined(2 * size))


def test_steps_of_one_model_follow_one_another() -> None:
    """An encode, a prefill and a decode of one model; callables of one module are one model."""
    check_steps([step(kind) for kind in ("encode", "prefill", "decode")])
    check_steps([step("prefill", "mine:read"), step("decode", "mine:write")])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 1), "--counts: a step cannot run 0 times.*leave out"),
        ((1, 10**12), "--counts: one request would take 1000000000001 runs.*run by run"),
        ((1,), "--counts: 1 counts for 2 traces"),
    ],
)
def test_counts_that_cannot_be_run_are_refused(counts: tuple[int, ...], message: str) -> None:
    """With the place, the reason and the remedy."""
    with pytest.raises(TesseraError, match=message):
        check_counts(counts, 2)


def test_long_answers_are_not_refused() -> None:
    """A count up to the limit is taken."""
    check_counts((1, MAX_RUNS - 1), 2)
