"""The page in front of `nanovllm serve` with the built-in model, whose cache does not fit in its slots, and with a real
model.
"""

import io
import os
import random
import re
import struct
import subprocess
import sys
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from docx import Document
from page_actions import reload
from page_server import OpenPage
from pdf_files import pdf, scanned_pdf
from playwright.sync_api import Page, expect
from ports import reserved_port
from smollm2 import gguf_directory
from waiting import LIMIT_S, wait_until

from nanovllm.entrypoints.haystack import build_example

pytestmark = pytest.mark.browser

OPTIONS = (
    "--model demo --device cpu --enable-cpu-offload --num-gpu-blocks 4 --kvcache-block-size 256 --num-cpu-blocks 60 "
    "--max-model-len 16384 --speculation off"
)
ANSWERS = {
    "Where did the old keeper hide the spare key?": "Beneath a loose flagstone, wrapped in oilcloth.",
    "Which ship did the lifeboat save in the great gale?": "The barque Halcyon of Bergen, with all nineteen hands.",
    "How many steps does the tower have?": "Exactly 268; I counted them twice.",
}
ANSWER_LIMIT_MS = 240_000
PICTURE_SIZE = {"width": 1080, "height": 640}
ROOT = Path(__file__).parents[2]
LINES = [f"{number:x}" for number in random.Random(0).sample(range(2**40), 300)]
DOCUMENT = "\n".join([*LINES[:100], "The passkey is q7m2x9kd.", *LINES[100:]])  # 3,300 tokens


@contextmanager
def serve(options: str) -> Iterator[str]:
    with reserved_port() as port:
        address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "nanovllm", "serve", "--port", str(port), *options.split()]
        server = subprocess.Popen(command, env=os.environ | {"NANOVLLM_API_KEY": "s3cret", "OMP_NUM_THREADS": "1"})
        try:
            wait_until(lambda: server.poll() is not None or is_healthy(address))
            assert server.poll() is None, "the server has not started"
            yield address
        finally:
            server.terminate()
            assert server.wait(LIMIT_S) is not None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(OPTIONS) as address:
        yield address


