"""The pages of a microbatch: given out once, taken back, and found again only by what they hold."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tessera.kernels import PAGE
from tessera.serve.pages import PagePool, first_seen, listed, page_key, pages_for


def keys_of(tokens: list[int]) -> list[bytes]:
    """Keys of the full pages of a sequence."""
    found = [b""]
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        found.append(page_key(found[-1], tokens[start : start + PAGE]))
    return found[1:]


def taken(pool: PagePool, num: int) -> list[int]:
    """So many pages."""
    return [pool.take() for _ in range(num)]


def test_page_0_is_nobodys() -> None:
    """All others can be given out, each once."""
    pool = PagePool(5)

    assert [1, 2, 3, 4] == sorted(taken(pool, pool.num_free))
    assert 0 == pool.num_free


def test_a_page_is_found_while_it_is_used_and_after() -> None:
    """Two users share it; it is free when both are gone, and can still be found."""
    pool, (key,) = PagePool(3), keys_of([7] * PAGE)
    page = pool.take()
    pool.publish(page, key)
    pool.share(listed(pool.find([key])))
    pool.give_back([page])

    assert ([[page]], 1) == (pool.find([key]), pool.num_free)
    pool.give_back([page])
    assert ([[page]], 2) == (pool.find([key]), pool.num_free)


def test_the_least_recently_used_is_forgotten_first() -> None:
    """Where pages run out, what was given back longest ago is found no more; of a sequence, its end first."""
    pool = PagePool(5)
    old, new = keys_of([1] * 2 * PAGE), keys_of([2] * 2 * PAGE)
    for keys in (old, new):
        pages = taken(pool, 2)
        for page, key in zip(pages, keys, strict=True):
            pool.publish(page, key)
        pool.give_back(pages)
    pool.take()

    assert (1, 2) == (len(pool.find(old)[0]), len(pool.find(new)[0]))


def test_a_page_that_is_gone_ends_what_is_found() -> None:
    """Pages behind it belong to it."""
    pool, keys = PagePool(9), keys_of(list(range(3 * PAGE)))
    for page, key in zip(taken(pool, 2), (keys[0], keys[2]), strict=True):
        pool.publish(page, key)

    assert 1 == len(pool.find(keys)[0])


def test_equal_tokens_behind_another_beginning_are_another_page() -> None:
    """A key says all tokens up to its page, and what else was seen."""
    first, other = keys_of([1] * PAGE + [3] * PAGE), keys_of([2] * PAGE + [3] * PAGE)

    assert first[1] != other[1]
    assert page_key(b"", [0] * PAGE, b"one picture") != page_key(b"", [0] * PAGE, b"another")


def test_switched_off_nothing_is_found() -> None:
    """Pages are given out and taken back all the same."""
    pool, (key,) = PagePool(3, is_caching=False), keys_of([7] * PAGE)
    page = pool.take()
    pool.publish(page, key)
    pool.give_back([page])

    assert ([[]], 2) == (pool.find([key]), pool.num_free)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_pages_hold_tokens(tokens: int, pages: int) -> None:
    """The last one may be filled in part."""
    assert pages == pages_for(tokens)


class Pool(RuleBasedStateMachine):
    """Sequences over few letters, so that many begin alike, that come, grow and go in any order."""

    @initialize(
        num_pages=st.integers(2, 12),
        is_caching=st.booleans(),
        windows=st.sampled_from([(0,), (20,), (0, 1), (0, 20, 40)]),
    )
    def begin(self, num_pages: int, is_caching: bool, windows: tuple[int, ...]) -> None:
        """A pool."""
        self.pool = PagePool(num_pages, is_caching, windows)
        # What each sequence holds, and its pages by group; what was ever written into a page.
        self.sequences: list[tuple[list[int], list[list[int]]]] = []
        self.written: dict[int, tuple[int, ...]] = {}

    @rule(letters=st.lists(st.sampled_from("ab"), min_size=1, max_size=5))
    def come(self, letters: list[str]) -> None:
        """A sequence of full pages begins, from what is found, if there are pages for it."""
        tokens = [ord(letter) for letter in letters for _ in range(PAGE)]
        keys = keys_of(tokens)
        found = self.pool.find(keys)
        num, ends = len(found[0]), [len(keys)] * len(found)
        for table, window in zip(found, self.pool.windows, strict=True):
            assert [n >= first_seen(num * PAGE, window) for n in range(num)] == [page > 0 for page in table]
        if not self.pool.has_room(found, ends, spare=0):
            return
        tables = self.pool.extended(found, ends)
        for group, table in enumerate(tables):
            for index, page in enumerate(table):
                whole = (group, *tokens[: (index + 1) * PAGE])
                if page and index < num:
                    assert whole == self.written[page], "what is found holds these very tokens, behind these"
                elif page:
                    self.written[page] = whole
                    self.pool.publish(page, keys[index], group=group)
        self.sequences.append((tokens, tables))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def pass_by(self, data: st.DataObject) -> None:
        """One of them gives back what lies behind a window."""
        tokens, tables = data.draw(st.sampled_from(self.sequences))
        for table, window in zip(tables, self.pool.windows, strict=True):
            behind = first_seen(len(tokens), window)
            self.pool.give_back([page for page in table[:behind] if page])
            table[:behind] = [0] * behind

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        """One of them ends."""
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.give_back(listed(self.sequences.pop(index)[1]))

    @invariant()
    def no_page_holds_two_things(self) -> None:
        """Every page that a sequence has holds what the sequence read there."""
        for tokens, tables in getattr(self, "sequences", []):
            for group, table in enumerate(tables):
                for index, page in enumerate(table):
                    assert not page or (group, *tokens[: (index + 1) * PAGE]) == self.written[page]

    @invariant()
    def no_page_is_lost(self) -> None:
        """Those in use and those that are free are all of them."""
        if hasattr(self, "pool"):
            used = Counter(page for _, tables in self.sequences for page in listed(tables))
            assert 0 not in used
            assert len(used) == self.pool.num_used

    def teardown(self) -> None:
        """In the end all are free."""
        if hasattr(self, "pool"):
            for _, tables in self.sequences:
                self.pool.give_back(listed(tables))
            assert self.pool.num_pages - 1 == self.pool.num_free


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
