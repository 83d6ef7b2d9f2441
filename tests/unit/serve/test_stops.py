"""Stop strings in text that comes in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from tessera.serve.text import StopWatch

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The answer, found letter by letter in the whole text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    """However the text comes, the answer ends where the first stop string is complete."""
    watch = StopWatch(stops)
    said = "".join(watch.feed(piece) for piece in pieces)
    was_stopped = watch.is_stopped

    assert cut("".join(pieces), stops) == (said + watch.flush(), was_stopped)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_nothing_is_held_back_without_need(pieces: list[str], stops: list[str]) -> None:
    """What is held back is always the beginning of a stop string."""
    watch = StopWatch(stops)
    said = seen = ""
    for piece in pieces:
        said, seen = said + watch.feed(piece), seen + piece
        if watch.is_stopped:
            return
        held = seen[len(said) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_skipped_text_is_not_searched() -> None:
    """Nor does a stop string begin in it."""
    watch = StopWatch(("ab",))

    assert "xa" == watch.skip("xa")
    assert "b" == watch.feed("b")
    assert not watch.is_stopped
