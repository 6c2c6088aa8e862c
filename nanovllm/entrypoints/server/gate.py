"""Gate: the ASGI application in front of the server's application. The gate refuses requests before they cost any work.

The gate refuses, in this order: requests after the server has begun to stop (503), with an ambiguous length (400), for
the name of another host (403), without a valid API key (401), and with a body that is too large (413), arrives too
slowly (408), does not fit into the memory for bodies (503), or has an unknown (415) or wrong (400) encoding. The gate
reads and unpacks the whole body, as the application would. Everything else is passed on unchanged, so that streamed
answers are not slowed down.

Only digests of API keys are kept. A given key is compared with all digests, each in constant time, so the time of a
comparison reveals nothing.

Unpacking a body stops at a limit, so a small body cannot take much memory. The number of a body's members or frames is
limited as well, because even an empty frame takes time.
"""

import asyncio
import codecs
import hashlib
import hmac
import logging
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.message import Message as MailMessage
from pathlib import Path

import zstandard
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.entrypoints.server.errors import MESSAGES_PATH, ClientDisconnectedError, Refusal
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.entrypoints.server.page import FILES_PATH
from nanovllm.entrypoints.server.request_log import RequestLog
from nanovllm.errors import ConfigError

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
OPEN_PATHS = ("/", "/health", "/version")  # need no key; the page's files need none either
MAX_HELD_BODIES = 64  # the bodies of all open requests together may have this many times the size of the largest
CACHE_SALT = "cache_salt"  # the entry of a request's state with the salt of its API key, if cache_salt_per_key is set
HOST_REFUSED = (
    "this server has no API keys and listens on this machine only, so it answers no requests for another host; ask for "
    "localhost, set an API key, or name the origin in allowed_origins"
)

logger = logging.getLogger(__name__)


@dataclass
class _HeldBody:
    """The size of the part of a request's body that is in memory."""

    num_bytes: int = 0


