"""FairQueue: who is served next. Clients take turns; what one client asked for first comes first.

Requests that lost their device go ahead of everybody, in the order in which they come back: they have been
served in part. They do not count against the limit, which is for what comes from outside.

Any thread may use it.
"""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from tessera.errors import ServiceBusy

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting requests by client. An item is in it at most once."""

    def __init__(self, max_waiting: int | None = None) -> None:
        self._max_waiting = max_waiting
        self._returned: deque[T] = deque()
        # In the order of turns: the first client's first item is next.
        self._by_client: dict[str, deque[T]] = {}
        self._num = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._returned) + self._num

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            items = [*self._returned, *(item for own in self._by_client.values() for item in own)]
        return iter(items)

    def push(self, client: str, item: T) -> None:
        """Behind the client's others; refused when too many wait."""
        with self._lock:
            if self._max_waiting is not None and self._num >= self._max_waiting:
                raise ServiceBusy(f"{self._num} requests wait already", "Ask again later.")
            self._by_client.setdefault(client, deque()).append(item)
            self._num += 1

    def give_back(self, item: T) -> None:
        """Ahead of everything that was never served."""
        with self._lock:
            self._returned.append(item)

    def peek(self) -> T | None:
        """The one that `pop` gives next."""
        with self._lock:
            if self._returned:
                return self._returned[0]
            items = next(iter(self._by_client.values()), None)
            return None if items is None else items[0]

    def pop(self) -> T | None:
        """The next one; its client's turn comes again after all others'."""
        with self._lock:
            if self._returned:
                return self._returned.popleft()
            client = next(iter(self._by_client), None)
            if client is None:
                return None
            items = self._by_client[client]
            self._num -= 1
            item = items.popleft()
            if not items:
                del self._by_client[client]
            elif len(self._by_client) > 1:
                self._by_client[client] = self._by_client.pop(client)
            return item

    def remove(self, client: str, item: T) -> bool:
        """Takes out one that nobody waits for any more; False if it is not here."""
        with self._lock:
            if item in self._returned:
                self._returned.remove(item)
                return True
            items = self._by_client.get(client)
            if items is None or item not in items:
                return False
            items.remove(item)
            self._num -= 1
            if not items:
                del self._by_client[client]
            return True
