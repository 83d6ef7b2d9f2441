"""Names for things: loaded when asked for, no duplicates, a wrong name is answered with the right ones."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tessera.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and the functions that load what they stand for."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._loaders: dict[str, Callable[[], T]] = {}

    def register(self, name: str) -> Callable[[Callable[[], T]], Callable[[], T]]:
        """Decorates a loader: called when the name is asked for, not before."""

        def add(loader: Callable[[], T]) -> Callable[[], T]:
            if name in self._loaders:
                raise ValueError(f"{self.what} '{name}' is registered twice")
            self._loaders[name] = loader
            return loader

        return add

    def get(self, name: str) -> T:
        """What the name stands for; UnknownName lists the known ones."""
        if name not in self._loaders:
            raise UnknownName(self.what, name, self._loaders)
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __contains__(self, name: object) -> bool:
        return name in self._loaders
