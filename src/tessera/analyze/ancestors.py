"""Ancestors: which launches come before which, for those that can still be asked about.

Every launch gets a set of bits, one for each of its ancestors that is alive. A launch is alive while the
history of some buffer still names it: only then can a later launch wait for it. Bits of dead launches are
handed out again, so a set is as wide as the program keeps launches alive, not as long as the program.

Bits are cleared in bulk: a dead launch's bit is free only after the next sweep has taken it out of every
living set.
"""

# Launches between two sweeps.
SWEEP_EVERY = 512


class Ancestors:
    """Grows with the launches in program order."""

    def __init__(self) -> None:
        self._bit: dict[int, int] = {}  # living launch -> its bit, as a mask
        self._above: dict[int, int] = {}  # living launch -> masks of its living ancestors
        self._uses: dict[int, int] = {}
        self._free: list[int] = []
        self._dead = 0
        self._width = 0
        self._since_sweep = 0

    def add(self, launch: int, sources: list[int]) -> list[int]:
        """Adds a launch, held once, behind its sources; returns those that no other implies, latest first."""
        reach, kept = 0, []
        for source in sorted(sources, reverse=True):
            if not reach & self._bit[source]:
                kept.append(source)
                reach |= self._above[source] | self._bit[source]
        self._since_sweep += 1
        if self._since_sweep >= SWEEP_EVERY:
            reach &= self._sweep()
        self._bit[launch] = self._take()
        self._above[launch] = reach
        self._uses[launch] = 1
        return kept

    def precedes(self, first: int, second: int) -> bool:
        """True iff a path leads from `first` to `second`; both alive."""
        return first == second or bool(self._above[second] & self._bit[first])

    def hold(self, launch: int) -> None:
        """A history names the launch once more."""
        self._uses[launch] += 1

    def release(self, launch: int) -> None:
        """A history names the launch once less; nobody may ask about it after the last."""
        self._uses[launch] -= 1
        if self._uses[launch] == 0:
            self._dead |= self._bit.pop(launch)
            del self._above[launch], self._uses[launch]

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._width += 1
        return 1 << (self._width - 1)

    def _sweep(self) -> int:
        """Takes the dead out of every living set, frees their bits and returns the mask of all others."""
        living = ~self._dead
        self._above = {launch: mask & living for launch, mask in self._above.items()}
        while self._dead:
            lowest = self._dead & -self._dead
            self._free.append(lowest)
            self._dead ^= lowest
        self._since_sweep = 0
        return living
