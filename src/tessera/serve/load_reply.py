"""Reply: one HTTP/1.1 response, read as its bytes come, with the time of every server-sent event.

A body ends as it does in HTTP/1.1: by its chunks, its length, or the connection's end. Bytes and events may
be cut anywhere. Interim responses and trailers are skipped. Not handled: compression; none is asked for.
"""

from collections.abc import Mapping

from tessera.errors import LoadError

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20
# Responses that never have a body.
BODILESS = (204, 304)


class Reply:
    """One response, read as its bytes come. `feed` until `is_done`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        # (when, data) of each server-sent event; only of a body that is a stream of events.
        self.events: list[tuple[float, bytes]] = []
        # When the first byte of the body came.
        self.first_s: float | None = None
        self.is_done = False
        self._raw = bytearray()
        self._state = "head"
        self._left = 0
        self._is_events = False

    @property
    def can_follow(self) -> bool:
        """Whether the connection may carry another request."""
        kept = self.headers.get("connection", "").lower() != "close"
        return self.is_done and kept and self._state != "rest"

    def feed(self, data: bytes, now_s: float) -> None:
        """The next bytes off the wire."""
        self._raw += data
        while not self.is_done and _PARTS[self._state](self, now_s):
            pass

    def end(self) -> None:
        """The connection is over: an end of the body that is right only if nothing else marks one."""
        if self._state == "rest":
            self.is_done = True
        elif not self.is_done:
            what = "before it answered" if not self.status else "in the middle of an answer"
            raise LoadError("closed", f"the server closed the connection {what}")

    def _read_head(self, now_s: float) -> bool:
        stop = self._raw.find(b"\r\n\r\n")
        if stop < 0:
            if len(self._raw) > MAX_HEAD_BYTES:
                raise LoadError("protocol", f"more than {MAX_HEAD_BYTES} bytes of headers")
            return False
        first, *lines = self._raw[:stop].decode("latin-1").split("\r\n")
        del self._raw[: stop + 4]
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise LoadError("protocol", f"'{first[:60]}' is no answer of an HTTP/1.1 server")
        self.status = int(words[1])
        if self.status < 200:  # an interim response; the real one follows
            self.status = 0
            return True
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._is_events = self.headers.get("content-type", "").startswith("text/event-stream")
        self._begin_body()
        return True

    def _begin_body(self) -> None:
        length = self.headers.get("content-length", "")
        if self.status in BODILESS:
            self.is_done = True
        elif self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._state = "size"
        elif length.isdigit():
            self._state, self._left = "length", int(length)
            self.is_done = self._left == 0
        else:
            self._state = "rest"

    def _read_size(self, now_s: float) -> bool:
        stop = self._raw.find(b"\r\n")
        if stop < 0:
            if len(self._raw) > MAX_HEAD_BYTES:
                raise LoadError("protocol", "a chunk without a size")
            return False
        word = bytes(self._raw[:stop]).partition(b";")[0].strip()
        del self._raw[: stop + 2]
        try:
            # Two more than its data: the line's end behind it.
            self._left = int(word, 16) + 2
        except ValueError:
            raise LoadError("protocol", f"{word[:20]!r} is no size of a chunk") from None
        self._state = "chunk" if self._left > 2 else "trailer"
        return True

    def _read_chunk(self, now_s: float) -> bool:
        if len(self._raw) < self._left:
            return False
        self._take(bytes(self._raw[: self._left - 2]), now_s)
        del self._raw[: self._left]
        self._state = "size"
        return True

    def _read_trailer(self, now_s: float) -> bool:
        stop = self._raw.find(b"\r\n")
        if stop < 0:
            return False
        del self._raw[: stop + 2]
        self.is_done = stop == 0
        return True

    def _read_length(self, now_s: float) -> bool:
        data = bytes(self._raw[: self._left])
        del self._raw[: len(data)]
        self._left -= len(data)
        self._take(data, now_s)
        self.is_done = self._left == 0
        return False

    def _read_rest(self, now_s: float) -> bool:
        self._take(bytes(self._raw), now_s)
        self._raw.clear()
        return False

    def _take(self, data: bytes, now_s: float) -> None:
        """Bytes of the body."""
        if not data:
            return
        if self.first_s is None:
            self.first_s = now_s
        self.body += data
        if len(self.body) > MAX_BODY_BYTES:
            raise LoadError("protocol", f"an answer of more than {MAX_BODY_BYTES} bytes")
        if self._is_events:
            self._take_events(now_s)

    def _take_events(self, now_s: float) -> None:
        """Whole events leave the body; what is left is the beginning of the next."""
        if b"\r" in self.body:
            self.body = self.body.replace(b"\r\n", b"\n")
        *whole, rest = self.body.split(b"\n\n")
        if not whole:
            return
        self.body = bytearray(rest)
        for event in whole:
            lines = (line for line in bytes(event).split(b"\n") if line.startswith(b"data:"))
            data = b"\n".join(line[5:].removeprefix(b" ") for line in lines)
            if data:
                self.events.append((now_s, data))


_PARTS = {
    "head": Reply._read_head,
    "size": Reply._read_size,
    "chunk": Reply._read_chunk,
    "trailer": Reply._read_trailer,
    "length": Reply._read_length,
    "rest": Reply._read_rest,
}
