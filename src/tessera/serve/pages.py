"""PagePool: the KV cache pages of a home, with prefix caching.

A page's key covers its tokens and all tokens before them (`page_key`), so sequences with a common prefix
share full pages, while they run and afterwards, until the least recently used is reused. Page 0 is never
handed out: padding writes there, and in a page table it stands for a page behind the window. Groups of layers
(`windows`) have page tables of their own; a prefix is found as far as every group has what the next token
sees of it.
"""

import os
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from tessera.kernels import PAGE

# By group.
Tables = Sequence[Sequence[int]]
# Long enough that collisions are not expected.
KEY_BYTES = 16
# Default for a microbatch on emulated and CPU devices.
POOL_BYTES = 128 << 20


def page_key(before: bytes, tokens: Sequence[int], seen: bytes = b"") -> bytes:
    """`seen`: extra inputs such as pictures."""
    return blake2b(before + array("q", tokens).tobytes() + seen, digest_size=KEY_BYTES).digest()


def first_seen(read: int, window: int) -> int:
    """First page that the token after `read` others sees."""
    return max(0, (read - window + 1) // PAGE) if window else 0


def listed(tables: Tables) -> list[int]:
    return [page for table in tables for page in table if page]


def num_extended(tables: Tables, ends: Sequence[int]) -> int:
    """Pages of tables that are extended to these lengths."""
    return len(listed(tables)) + sum(ends) - sum(map(len, tables))


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def modest_bytes(microbatches: int) -> int:
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(POOL_BYTES, steady(free / 4 / microbatches))


def steady(num_bytes: float) -> int:
    """Rounded down by at most 3 %: small changes of free memory find the same kept plans."""
    whole = int(num_bytes)
    return whole & -(1 << max(0, whole.bit_length() - 6))


class PagePool:
    def __init__(self, num_pages: int, is_caching: bool = True, windows: Sequence[int] = (0,)) -> None:
        self.num_pages, self.is_caching, self.windows = num_pages, is_caching, windows
        self._blank = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        # Published pages that a planned step fills -> its microbatch.
        self._filling: dict[int, object] = {}
        # Findable unused pages, least recently used first.
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    def take(self) -> int:
        if self._blank:
            page = self._blank.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        self._users[page] = 1
        return page

    def find(self, keys: Sequence[bytes], owner: object = None) -> Tables:
        """The longest prefix that all groups have."""
        num, before = len(keys), -1

        def page(index: int, group: int) -> int:
            number = self._by_key.get(_grouped(keys[index], group), 0)
            return number if self._filling.get(number, owner) is owner else 0

        for group in (group for group, window in enumerate(self.windows) if not window):
            num = next((n for n in range(num) if not page(n, group)), num)
        while num != before:
            before = num
            for group, window in enumerate(self.windows):
                at = num
                while window and at > first_seen(num * PAGE, window):
                    at -= 1
                    num = num if page(at, group) else at
        firsts = [first_seen(num * PAGE, window) for window in self.windows]
        return [
            [0] * first + [page(n, group) for n in range(first, num)] for group, first in enumerate(firsts)
        ]

    def has_room(self, cached: Tables, ends: Sequence[int], spare: int) -> bool:
        """True if extending these tables to these lengths leaves `spare` free pages."""
        num_idle = sum(page in self._idle for page in listed(cached))
        return sum(ends) - sum(map(len, cached)) + spare <= self.num_free - num_idle

    def extended(self, cached: Tables, ends: Sequence[int]) -> list[list[int]]:
        """Shares the cached pages and adds new ones up to these lengths."""
        self.share(listed(cached))
        tables = zip(cached, ends, strict=True)
        return [[*table, *(self.take() for _ in range(end - len(table)))] for table, end in tables]

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def publish(self, page: int, key: bytes, owner: object = None, group: int = 0) -> bool:
        """True if `find` returns it from now on; to `owner` only, until it is `filled`."""
        key = _grouped(key, group)
        if not self.is_caching or self._keys[page] is not None or key in self._by_key:
            return False
        self._keys[page] = key
        self._by_key[key] = page
        if owner is not None:
            self._filling[page] = owner
        return True

    def filled(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._filling.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """The last pages of a sequence are reused first."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None

    def _forget(self, page: int) -> None:
        key, self._keys[page] = self._keys[page], None
        assert key is not None, "only published pages are idle"
        del self._by_key[key]


def _grouped(key: bytes, group: int) -> bytes:
    return key + bytes((group,)) if group else key