class Gate:
    """Refuses or passes on each request. Set `is_draining` when the server stops.

    outermost: the gate, the headers for pages of the allowed origins, and the log of requests. on_refusal: a function
    that is called with the reason of each refusal, for the metrics.
    """

    def __init__(
        self, app: ASGIApp, options: ServerOptions, keys: "ApiKeys", on_refusal: Callable[[str], None]
    ) -> None:
        self._app, self._options, self._keys, self._on_refusal = app, options, keys, on_refusal
        outermost: ASGIApp = self
        if options.allowed_origins:
            outermost = CORSMiddleware(
                self, allow_origins=options.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        self.outermost: ASGIApp = RequestLog(outermost)
        self._num_held_bytes = 0  # in the bodies of all requests that are open
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = _HeldBody()
        try:
            if scope["type"] == "http":
                try:
                    self._check_access(scope)
                    scope, receive = await self._read_body(scope, receive, held)
                except Refusal as refusal:
                    self._on_refusal(refusal.reason)
                    refusal.record(scope)
                    return await refusal.response(scope["path"])(scope, receive, send)
                except ClientDisconnectedError:
                    return None
            await self._app(scope, receive, send)
        finally:  # the application keeps the body until it has answered
            self._num_held_bytes -= held.num_bytes

    def _check_access(self, scope: Scope) -> None:
        """Raise Refusal for a request that is refused for any body. Store the salt of the API key."""
        if self.is_draining:
            raise Refusal(503, "draining", "the server is stopping; ask again later", retry_after_s=1)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # RFC 9112, 6.1: a way to smuggle a second request
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            raise Refusal(400, "framing", message, closes=True)
        for name, value in scope["headers"]:
            if name == b"host" and not self._keys and not self._options.is_known_host(value.decode("latin-1")):
                raise Refusal(403, "host", HOST_REFUSED)
        if not self._keys or scope["path"] in OPEN_PATHS or scope["path"].startswith(f"{FILES_PATH}/"):
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if scope["path"].startswith(MESSAGES_PATH) and not given:  # Anthropic's clients send the key in this header
            given = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(given) != 1 or not self._keys.accept(given[0]):
            problem = "the API key is wrong" if given else "the API key is missing"
            raise Refusal(401, "api_key", f"{problem}; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        if self._options.cache_salt_per_key:
            scope.setdefault("state", {})[CACHE_SALT] = self._keys.cache_salt(given[0])

    async def _read_body(self, scope: Scope, receive: Receive, held: _HeldBody) -> tuple[Scope, Receive]:
        """Read and unpack the whole body. Return a scope without the body's encoding and a `receive` that returns the
        unpacked body.

        Raises Refusal for a body that is too large, arrives too slowly, or cannot be unpacked.
        """
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        self._check_size(max(lengths, default=0))  # the announced length may be false
        try:
            whole = await asyncio.wait_for(self._whole_body(receive, held), self._options.max_receive_s)
        except asyncio.TimeoutError as error:
            limit = f"max_receive_s={self._options.max_receive_s:g}"
            message = f"the body has not arrived within {limit} seconds; send it faster"
            raise Refusal(408, "slow_body", message, code="request_timeout") from error
        encodings, charset = encodings_of(scope["headers"])
        if encodings or charset is not None:
            whole = await asyncio.to_thread(self._unpack, whole, encodings, charset)
            self._hold(len(whole), held)
            scope = {**scope, "headers": unpacked_headers(scope["headers"], len(whole))}
        body: list[Message] = [{"type": "http.request", "body": whole, "more_body": False}]

        async def receive_again() -> Message:
            return body.pop() if body else await receive()

        return scope, receive_again

    def _unpack(self, body: bytes, encodings: list[str], charset: str | None) -> bytes:
        try:
            body = unpack(body, encodings, charset, self._options.max_body_bytes)
        except UnknownEncodingError as error:
            raise Refusal(415, "encoding", str(error), code="unsupported_encoding") from error
        except ValueError as error:
            raise Refusal(400, "encoding", str(error)) from error
        self._check_size(len(body))
        return body

    async def _whole_body(self, receive: Receive, held: _HeldBody) -> bytes:
        body = bytearray()  # not a list of chunks, because a chunk can be a single byte
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnectedError
            body += message.get("body", b"")
            self._check_size(len(body))
            self._hold(len(body), held)
            is_complete = not message.get("more_body", False)
        return bytes(body)

    def _hold(self, num_bytes: int, held: _HeldBody) -> None:
        self._num_held_bytes += num_bytes - held.num_bytes
        held.num_bytes = num_bytes
        if self._num_held_bytes > MAX_HELD_BODIES * self._options.max_body_bytes:
            full = "the server has no memory left for bodies; ask again later"
            raise Refusal(503, "bodies", full, retry_after_s=1)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._options.max_body_bytes:
            limit = f"max_body_mb={self._options.max_body_mb:g}"
            message = f"the body is larger than {limit} MiB; send less, or raise the server's limit"
            raise Refusal(413, "body_size", message, code="request_too_large")


# -- API keys ----------------------------------------------------------------------------------------------------------


def load_keys(options: ServerOptions) -> "ApiKeys":
    """Read the keys, and warn if everyone in the network may send requests. Raises ConfigError for an unusable file."""
    keys = ApiKeys(read_api_keys(options.api_key_file, os.environ))
    if not keys and not options.is_local:
        logger.warning(
            "nanovllm: host=%s lets everyone who reaches this machine ask; set an API key (%s or api_key_file)",
            options.host,
            API_KEY_VARIABLE,
        )
    return keys


def read_api_keys(path: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the keys of the environment and of the file.

    Raises ConfigError for a file or a variable without a usable key: an empty key would leave the server open to
    everyone. The message leaves the key out.
    """
    found = []  # each key with its origin
    if API_KEY_VARIABLE in environment:
        found.append((environment[API_KEY_VARIABLE].strip(), API_KEY_VARIABLE))
    if path is not None:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file={path!r} cannot be read: {error}") from error
        named = [(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]
        in_file = [(key, origin) for key, origin in named if key and not key.startswith("#")]
        if not in_file:
            raise ConfigError(f"api_key_file={path!r} has no keys; write one per line, or leave the option out")
        found += in_file
    for key, origin in found:
        if not key or not all("!" <= char <= "~" for char in key):
            raise ConfigError(f"{origin} must hold a key of printable ASCII characters without spaces")
    return [key for key, _ in found]


class ApiKeys:
    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]
        self._salt_secret = secrets.token_bytes(32)

    def __bool__(self) -> bool:
        """Return True if there are keys. Without keys, everyone may send requests."""
        return bool(self._digests)

    def accept(self, authorization: bytes) -> bool:
        """Return True if this value of an Authorization header is "Bearer", followed by one of the keys."""
        digest = _digest(_key_of(authorization))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def cache_salt(self, authorization: bytes) -> str | None:
        """Return a secret salt, or None if there is only one key.

        All requests with this key have the same salt until the server ends.
        """
        if len(self._digests) == 1:
            return None
        return hmac.new(self._salt_secret, _key_of(authorization), hashlib.sha256).hexdigest()


def _key_of(authorization: bytes) -> bytes:
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# -- the encoding (Content-Encoding, charset) of a body ----------------------------------------------------------------


MAX_ENCODINGS = 2  # applied one after the other
MAX_FRAMES = 1024  # gzip calls frames members; even an empty frame takes microseconds
PIECE_BYTES = 2**16  # zlib copies the rest of the piece in which a member ends
MAX_ZSTD_WINDOW_BYTES = 8 * 2**20  # what RFC 9659 allows for HTTP; a frame may ask for more memory than it holds text
ZSTD_PIECE_BYTES = 512  # a piece of this size unpacks to at most 16 MiB
SUPPORTED_ENCODINGS = "gzip, deflate or zstd"
_GZIP, _ZLIB_HEADER_BITS = 16 + zlib.MAX_WBITS, 0x0F
# Other codecs, such as punycode, are not for text, or take time that grows with the square of its length
_TEXT_CODECS = re.compile(
    r"ascii|utf-(8|16|32)(-[bl]e|-sig)?|iso8859-\d+|cp\d+|koi8-[rtu]|gb\w+|big5\w*|euc_\w+|shift_jis"
)

Headers = Iterable[tuple[bytes, bytes]]


class UnknownEncodingError(ValueError):
    """An encoding or a charset that the server does not support."""


def encodings_of(headers: Headers) -> tuple[list[str], str | None]:
    """Return the names of a body's encodings in the order in which they were applied, and its charset.

    The charset is None if the headers give none or UTF-8: JSON itself tells UTF-8, UTF-16 and UTF-32 apart.
    """
    encodings, charset = [], None
    for name, value in headers:
        if name == b"content-encoding":
            names = (each.strip().lower() for each in value.decode("latin-1").split(","))
            encodings += [each for each in names if each not in ("", "identity")]
        if name == b"content-type":
            message = MailMessage()
            message["content-type"] = value.decode("latin-1")
            charset = message.get_content_charset()
    return encodings, None if charset in (None, "utf-8", "utf8") else charset


def unpack(body: bytes, encodings: list[str], charset: str | None, max_bytes: int) -> bytes:
    """Return the body in UTF-8. A body longer than `max_bytes` is truncated to a length that still exceeds `max_bytes`.

    Raises UnknownEncodingError for an unknown encoding or charset, and ValueError for a body that is not valid in its
    encoding or charset.
    """
    if len(encodings) > MAX_ENCODINGS:
        raise UnknownEncodingError(f"the body has {len(encodings)} encodings, at most {MAX_ENCODINGS} are allowed")
    for encoding in reversed(encodings):
        try:
            body = _unpack(body, encoding, max_bytes + 1)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise ValueError(f"the body is not valid {encoding}: {error}") from error
        if len(body) > max_bytes:
            return body
    if charset is None:
        return body
    try:
        codec = codecs.lookup(charset)
    except (LookupError, ValueError):  # the name may have a zero byte
        codec = None
    if codec is None or not _TEXT_CODECS.fullmatch(codec.name):
        raise UnknownEncodingError(f"the charset {charset[:40]!r} of the body is not known; send it in UTF-8")
    try:
        return codec.decode(body)[0].encode()
    except UnicodeError as error:
        raise ValueError(f"the body is not text in {codec.name}: {error}") from error


def unpacked_headers(headers: Headers, num_bytes: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of a body that was unpacked to this length, in UTF-8."""
    dropped = (b"content-encoding", b"content-length")
    kept = [
        (name, value.partition(b";")[0] if name == b"content-type" else value)
        for name, value in headers
        if name not in dropped
    ]
    return [*kept, (b"content-length", str(num_bytes).encode())]


def _unpack(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Unpack the first `most_bytes`. Raises EOFError for a truncated body."""
    if encoding in ("gzip", "x-gzip"):
        return _inflate(body, _GZIP, most_bytes)
    if encoding == "deflate":  # the standard demands zlib's header, which some clients leave out
        has_header = len(body) >= 2 and body[0] & _ZLIB_HEADER_BITS == 8 and not int.from_bytes(body[:2], "big") % 31
        return _inflate(body, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS, most_bytes)
    if encoding == "zstd":
        return _unpack_zstd(body, most_bytes)
    raise UnknownEncodingError(f"the encoding {encoding[:40]!r} of the body is not known; use {SUPPORTED_ENCODINGS}")


def _inflate(body: bytes, window_bits: int, most_bytes: int) -> bytes:
    unpacked = bytearray()
    stream, num_members = zlib.decompressobj(window_bits), 1
    for start in range(0, len(body), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        while piece and len(unpacked) < most_bytes:
            if stream.eof and window_bits != _GZIP:
                return bytes(unpacked)
            if stream.eof:  # gzip may have several members
                stream, num_members = zlib.decompressobj(window_bits), _one_more(num_members)
            unpacked += stream.decompress(piece, most_bytes - len(unpacked))
            piece = stream.unused_data
    if body and not stream.eof and len(unpacked) < most_bytes:
        raise EOFError("it ends too early")
    return bytes(unpacked)


def _unpack_zstd(body: bytes, most_bytes: int) -> bytes:
    """Unpack piece by piece, because the package cannot both limit its output and detect a truncated body."""
    unpacked = bytearray()
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    stream, num_frames = decompressor.decompressobj(), 1
    for start in range(0, len(body), ZSTD_PIECE_BYTES):
        piece = body[start : start + ZSTD_PIECE_BYTES]
        while piece and len(unpacked) < most_bytes:
            if stream.eof:  # there may be several frames
                stream, num_frames = decompressor.decompressobj(), _one_more(num_frames)
            unpacked += stream.decompress(piece)
            piece = stream.unused_data
    if not stream.eof and len(unpacked) < most_bytes:
        raise EOFError("it ends too early")
    return bytes(unpacked)


def _one_more(num_frames: int) -> int:
    if num_frames >= MAX_FRAMES:
        raise EOFError(f"it has more than {MAX_FRAMES} members or frames")
    return num_frames + 1