def is_healthy(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{address}/health"):
        return True
    return False


def test_document_is_read_once_and_its_cache_is_shown(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.get_by_role("textbox", name="Key").fill("s3cret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("demo")
    page.evaluate(NOTE_STATES)
    page.set_input_files("#file", {"name": "keys.txt", "mimeType": "text/plain", "buffer": DOCUMENT.encode()})

    expect(page.locator("#documents")).to_contain_text("3,3")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill("16384")  # the whole context, which leaves no room for the prompt
    page.keyboard.press("Enter")
    page.locator("#cache > summary").click()
    first, second = ask(page, "The passkey is"), ask(page, "The passkey")
    assert first[0] == "q7m2x9kd." and second[0] == "is q7m2x9kd."
    assert ", 0 of them cached" in first[1]
    num_prompt, num_cached = prompt_tokens(second[1])
    assert num_cached > 3072 and num_cached > 0.9 * num_prompt

    expect(page.locator("#requests")).to_have_text("0 running")
    expect(page.locator("[data-state=resident] .count")).to_have_text("3")  # the newest block held no whole grain
    assert number(page.locator("[data-state=cached] .count").inner_text()) >= 3072 // 256 - 4
    assert "GPU" not in page.locator("#side").inner_text()  # there is none
    seen: set[str] = set()
    while not ("written" in seen and seen & {"streamed", "cpu_attended"}):  # a snapshot may miss a short answer
        ask(page, "The passkey")
        seen |= set(page.evaluate("[...window.seenStates]"))


def test_pdf_of_several_pages_is_read_and_asked_about(url: str, open_page: OpenPage) -> None:
    """The server gets the text of all pages, in their order, and of a DOCX file. A scan has no text, and the page says
    what to do.
    """
    page = open_page(url)
    page.get_by_role("textbox", name="Key").fill("s3cret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("demo")
    bodies = list[dict[str, object]]()
    path = "/v1/chat/completions"
    page.on("request", lambda request: bodies.append(request.post_data_json) if path in request.url else None)
    pages = ["\n".join(LINES[:40]), "The passkey is q7m2x9kd.\n" + "\n".join(LINES[40:80]), "Owner (sole): J. Müller"]
    docx, letter = io.BytesIO(), Document()
    letter.add_paragraph("Dear Sir,")
    letter.save(docx)
    files = {"report.pdf": pdf(*pages), "scan.pdf": scanned_pdf(3), "letter.docx": docx.getvalue()}
    page.set_input_files("#file", [{"name": n, "mimeType": "", "buffer": content} for n, content in files.items()])
    alert = "scan.pdf has no text; its pages may be pictures: run OCR over it first."
    expect(page.get_by_role("alert")).to_have_text(alert)
    listed = [re.compile(rf"{name}.*[\d,]+ tokens") for name in ("report.pdf", "letter.docx")]
    expect(page.locator("#documents > li")).to_have_text(listed)
    assert ask(page, "The passkey is")[0] == "q7m2x9kd."
    texts = {"report.pdf": "\n\n".join(pages), "letter.docx": "Dear Sir,"}
    parts = [f'Document "{name}":\n\n{text}\n\nEnd of the document.\n\n' for name, text in texts.items()]
    assert bodies[-1]["messages"] == [{"role": "user", "content": "".join(parts) + "The passkey is"}]


def test_example_is_read_once_and_answered_rightly(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.get_by_role("textbox", name="Key").fill("s3cret")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Try it: a long document").click()
    expect(page.locator("#documents")).to_contain_text("tokens · not read yet")
    expect(page.locator(".suggestion").first).to_be_focused()
    shares = []
    for question, answer in ANSWERS.items():
        page.get_by_role("button", name=question).click()
        expect(page.locator(".answer .text").last).to_have_text(answer, timeout=ANSWER_LIMIT_MS)
        expect(page.locator("#send")).to_be_visible()
        num_prompt, num_cached = prompt_tokens(page.locator(".answer .figures").last.text_content())
        shares.append(num_cached / num_prompt)
    assert shares[0] < 0.1 and min(shares[1:]) > 0.9
    expect(page.locator("#suggestions")).to_be_hidden()
    expect(page.locator("#documents")).to_contain_text("in the cache")
    reload(page)  # it asks which blocks hold the document
    expect(page.locator("#documents")).to_contain_text(re.compile(r"tokens · (\d+% )?in the cache"))
    expect(page.locator(".answer .text")).to_have_text(list(ANSWERS.values()))


def test_real_model_answers_in_a_conversation(open_page: OpenPage) -> None:
    with serve(f"--model {gguf_directory()} --device cpu --max-model-len 2048 --num-kvcache-blocks 16") as address:
        page = open_page(address)
        page.get_by_role("textbox", name="Key").fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("smollm2")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.keyboard.press("Enter")
        assert ask(page, "What is the capital of France?")[0] == "The capital of France is Paris."
        assert "Italy" in ask(page, "And of Italy?")[0]  # it knows what "of Italy" refers to


def test_picture_in_readme_shows_the_page(open_page: OpenPage) -> None:
    """Fonts and times differ between machines, so only the size and the words around the chat are compared."""
    example = build_example(20_000)
    assert example is not None
    options = "--device cpu --max-model-len 8192 --num-kvcache-blocks 32 --served-model-name SmolLM2-135M-Instruct"
    with serve(f"--model {gguf_directory()} {options}") as address:
        page = open_page(address, viewport=PICTURE_SIZE, device_scale_factor=1.5)
        page.get_by_role("textbox", name="Key").fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("SmolLM2")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Longest answer").fill("40")
        page.keyboard.press("Enter")
        page.set_input_files("#file", {"name": example.name, "mimeType": "text/plain", "buffer": example.text.encode()})
        expect(page.locator("#documents")).to_contain_text("tokens")
        assert "268" in ask(page, "How many steps does the tower have?")[0]
        ask(page, "Did he count them twice?")
        expect(page.locator("#speed")).to_have_text(re.compile(r"First answer: [\d.]+ s\. Now: [\d.]+ s\."))
        expect(page.locator("#documents")).to_contain_text("in the cache")
        shown = page.locator(".turn, #speed, .document, .chat-name, #cache-summary")
        expect(shown).to_have_count(8)
        is_kept = "NANOVLLM_KEEP_PICTURES" in os.environ
        for part in shown.all():
            expect(part).to_be_visible()
            if is_kept:
                expect(part).to_be_in_viewport(ratio=1)
        labels = page.locator("h1, h2, .chat-name, .hint, :is(header, #side, #composer) button").filter(visible=True)
        words = "\n".join(labels.all_inner_texts())
        for name, scheme in (("page.png", "light"), ("page-dark.png", "dark")):
            page.emulate_media(color_scheme=scheme)
            made, kept = with_comment(page.screenshot(), words), ROOT / "docs" / name
            if is_kept:
                kept.write_bytes(made)
            assert f'"docs/{name}"' in (ROOT / "README.md").read_text() and kept.stat().st_size < 200_000
            assert size_and_comment(kept.read_bytes()) == size_and_comment(made), "page has changed; run `make picture`"


# Notes every state that a block was shown in.
NOTE_STATES = """() => {
    window.seenStates = new Set();
    new MutationObserver(() => {
        const rows = [...document.querySelectorAll("#legend li")];
        const shown = rows.filter(row => row.querySelector(".count").textContent !== "0");
        shown.forEach(row => window.seenStates.add(row.dataset.state));
    }).observe(document.getElementById("legend"), { subtree: true, childList: true });
}"""


def ask(page: Page, question: str) -> tuple[str, str]:
    """The answer and the figures below it."""
    page.get_by_role("textbox", name="Message").fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").last
    expect(answer.locator(".figures")).to_contain_text("prompt tokens", timeout=ANSWER_LIMIT_MS)
    return answer.locator(".text").evaluate("element => element.textContent"), answer.locator(".figures").text_content()


def with_comment(png: bytes, comment: str) -> bytes:
    """Put a comment after the header of a PNG."""
    data = b"tEXtComment\0" + comment.encode("ascii", "backslashreplace")
    return png[:33] + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data)) + png[33:]


def size_and_comment(png: bytes) -> tuple[int, int, str]:
    """Width, height and the comment after the header."""
    (num_bytes,) = struct.unpack(">I", png[33:37])
    return *struct.unpack(">II", png[16:24]), png[49 : 41 + num_bytes].decode()


def number(text: str) -> int:
    return int(text.replace(",", ""))


def prompt_tokens(figures: str) -> tuple[int, int]:
    """All tokens of the prompt, and those that were cached."""
    num_prompt, num_cached = re.findall(r"([\d,]+) (?:prompt|of them)", figures)
    return number(num_prompt), number(num_cached)
