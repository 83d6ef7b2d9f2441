"""PagePool: the pages of one microbatch, given out, taken back, and found again by what they hold.

A page holds the keys and values of `PAGE` positions of a sequence. Its key says which tokens it holds and all
tokens before them (`page_key`), so sequences that begin alike can share the pages of what they have in
common, while they run and after they have ended. A page that nobody uses stays findable until pages run out:
then the one that was used least recently is given to somebody else.

Page 0 is never given out: padding writes there.

Not handled: a beginning that is shared but does not fill a page.
"""

import os
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from tessera.kernels import PAGE

# Bytes of a page's key: two that are alike by chance are not expected in the life of any service.
KEY_BYTES = 16
# Bytes of a microbatch's pages on devices that compute on this machine's CPU, where nobody says otherwise.
POOL_BYTES = 128 << 20


def page_key(before: bytes, tokens: Sequence[int], seen: bytes = b"") -> bytes:
    """Of a full page: the key of the page before it, its tokens, and what else it was made of."""
    return blake2b(before + array("q", tokens).tobytes() + seen, digest_size=KEY_BYTES).digest()


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def modest_bytes(microbatches: int) -> int:
    """Of each microbatch's pages, on devices that compute on this machine's CPU."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(POOL_BYTES, steady(free / 4 / microbatches))


def steady(num_bytes: float) -> int:
    """A little less, by 3 % at most: the same if a few bytes more or less are in use, so plans are found."""
    whole = int(num_bytes)
    return whole & -(1 << max(0, whole.bit_length() - 6))


class PagePool:
    """Used by one thread."""

    def __init__(self, num_pages: int, is_caching: bool = True) -> None:
        self.num_pages, self._is_caching = num_pages, is_caching
        # Pages that hold nothing that can be found, the next one last.
        self._blank = list(range(num_pages - 1, 0, -1))
        # Users of each page, and the key under which it can be found.
        self._users = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        # Findable pages that nobody uses, the least recently used first.
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be given out."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    @property
    def num_kept(self) -> int:
        """Pages that can be found."""
        return len(self._by_key)

    def take(self) -> int:
        """A page for one user; there must be one."""
        if self._blank:
            page = self._blank.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        self._users[page] = 1
        return page

    def find(self, keys: Iterable[bytes]) -> list[int]:
        found = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these nobody uses: sharing them leaves fewer to give out."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """A page is full from now on, and can be found; where another one holds the same, that one is."""
        if self._is_caching and self._keys[page] is None and key not in self._by_key:
            self._keys[page] = key
            self._by_key[key] = page

    def give_back(self, pages: Sequence[int]) -> None:
        """A sequence uses its pages no more; its last ones are the first to be taken by others."""
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
        assert key is not None, "only what can be found is idle"
        del self._by_key[key]
