"""What arrives from a server: a response of HTTP/1.1 and the events of a stream, parsed as their bytes arrive.

Only what a benchmark needs is supported: bodies with a length, in chunks, or up to the end of the connection.
"""

from collections.abc import Callable

OnBody = Callable[[bytes, float], None]  # bytes of the body, and the time when they arrived

MAX_HEAD_BYTES = 2**16


class ProtocolError(Exception):
    """The server sent something that is not HTTP, or not an event stream."""


class ConnectionLost(Exception):
    """The connection ended before the response did."""


class SseParser:
    """Splits a stream into the data of its events, whatever the pieces in which it arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that `data` completes. Comments and other fields are left out. Hot."""
        data = self._rest + data
        if b"\r" in data:
            data, last = (data[:-1], b"\r") if data.endswith(b"\r") else (data, b"")  # its \n may follow
            data = data.replace(b"\r\n", b"\n") + last
        *events, self._rest = data.split(b"\n\n")
        return [content for event in events if (content := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    """The values of its data fields, joined by line breaks."""
    if b"\n" not in event and event.startswith(b"data: "):  # nearly all events
        return event[6:]
    lines = (line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[1:] if line.startswith(b" ") else line for line in lines)


class Response:
    """One response, parsed as its bytes arrive. The body goes to `on_body`."""

    def __init__(self, on_body: OnBody) -> None:
        self.status = 0  # until the head has arrived
        self.headers: dict[str, str] = {}  # names in lower case
        self.is_complete = False
        self._on_body = on_body
        self._buffer = b""
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the body, or of this chunk with its line end; None: not known yet

    @property
    def keeps_connection(self) -> bool:
        return self.is_complete and self.headers.get("connection", "").lower() != "close" and self._has_end

    @property
    def _has_end(self) -> bool:
        """Whether the body ends by itself, and not with the connection."""
        return self._is_chunked or "content-length" in self.headers

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse the next bytes. Hot."""
        data = self._buffer + data
        self._buffer = b""
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                return
        if self._is_chunked:
            self._read_chunks(data, now_s)
        elif data or self._num_left == 0:
            self._read_plain(data, now_s)

    def feed_end(self) -> None:
        """The connection has ended. Raises ConnectionLost if the response has not."""
        if self.is_complete:
            return
        if not self.status or self._has_end:
            raise ConnectionLost("the connection ended within the response")
        self.is_complete = True

    def _read_head(self, data: bytes) -> bytes:
        """Parse the status line and the headers once they are complete. Returns what follows them."""
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > MAX_HEAD_BYTES:
                raise ProtocolError(f"no end of the headers within {MAX_HEAD_BYTES} bytes")
            self._buffer = data
            return b""
        status_line, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, status = status_line.partition(" ")
        if not protocol.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ProtocolError(f"not a status line of HTTP/1: {status_line[:80]!r}")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(status[:3])
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if not self._is_chunked and "content-length" in self.headers:
            self._num_left = int(self.headers["content-length"])
        return rest

    def _read_plain(self, data: bytes, now_s: float) -> None:
        if data:
            self._on_body(data, now_s)
        if self._num_left is not None:
            self._num_left -= len(data)
            self.is_complete = self._num_left <= 0

    def _read_chunks(self, data: bytes, now_s: float) -> None:
        """Hand over the content of whole chunks; parts of a chunk wait for the rest. Hot."""
        content = []
        start = 0
        while not self.is_complete:
            line_end = data.find(b"\r\n", start)
            if line_end < 0:
                break
            try:
                size = int(data[start:line_end].partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"not the size of a chunk: {data[start:line_end][:80]!r}") from None
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            self.is_complete = size == 0
            content.append(data[line_end + 2 : end])
            start = end + 2
        self._buffer = data[start:]
        if body := b"".join(content):
            self._on_body(body, now_s)
