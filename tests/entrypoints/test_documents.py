"""Documents: the text of every type and encoding, and errors that say what to do."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pdf_files import pdf, scanned_pdf

from nanovllm.entrypoints.documents import (
    Document,
    before_question,
    decode_text,
    document_text,
    read_document,
    text_by_program,
)
from nanovllm.errors import RequestError

GERMAN = "Der Käse für Frau Müller hat eine Größe von fünf Zoll. Übermorgen öffnet das Geschäft früh."
FRENCH = "L’élève étudiait à Orléans, où sa mère était née ; c’était l’été."
RUSSIAN = "Капитан корабля стоял на мостике и смотрел на море, которое было спокойным."


def test_plain_text_in_any_encoding_is_read() -> None:
    """Regression: old public-domain books, which are in Latin-1, were "not UTF-8 text"."""
    cases = (
        (GERMAN, ("utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-32")),
        (FRENCH, ("utf-8", "cp1252", "utf-16")),
        (RUSSIAN, ("utf-8", "cp1251", "koi8-r", "utf-16-le", "utf-16-be")),
    )
    for text, encodings in cases:
        for encoding in encodings:
            for content in (text, text * 40):
                assert decode_text("book.txt", content.encode(encoding)) == content, encoding


def test_what_is_not_text_is_refused_by_name() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "a")
    for content in (bytes(100), b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"abc\x01", archive.getvalue()):
        with pytest.raises(RequestError, match=r"x\.bin is .*; documents are plain text, PDF, DOCX and HTML"):
            document_text("x.bin", content)
    for content in (b"", b" \n"):
        with pytest.raises(RequestError, match=r"empty\.txt has no text"):
            document_text("empty.txt", content)


def test_missing_files_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"none\.txt: No such file"):
        read_document(tmp_path / "none.txt")
    for package in ("pypdf", "inscriptis"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, content in (("a.pdf", pdf("a")), ("a.html", b"<p>a</p>")):
        with pytest.raises(RequestError, match=rf"{name} is a \w+ file, and reading it needs .*\.\[documents\]"):
            document_text(name, content)


def test_pdf_is_read_or_the_reason_is_said() -> None:
    pytest.importorskip("pypdf")
    assert document_text("notes.pdf", pdf("The captain\nis Haddock.", "He (b. 1941)")) == (
        "The captain\nis Haddock.\n\nHe (b. 1941)"
    )
    for name in ("scan.pdf", "scan"):
        with pytest.raises(RequestError, match=r"scan.* has no text; its pages may be pictures: run OCR over it first"):
            document_text(name, scanned_pdf(2))
    with pytest.raises(RequestError, match=r"bad\.pdf is damaged, or not a PDF file"):
        document_text("bad.pdf", b"%PDF-1.4 cut")


def test_docx_is_read_with_its_tables_in_order() -> None:
    docx = pytest.importorskip("docx")
    written, content = docx.Document(), io.BytesIO()
    written.add_paragraph("The crew:")
    table = written.add_table(rows=1, cols=2)
    table.cell(0, 0).text, table.cell(0, 1).text = "captain", "Haddock"
    written.add_paragraph("That is all.")
    written.save(content)
    assert document_text("crew.docx", content.getvalue()) == "The crew:\n\ncaptain | Haddock\n\nThat is all."


def test_html_is_read_without_tags_and_scripts() -> None:
    pytest.importorskip("inscriptis")
    head = "<!DOCTYPE html><html><head><script>x()</script></head>"
    page = f"{head}<body><h1>Crew</h1><p>The <b>captain</b> is K&auml;pt&rsquo;n.</p></body></html>"
    for name in ("page.html", "page"):
        text = document_text(name, page.encode())
        assert "The captain is Käpt’n." in text and "x()" not in text and "<" not in text


def test_program_reads_a_document_and_gives_its_reason() -> None:
    assert text_by_program("book.txt", GERMAN.encode("latin-1"), len(GERMAN)) == GERMAN
    with pytest.raises(RequestError, match=r"book\.txt has 91 characters, at most 90 are allowed; split it"):
        text_by_program("book.txt", GERMAN.encode("latin-1"), 90)
    with pytest.raises(RequestError, match=r"^Büro\.txt is not text; documents"):
        text_by_program("Büro.txt", bytes(9), 10)
    # the program loads no torch, which takes seconds
    code = "import sys, nanovllm.entrypoints.documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_documents_come_before_the_question_as_on_the_page() -> None:
    script = Path(__file__).parents[2] / "nanovllm/entrypoints/server/page/documents.js"
    text = before_question([Document("a.txt", "A"), Document("b", "B")], "Who?")
    assert text == (
        'Document "a.txt":\n\nA\n\nEnd of the document.\n\nDocument "b":\n\nB\n\nEnd of the document.\n\nWho?'
    )
    form = 'Document "${name}":\\n\\n${text}\\n\\nEnd of the document.\\n\\n'
    assert form in script.read_text()
