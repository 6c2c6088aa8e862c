"""PDF files, written without a library."""

import zlib
from collections.abc import Sequence

PICTURE = (16, 16)  # pixels, a byte each


def pdf(*pages: str) -> bytes:
    """Return a PDF whose pages show these texts, line by line, in compressed streams as most programs write them."""
    return _file([_stream(_shown(page), b"/Filter /FlateDecode") for page in pages])


def scanned_pdf(num_pages: int) -> bytes:
    """Return a PDF whose pages have a picture and no text, like those of a scanner."""
    return _file([_stream(b"q 612 0 0 792 0 0 cm /Scan Do Q", b"/Filter /FlateDecode")] * num_pages)


def _shown(page: str) -> bytes:
    lines = (line.translate({ord(each): rf"\{each}" for each in r"\()"}) for line in page.split("\n"))
    return (
        b"BT /F1 12 Tf 14 TL 72 720 Td " + b" T* ".join(b"(%s) Tj" % line.encode("cp1252") for line in lines) + b" ET"
    )


def _stream(content: bytes, entries: bytes) -> bytes:
    packed = zlib.compress(content)
    return b"<<%s /Length %d>>\nstream\n%s\nendstream" % (entries, len(packed), packed)


def _file(contents: Sequence[bytes]) -> bytes:
    """Return a file with a page for each content stream. Every page may use the font /F1 and the picture /Scan."""
    width, height = PICTURE
    picture = b"/Type /XObject /Subtype /Image /Width %d /Height %d /ColorSpace /DeviceGray /BitsPerComponent 8 "
    kids = b" ".join(b"%d 0 R" % number for number in range(5, 5 + 2 * len(contents), 2))
    objects = [
        b"<</Type /Catalog /Pages 2 0 R>>",
        b"<</Type /Pages /Kids [%s] /Count %d>>" % (kids, len(contents)),
        b"<</Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding>>",
        _stream(bytes(range(256)), picture % PICTURE + b"/Filter /FlateDecode"),
    ]
    assert width * height == 256, "a byte for each pixel"
    for content in contents:
        resources = b"<</Font <</F1 3 0 R>> /XObject <</Scan 4 0 R>>>>"
        page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources %s>>"
        objects += [page % (len(objects) + 2, resources), content]
    result, offsets = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n", list[int]()
    for number, body in enumerate(objects, start=1):
        offsets.append(len(result))
        result += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    table += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer\n<</Size %d /Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(result))
    return result + table + trailer
