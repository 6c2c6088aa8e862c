"""Unpacks the bodies of requests (Content-Encoding) and decodes their characters (charset).

Unpacking stops at a limit, so a small body cannot take much memory. The number of a body's members or frames is limited
as well, because even an empty frame takes time.
"""

import codecs
import re
import zlib
from collections.abc import Iterable
from email.message import Message

import zstandard

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
            message = Message()
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
