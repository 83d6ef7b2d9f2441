"""StopWatch: finds stop strings in text that comes in pieces, whatever the pieces.

An answer ends where the first stop string is complete; of several that end there, the longest counts. The
stop string is not part of the answer. Text that may yet become one is held back until it is clear.
"""

from collections.abc import Sequence


class StopWatch:
    """Watches one answer."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """The text that is certainly part of the answer by now."""
        if not self._stops:
            return text
        if self.is_stopped or not text:
            return ""
        seen = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return seen[: min(found)[1]]
        hold = max(_overlap(seen, stop) for stop in self._stops)
        cut = len(seen) - hold
        self._held = seen[cut:]
        return seen[:cut]

    def skip(self, text: str) -> str:
        """Text in which nothing is looked for; what was held back comes with it."""
        held, self._held = self._held, ""
        return held + text

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        return self.skip("")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
