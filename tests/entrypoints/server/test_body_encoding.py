"""Bodies that are packed or not in UTF-8 are read as if they were sent plainly, and bombs cost nothing."""

import gzip
import json
import zlib
from typing import Any

import pytest
import zstandard

from nanovllm.entrypoints.server.gate import UnknownEncodingError, encodings_of, unpack

LIMIT = 1 << 20
TEXT = json.dumps({"prompt": "Grüße"}, ensure_ascii=False).encode() * 100


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


PACKERS: dict[str, Any] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


def test_packed_bodies_are_unpacked() -> None:
    for encoding, pack in PACKERS.items():
        assert unpack(pack(TEXT), [encoding], None, LIMIT) == TEXT
        assert unpack(pack(b""), [encoding], None, LIMIT) == b""
    assert unpack(raw_deflate(TEXT), ["deflate"], None, LIMIT) == TEXT
    assert unpack(gzip.compress(TEXT) + gzip.compress(b"more"), ["gzip"], None, LIMIT) == TEXT + b"more"
    assert unpack(zstandard.compress(TEXT) + zstandard.compress(b"more"), ["zstd"], None, LIMIT) == TEXT + b"more"
    assert unpack(gzip.compress(zstandard.compress(TEXT)), ["zstd", "gzip"], None, LIMIT) == TEXT


def test_bomb_is_unpacked_no_further_than_the_limit() -> None:
    for encoding, pack in PACKERS.items():
        bomb = pack(bytes(1 << 26))
        assert LIMIT < len(unpack(bomb, [encoding], None, LIMIT)) <= LIMIT + (1 << 24)
        exact = pack(bytes(LIMIT))
        assert len(unpack(exact, [encoding], None, LIMIT)) == LIMIT
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(ValueError, match="too much memory"):
        unpack(stream.compress(TEXT) + stream.flush(), ["zstd"], None, LIMIT)


def test_many_empty_members_are_refused() -> None:
    """Regression: 4 MB of empty gzip members took 10 seconds, and the time grew with the square of their number."""
    empty_frame = b"\x50\x2a\x4d\x18\x00\x00\x00\x00"  # which zstd skips
    for encoding, member in (("gzip", gzip.compress(b"")), ("zstd", zstandard.compress(b"")), ("zstd", empty_frame)):
        with pytest.raises(ValueError, match="more than 1024 members or frames"):
            unpack(member * 200_000, [encoding], None, LIMIT)
    for encoding, pack in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        assert unpack(b"".join(pack(b"x" * 70_000) for _ in range(14)), [encoding], None, LIMIT) == b"x" * 980_000
        assert unpack(pack(b"x") * 1024, [encoding], None, LIMIT) == b"x" * 1024


def test_body_that_is_cut_or_damaged_is_refused() -> None:
    for encoding, pack in PACKERS.items():
        packed = pack(TEXT)
        for bad in (packed[:-1], packed[: len(packed) // 2], packed[:1], b"\x00" + packed, TEXT):
            with pytest.raises(ValueError, match=f"the body is not valid {encoding}"):
                unpack(bad, [encoding], None, LIMIT)


def test_charset_is_read_and_unknown_names_are_refused() -> None:
    text = '{"prompt": "Grüße"}'
    for charset in ("utf-8", "utf-16", "utf-16-le", "utf-32", "latin-1", "iso-8859-15", "windows-1252", "cp850"):
        assert unpack(text.encode(charset), [], charset, LIMIT) == text.encode()
    assert unpack('"日本"'.encode("shift_jis"), [], "Shift_JIS", LIMIT) == '"日本"'.encode()
    for charset in ("punycode", "idna", "zlib", "rot13", "unicode_escape", "x", "\x00"):
        with pytest.raises(UnknownEncodingError, match="charset"):
            unpack(b"{}", [], charset, LIMIT)
    with pytest.raises(ValueError, match="is not text in utf-16"):
        unpack(b"{}}", [], "utf-16", LIMIT)
    for encodings in (["br"], ["gzip"] * 3):
        with pytest.raises(UnknownEncodingError, match="encoding"):
            unpack(b"{}", encodings, None, LIMIT)


def test_headers_name_encodings_in_the_order_in_which_they_were_applied() -> None:
    kind = b'application/json; charset="UTF-16"'
    headers = [(b"content-encoding", b"Deflate, identity,gzip"), (b"content-type", kind)]
    assert encodings_of(headers) == (["deflate", "gzip"], "utf-16")
    assert encodings_of([(b"content-type", b"application/json; charset=utf-8")]) == ([], None)
