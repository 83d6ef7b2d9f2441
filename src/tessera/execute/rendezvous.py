"""Rendezvous: where remote workers connect, which device each one gets, and the store that workers share."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tessera.execute.engine_connection import key_of, own_version
from tessera.execute.mailbox import Hear, Mailbox, PeerConnection
from tessera.execute.messages import ANY_RANK, Failed, Hello, Message, StoreValue
from tessera.execute.processes import raise_file_limit

NUM_COMPLAINTS = 16
MAX_ASKED_BYTES = 1 << 16


class Rendezvous:
    def __init__(
        self, host: str, port: int, secret: bytes, complain: Callable[[str], None] = lambda line: None
    ) -> None:
        raise_file_limit()  # silent connections hold a descriptor each until their handshake times out
        self.host, self.secret, self._complain = host, secret, complain
        self.complaints: deque[str] = deque(maxlen=NUM_COMPLAINTS)
        self.hear: Hear = lambda connection, message, contents: None
        self.max_bytes: Callable[[PeerConnection], int] = lambda connection: MAX_ASKED_BYTES
        self.mailbox = Mailbox(self.note)
        self.address = self.mailbox.listen(
            f"tcp://{host}:{port or '*'}",
            lambda *news: self.hear(*news),  # noqa: PLW0108 - the hub sets it
            secret,
            lambda connection: self.max_bytes(connection),  # noqa: PLW0108 - the hub sets it
        )
        self.port = int(self.address.rpartition(":")[2])

    def note(self, host: str, what: str) -> None:
        line = f"{host}: {what}"
        is_new = not self.complaints or self.complaints[-1] != line
        self.complaints.append(line)
        if is_new:  # a flood is one line
            self._complain(line)

    def close(self) -> None:
        self.mailbox.close()


@dataclass
class WorkerGroup:
    """A remote worker with a rank gets that device only; one without gets a remaining device once there are
    enough for all of them.
    """

    num_devices: int
    digest: str = ""

    def refusal(self, hello: Hello) -> Failed | None:
        if hello.version != own_version():
            message = f"it has Tessera {hello.version}, the engine {own_version()}"
            return Failed(message, "Install the same version everywhere.")
        if hello.digest not in ("", self.digest):
            return Failed("it has other plans", "Copy the same plan files everywhere.")
        if not ANY_RANK <= hello.rank < self.num_devices:
            return Failed(f"there is no rank {hello.rank}", f"There are {self.num_devices}, from 0.")
        return None

    def choose(
        self, device: int, waiting: Mapping[PeerConnection, Hello], awaited: set[int]
    ) -> PeerConnection | None:
        """`awaited`: devices without a worker."""
        for connection, hello in waiting.items():
            if hello.rank == device:
                return connection
        ranks = {hello.rank for hello in waiting.values()}
        anyone = [connection for connection, hello in waiting.items() if hello.rank == ANY_RANK]
        return anyone[0] if anyone and len(anyone) >= len(awaited - ranks) else None


class Board:
    """Values that workers publish for one another."""

    def __init__(self, send: Callable[[tuple[int, int], Message], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        # Ends of the keys of lost workers.
        self._gone: set[str] = set()
        self._asking: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for source in self._asking.pop(key, ()):
            self._send(source, StoreValue(key, value))

    def get(self, source: tuple[int, int], key: str) -> None:
        self._asking[key].append(source)
        if any(map(key.endswith, self._gone)):
            self.set(key, b"")
        elif key in self._values:
            self.set(key, self._values[key])

    def forget(self, device: int, epoch: int) -> None:
        """Drops a lost worker's requests and values; requests for its values are answered with nothing."""
        end = key_of("", device, epoch)
        self._gone.add(end)
        for key, sources in list(self._asking.items()):
            sources[:] = [source for source in sources if source[0] != device]
            if key.endswith(end):
                self.set(key, b"")
