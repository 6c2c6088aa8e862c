"""Text of documents: of plain text in any encoding and, with the extra `documents`, of PDF, DOCX and HTML.

The command line and the server use it, and the page writes the same text before a question. So a document that one of
them has read is in the prefix cache for the others, too.

    python -m nanovllm.entrypoints.documents NAME <FILE

prints the text of one document. The server starts this program for each document: reading a PDF takes seconds of pure
Python, during which the engine should run, and a hostile file must not take more than its own process.
"""

import codecs
import os
import re
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.errors import RequestError, install_command

MAX_DOCX_BYTES = 2**28  # of an unpacked DOCX file, which is a compressed archive
MAX_PROGRAM_BYTES = 8 * 2**30  # address space of the program
MAX_PROGRAM_S = 300
_REFUSED = 2  # exit status
_BOMS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
)
_BOMS += ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# Control characters that no text has, and characters that do not exist. Backspace, tabs, ends of lines and pages, and
# escapes of colours may be in text.
_NOT_IN_TEXT = re.compile("[\0-\x07\x0e-\x19\x1c-\x1f\x7f-\x9f\ufffe\uffff\ue000-\uf8ff]")

# Encodings that are guessed; if several fit equally well, the first is taken
_ENCODINGS: tuple[str, ...] = (
    "cp1252",
    "cp1250",
    "iso8859_2",
    "cp1251",
    "koi8_r",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
    "shift_jis",
)
_ENCODINGS += ("euc_jp", "gb18030", "big5", "euc_kr")


class Document(NamedTuple):
    name: str
    text: str


def read_document(path: Path) -> Document:
    """Read a file. Raises RequestError if the file cannot be read or has no text."""
    if str(path) == "-":
        raise RequestError("document -: give a file; stdin is for --prompt-file")
    try:
        path = path.expanduser()
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:  # the home of an unknown user; a byte that no path can have
        raise RequestError(f"{str(path)!r} is not a path: {error}") from error
    return Document(path.name, document_text(path.name, content))


def before_question(documents: Sequence[Document], question: str) -> str:
    """Return the message with the documents first, so that other questions about the same documents find them in the
    prefix cache. The page makes the same text (page/documents.js).
    """
    parts = [f'Document "{name}":\n\n{text}\n\nEnd of the document.\n\n' for name, text in documents]
    return "".join([*parts, question])


def document_text(name: str, content: bytes) -> str:
    """Return the text of a file. Its content says whether it is a PDF, a DOCX or an HTML file, and its name only if the
    content does not.

    Raises RequestError for a file without text, for one that cannot be read, and if the package for its type is
    missing.
    """
    suffix = Path(name).suffix.lower()
    is_pdf = content.lstrip()[:5] == b"%PDF-"
    if is_pdf:
        text = _read(name, "PDF", _pdf_text, content)
    elif content[:4] == b"PK\3\4":
        text = _read(name, "DOCX", _docx_text, content)
    else:
        text = decode_text(name, content)
        start = text[:1000].lstrip("\ufeff \t\r\n").lower()
        if suffix in (".html", ".htm", ".xhtml") or start.startswith(("<!doctype html", "<html")):
            text = _read(name, "HTML", _html_text, text)
    if not text.strip():
        remedy = "; its pages may be pictures: run OCR over it first" if is_pdf else ""
        raise RequestError(f"{name} has no text{remedy}")
    return text


def decode_text(name: str, content: bytes) -> str:
    """Return plain text: UTF-8, an encoding with a byte order mark, or the most likely encoding, such as Latin-1.

    Raises RequestError for bytes that are not text.
    """
    if encoding := next((encoding for mark, encoding in _BOMS if content.startswith(mark)), None):
        candidates = [encoding]
    elif b"\0" in content:
        candidates = ["utf-16-le", "utf-16-be"]
    else:
        candidates = ["utf-8"]
    if candidates == ["utf-8"] and not _is_utf8(content):
        from charset_normalizer import from_bytes

        matches = from_bytes(content, cp_isolation=list(_ENCODINGS))
        candidates = [match.encoding for match in sorted(matches, key=_how_unlikely)]
    texts = []
    for encoding in candidates:
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            texts += [] if _NOT_IN_TEXT.search(text) else [text]
    if not texts:
        raise RequestError(f"{name} is not text; documents are plain text, PDF, DOCX and HTML")
    return texts[0] if b"\0" not in content else max(texts, key=lambda text: text.count(" "))


def _how_unlikely(match: Any) -> tuple[float, float, int]:
    return match.chaos, -match.coherence, _ENCODINGS.index(match.encoding)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
        return True
    except UnicodeDecodeError:
        return False


def _read(name: str, kind: str, read: Callable[[Any], str], content: bytes | str) -> str:
    try:
        return read(content)
    except ImportError as error:
        raise RequestError(f"{name} is a {kind} file, and reading it needs {error.name}; {_install()}") from error
    except RequestError as error:
        raise RequestError(f"{name} {error}") from error
    except Exception as error:  # the packages raise many kinds for damaged files
        raise RequestError(f"{name} is damaged, or not a {kind} file: {error or type(error).__name__}") from error


def _install() -> str:
    return f"run: {install_command('documents')}"


def _pdf_text(content: bytes) -> str:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise RequestError("is encrypted; remove its password first")
    return "\n\n".join(page.extract_text() for page in reader.pages)


def _docx_text(content: bytes) -> str:
    with zipfile.ZipFile(BytesIO(content)) as archive:
        if "word/document.xml" not in archive.namelist():
            raise RequestError("is an archive, and not a DOCX file; documents are plain text, PDF, DOCX and HTML")
        if sum(each.file_size for each in archive.infolist()) > MAX_DOCX_BYTES:
            raise RequestError(f"takes more than {MAX_DOCX_BYTES:,} bytes unpacked; split it")
    from docx import Document as read_docx
    from docx.table import Table

    parts = []
    for block in read_docx(BytesIO(content)).iter_inner_content():
        if isinstance(block, Table):
            parts.append("\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in block.rows))
        else:
            parts.append(block.text)
    return "\n\n".join(part for part in parts if part.strip())


def _html_text(text: str) -> str:
    from inscriptis import get_text

    result: str = get_text(text)
    return result


# -- in another process ------------------------------------------------------------------------------------------------


def text_by_program(name: str, content: bytes, most_chars: int) -> str:
    """Return the document's text, as `document_text` does, but read it in another process.

    Raises RequestError also for a text of more than `most_chars` characters.
    """
    command = [sys.executable, "-m", __name__, name.replace("\0", "") or "document"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, input=content, capture_output=True, env=environment, timeout=MAX_PROGRAM_S)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"{name} takes more than {MAX_PROGRAM_S} seconds to read; split it") from error
    if done.returncode == _REFUSED:
        raise RequestError(done.stderr.decode(errors="replace").strip())
    if done.returncode:
        raise RequestError(f"{name} cannot be read: the program that reads it ended with status {done.returncode}")
    text = done.stdout.decode()
    if len(text) > most_chars:
        raise RequestError(f"{name} has {len(text):,} characters, at most {most_chars:,} are allowed; split it")
    return text


def main() -> int:
    """Print the text of the document on stdin in UTF-8. Exit status 2, with the reason on stderr, if it is refused."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_PROGRAM_BYTES, MAX_PROGRAM_BYTES))
    try:
        text = document_text(sys.argv[1], sys.stdin.buffer.read())
    except RequestError as error:
        sys.stderr.buffer.write(str(error).encode("utf-8", "replace"))
        return _REFUSED
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
