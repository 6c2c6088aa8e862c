"""The chat of the page at /, in a browser: what is sent, what is shown, and what is said when something fails."""

import json
import re
from pathlib import Path

import pytest
from page_actions import (
    KEPT,
    TEXT,
    answers,
    ask,
    ask_and_wait,
    attach,
    attach_and_wait,
    documents,
    new_chat,
    reload,
    until,
    wait_for_end,
)
from page_server import MODEL, NUM_PROMPT_TOKENS, FakeServer, OpenPage
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def before(name: str, text: str) -> str:
    """The part of the prompt that a document is."""
    return f'Document "{name}":\n\n{text}\n\nEnd of the document.\n\n'


def copied(page: Page) -> str:
    return str(page.evaluate("navigator.clipboard.readText()"))


# -- messages --------------------------------------------------------------------------------------------------------


def test_answer_is_streamed_and_its_figures_follow(server: FakeServer, page: Page) -> None:
    server.may_go_on.clear()
    ask(page, "a b c d e f g h i j k l m n o p q r s t u v w x y z")
    expect(page.locator(".answer .text")).to_contain_text(" b c")
    assert " z" not in answers(page)[0]
    server.may_go_on.set()
    wait_for_end(page)
    assert answers(page)[0].endswith("x y z <b>so</b> & so.")
    summary = page.locator(".answer .figures summary")
    assert re.fullmatch(r"31 tokens at [\d.]+ tok/s", summary.inner_text())
    summary.click()
    assert re.fullmatch(
        r"3,214 prompt tokens, 3,072 of them cached · first token after [\d.]+ m?s · 31 tokens at [\d.]+ tok/s",
        page.locator(".answer .figures p").inner_text(),
    )
    body = server.bodies[0]
    assert set(body) == {"messages", "stream", "stream_options"}  # all else is the model's own


def test_text_is_never_read_as_html(page: Page) -> None:
    ask_and_wait(page, "<img src=x onerror=alert(1)>")
    assert page.locator("#turns img, #turns b").count() == 0
    assert "<img src=x onerror=alert(1)> <b>so</b>" in answers(page)[0]


def test_later_questions_carry_the_history(server: FakeServer, page: Page) -> None:
    for question in ("one", "two"):
        ask_and_wait(page, question)
    assert [(m["role"], m["content"]) for m in server.bodies[1]["messages"]] == [
        ("user", "one"),
        ("assistant", "You said: one <b>so</b> & _so_."),
        ("user", "two"),
    ]
    new_chat(page)
    expect(page.get_by_role("heading", name="Ask about long documents")).to_be_visible()
    ask_and_wait(page, "three")
    assert len(server.bodies[2]["messages"]) == 1


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request_and_keeps_what_was_said(server: FakeServer, page: Page, how: str) -> None:
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("on on")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator(".answer .figures").text_content().endswith("· stopped")
    expect(page.get_by_role("alert")).to_be_hidden()
    ask_and_wait(page, "again")
    until(page, lambda: server.num_abandoned == 1)
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]


# -- documents -------------------------------------------------------------------------------------------------------


def test_dropped_files_come_before_the_conversation(server: FakeServer, page: Page) -> None:
    transfer = page.evaluate_handle(
        """text => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([text], "report.txt", { type: "text/plain" }));
            transfer.items.add(new File(["Notes."], "notes.txt", { type: "text/plain" }));
            return transfer;
        }""",
        TEXT,
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
    expect(page.locator("#drop-hint")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(documents(page)).to_have_text([re.compile("report.txt.*6,300 tokens"), re.compile("notes.txt.*6 tokens")])
    expect(page.locator("#drop-hint")).to_be_hidden()
    ask_and_wait(page, "What is the passkey?")
    new_chat(page)
    ask_and_wait(page, "And where is it?")
    first, second = (body["messages"][0]["content"] for body in server.bodies)
    start = before("report.txt", TEXT) + before("notes.txt", "Notes.")
    assert first == f"{start}What is the passkey?" and second == f"{start}And where is it?"


def test_first_screen_knows_the_documents_and_what_fits(server: FakeServer, page: Page) -> None:
    """Regression: with documents it still said "Ask about long documents", and never how long they may be."""
    server.max_model_len = 8192
    reload(page)
    room, questions = page.locator("#room"), page.locator(".suggestion")
    expect(room).to_have_text("8,192 tokens fit into a chat, documents and answers together.")
    expect(page.get_by_role("button", name="Choose a document")).to_have_class("primary")
    expect(questions).to_have_count(0)
    attach_and_wait(page)
    expect(page.get_by_role("heading", name="Ask about report.txt")).to_be_visible()
    expect(room).to_have_text("6,300 tokens. 8,192 tokens fit into a chat, documents and answers together.")
    expect(page.get_by_role("button", name="Add a document")).not_to_have_class("primary")
    expect(questions.first).to_have_text("Summarize the document.")
    attach_and_wait(page, "notes.txt", b"Notes.")
    expect(page.get_by_role("heading", name="Ask about 2 documents")).to_be_visible()
    expect(room).to_contain_text("6,306 tokens. ")
    questions.first.click()
    wait_for_end(page)
    assert server.bodies[0]["messages"][0]["content"].endswith(
        "Notes.\n\nEnd of the document.\n\nSummarize each document."
    )
    expect(questions).to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    for name in ("report.txt", "notes.txt"):
        page.get_by_role("button", name=f"Remove {name}").click()
    expect(page.get_by_role("heading", name="Ask about long documents")).to_be_visible()
    expect(questions).to_have_count(0)


def test_document_can_be_pasted_and_removed(server: FakeServer, page: Page) -> None:
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.setData("text/plain", text);
            const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
            document.getElementById("question").dispatchEvent(event);
        }""",
        TEXT,
    )
    expect(documents(page)).to_have_text([re.compile("pasted text.*6,300 tokens")])
    page.get_by_role("button", name="Remove pasted text").click()
    expect(documents(page)).to_have_count(0)
    ask_and_wait(page, "one")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one"}]


def test_change_of_documents_in_mid_chat_says_what_is_read_again(page: Page) -> None:
    note = page.locator("#documents-note")
    attach(page)
    expect(documents(page)).to_have_text([re.compile("not read yet")])
    ask_and_wait(page, "one")
    expect(documents(page)).to_have_text([re.compile("in the cache")])
    expect(note).to_be_hidden()
    attach(page, "notes.txt")
    expect(note).to_have_text("The documents have changed. The next answer reads everything again after the change.")
    expect(documents(page)).to_have_text([re.compile("in the cache"), re.compile("not read yet")])
    page.get_by_role("button", name="Remove report.txt").click()
    expect(note).to_have_text("The documents have changed. The next answer reads everything again.")
    ask_and_wait(page, "two")
    expect(note).to_be_hidden()
    expect(documents(page)).to_have_text([re.compile("notes.txt.*in the cache")])


@pytest.mark.parametrize("num_lines", [300, 30_000])  # of which the second is longer than the server counts
def test_document_that_is_too_long_can_be_shortened(server: FakeServer, page: Page, num_lines: int) -> None:
    server.max_model_len = 4096
    reload(page)
    attach(page, content=b"The passkey is 4711.\n" * num_lines)
    words = "6,300 tokens" if num_lines == 300 else "about 157,500 tokens"
    expect(page.locator("#excess")).to_contain_text(f"This document has {words}; this server takes 4,096.")
    page.get_by_role("button", name="Shorten it to fit").click()
    expect(page.locator("#excess")).to_be_hidden()
    ask_and_wait(page, "one")
    text = server.bodies[0]["messages"][0]["content"].split("\n\n")[1]
    assert 3000 < len(text) <= 4096 - 512 and text.endswith("The passkey is 4711.")  # an eighth is left for the chat


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\xff\xfe", "photo.png is not a text file. Save it as plain text first."),
        (
            b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + b"\x00" * 100,
            "photo.png is not a text file. Save it as plain text first.",
        ),
        (b"PK\x03\x04" + b"some text" * 9 + b"\x00", "photo.png is not a text file. Save it as plain text first."),
        ("Привет, как дела".encode("koi8-r"), "photo.png is not a text file. Save it as plain text first."),
        (b"%PDF-1.4\n%\xe2\xe3\n1 0 obj", "photo.png is a PDF. Save it as plain text first."),
        (b"%PDF-1.4\n1 0 obj", "photo.png is a PDF. Save it as plain text first."),
        (b" \n", "photo.png is empty."),
    ],
)
def test_file_that_is_not_text_is_refused(page: Page, content: bytes, message: str) -> None:
    attach(page, "photo.png", content)
    expect(page.get_by_role("alert")).to_have_text(message)
    expect(documents(page)).to_have_count(0)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "latin-1", "cp1252"])
def test_text_in_common_encodings_is_read(server: FakeServer, page: Page, encoding: str) -> None:
    """Regression: a book in Latin-1 was "not UTF-8 text" and should first be saved as plain text, which it was."""
    text = "Grüße, ça va? Ærø.\r\n" + ("“Quoted” – 3 €\r\n" if encoding != "latin-1" else "") + "The end\x1a"
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    attach(page, content=mark + text.encode(encoding))
    expect(documents(page)).to_have_count(1)
    note = "report.txt is not in UTF-8. It was read as Western European text (Windows-1252)."
    expect(page.locator("#alert")).to_have_text(note if encoding in ("latin-1", "cp1252") else "")
    ask_and_wait(page, "one")
    assert server.bodies[0]["messages"][0]["content"] == f"{before('report.txt', text)}one"


def test_server_reads_what_is_not_plain_text(server: FakeServer, page: Page) -> None:
    server.reads_documents = True
    reload(page)
    files = (
        *(("a report.pdf", b"%PDF-1.4\n\xff"), ("page.html", b"<p>Text"), ("notes.txt", b"Notes.")),
        *(("old.htm", b"<p>Old"), ("b.zip", b"PK\0"), ("c.png", b"\x89PNG\0")),
    )
    page.set_input_files("#file", [{"name": n, "mimeType": "", "buffer": content} for n, content in files])
    alert = "b.zip cannot be read. This format is not known. c.png is a picture."
    expect(page.get_by_role("alert")).to_have_text(alert)
    expect(documents(page)).to_have_count(4)
    ask_and_wait(page, "one")
    texts = [
        ("a report.pdf", "10 bytes of a report.pdf"),
        ("page.html", "7 bytes of page.html"),
        ("notes.txt", "Notes."),
    ]
    texts.append(("old.htm", "<p>Old"))  # which the server could not read
    assert server.bodies[0]["messages"][0]["content"] == f"{''.join(before(*each) for each in texts)}one"


def test_document_can_be_read_on_the_page(page: Page) -> None:
    text = "".join(f"Line {number}.\n" for number in range(20_000))
    attach_and_wait(page, "book.txt", text.encode())
    page.get_by_role("button", name="book.txt", exact=True).click()
    dialog = page.get_by_role("dialog", name="book.txt")
    expect(dialog).to_contain_text(f"{len(text):,} tokens, {len(text):,} characters")
    shown = page.locator("#viewer-text")
    assert shown.text_content() == text[:100_000]
    dialog.get_by_role("button", name="Show more").click()
    dialog.get_by_role("button", name="Show more").click()
    expect(dialog.get_by_role("button", name="Show more")).to_be_hidden()
    assert shown.text_content() == text
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


def test_documents_are_attached_where_the_user_types(server: FakeServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 390, "height": 844}, has_touch=True)
    expect(page.locator("#model")).to_have_text(MODEL)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach documents").tap()
    chooser.value.set_files({"name": "report.txt", "mimeType": "text/plain", "buffer": TEXT.encode()})
    attached = page.locator("#attached")
    expect(attached).to_have_text("report.txt")
    attached.tap()
    expect(documents(page)).to_have_text([re.compile("report.txt.*6,300 tokens")])
    page.get_by_role("button", name="Remove report.txt").tap()
    page.keyboard.press("Escape")
    expect(attached).to_be_hidden()


def test_refused_files_are_named_though_others_are_taken(page: Page) -> None:
    """Regression: the message about a file went when the next one was added."""
    names = ("photo.png", b"\0"), ("notes.txt", b"Notes."), ("empty.txt", b"")
    page.set_input_files("#file", [{"name": n, "mimeType": "text/plain", "buffer": content} for n, content in names])
    alert = "photo.png is not a text file. Save it as plain text first. empty.txt is empty."
    expect(page.get_by_role("alert")).to_have_text(alert)
    expect(documents(page)).to_have_text([re.compile("notes.txt")])


def test_nothing_is_sent_while_a_document_is_too_long(server: FakeServer, page: Page) -> None:
    """Regression: the question was sent, a second message said that it was too long, and a chat bore its name."""
    server.max_model_len = 4096
    reload(page)
    attach(page)
    expect(page.locator("#excess")).to_be_visible()
    expect(page.locator("#send")).to_be_disabled()
    ask(page, "Where is it?")
    page.locator("#composer").evaluate("form => form.requestSubmit()")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Where is it?")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#chats .chat-name")).to_have_text(["New chat"])
    assert not server.bodies
    page.get_by_role("button", name="Remove report.txt").click()
    expect(page.locator("#send")).to_be_enabled()


def test_prompt_that_the_server_finds_too_long_is_explained(server: FakeServer, page: Page) -> None:
    """Regression: it said "Messages has 140225 characters", and to shorten a document where there was none."""
    server.max_model_len = 9000
    reload(page)
    alert = page.get_by_role("alert")
    ask(page, "be too long")
    takes = "this server takes 9,000 tokens, with the answer"
    expect(alert).to_have_text(f"The conversation is too long; {takes}. Begin a new chat.")
    expect(page.locator("#chats .chat-name")).to_have_count(0)
    page.get_by_label("Message", exact=True).fill("")
    attach_and_wait(page)
    ask(page, "be too long")
    both = f"Documents and conversation are too long; {takes}. Shorten a document or begin a new chat."
    expect(alert).to_have_text(both)
    expect(page.locator("#chats .chat-name")).to_have_text(["New chat"])
    server.max_model_len = 4096
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    attach(page, "notes.txt", TEXT.encode())
    expect(page.locator("#excess")).to_be_visible()
    expect(alert).to_be_hidden()  # the notice says more


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_progress_of_the_prompt_is_a_bar_with_the_time_left(server: FakeServer, page: Page) -> None:
    server.has_progress = True
    reload(page)
    server.may_go_on.clear()
    ask(page, "one")
    bar = page.get_by_role("progressbar")
    expect(bar).to_have_attribute("aria-valuenow", "40")
    expect(page.locator(".reading")).to_have_text("Reading: 18,000 of 45,000 tokens, 24 s left")
    server.may_go_on.set()
    wait_for_end(page)
    expect(bar).to_have_count(0)
    assert server.bodies[0]["return_progress"] is True


def test_markdown_becomes_elements_and_html_stays_text(page: Page) -> None:
    ask_and_wait(page, "show markdown")
    answer = page.locator(".answer .text")
    expect(answer.locator("h4")).to_have_text("A heading")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("em")).to_have_text("slanted")
    expect(answer.locator("ul > li ol > li")).to_have_text("nested")
    expect(answer.locator("tbody td")).to_have_text(["report", "1,234"])
    expect(answer.locator("blockquote")).to_have_text("A quote.")
    links = answer.locator("a")
    expect(links).to_have_count(1)  # not the one with javascript:
    assert links.get_attribute("href") == "https://example.org/a"
    expect(answer.locator("pre")).to_contain_text('print("<b>hello</b>")')
    assert answer.locator("b").count() == 0
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy").click()
    until(page, lambda: copied(page).startswith('print("<b>hello</b>")  # a line'))


@pytest.mark.parametrize(
    ("question", "thought"), [("think", "Let me see, it is easy."), ("show markdown", "First I think.")]
)
def test_thinking_is_folded_apart_from_the_answer(page: Page, question: str, thought: str) -> None:
    ask_and_wait(page, question)
    thinking = page.locator("details.thinking")
    assert thought not in page.locator(".answer .text").inner_text()
    thinking.locator("summary").click()
    expect(thinking.locator(".markdown")).to_have_text(thought)
    expect(thinking.locator("em")).to_have_count(1)


# -- what can be done with a turn --------------------------------------------------------------------------------------


def test_answer_can_be_copied_and_asked_for_again(server: FakeServer, page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask_and_wait(page, "one")
    page.get_by_role("button", name="Copy").click()
    until(page, lambda: copied(page) == "You said: one <b>so</b> & _so_.")
    page.get_by_role("button", name="Retry").click()
    wait_for_end(page)
    assert answers(page) == ["You said: one <b>so</b> & so."]
    assert server.bodies[0] == server.bodies[1]
    ask_and_wait(page, "two")
    page.get_by_role("button", name="Retry").last.click()
    wait_for_end(page)
    assert answers(page) == ["You said: one <b>so</b> & so.", "You said: two <b>so</b> & so."]
    assert server.bodies[2] == server.bodies[3]


def test_copy_works_without_https(server: FakeServer, open_page: OpenPage) -> None:
    """Regression: "Not allowed", because browsers have no navigator.clipboard for pages of other machines over http."""
    page = open_page(server.url.replace("127.0.0.1", "page.test"))
    assert page.evaluate("navigator.clipboard") is None
    ask_and_wait(page, "one")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name=re.compile("Copied|Copy"))).to_be_focused()
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Control+V")
    expect(page.get_by_label("Message", exact=True)).to_have_value("You said: one <b>so</b> & _so_.")


def versions(page: Page) -> list[str]:
    return page.locator(".branches .muted").all_inner_texts()


def test_edited_question_begins_a_branch(server: FakeServer, page: Page) -> None:
    for question in ("one", "two", "three"):
        ask_and_wait(page, question)
    page.get_by_role("button", name="Edit").nth(1).click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("two")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.get_by_label("Message", exact=True).fill("a draft")
    page.get_by_role("button", name="Edit").nth(1).click()
    expect(page.locator(".edited")).to_contain_text("two")
    ask_and_wait(page, "four")
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft")  # regression: it was lost
    expect(page.locator(".edited")).to_have_count(0)
    assert answers(page) == ["You said: one <b>so</b> & so.", "You said: four <b>so</b> & so."]
    assert [message["content"] for message in server.bodies[3]["messages"][::2]] == ["one", "four"]
    assert versions(page) == ["2 of 2"]
    expect(page.get_by_role("button", name="Next version")).to_be_disabled()
    page.get_by_role("button", name="Previous version").click()
    expect(page.get_by_role("button", name="Next version")).to_be_focused()
    questions = page.locator(".question .text")
    expect(questions).to_have_text(["one", "two", "three"])  # nothing of them was lost
    page.get_by_role("button", name="Edit").nth(2).click()
    ask_and_wait(page, "five")  # a branch of a branch
    page.get_by_role("button", name="Edit").first.click()
    ask_and_wait(page, "six")
    expect(questions).to_have_text(["six"])
    reload(page)
    expect(questions).to_have_text(["six"])
    page.get_by_role("button", name="Previous version").click()
    expect(questions).to_have_text(["one", "two", "five"])
    assert versions(page) == ["1 of 2", "1 of 2", "2 of 2"]
    page.get_by_role("button", name="Previous version").last.click()
    expect(questions).to_have_text(["one", "two", "three"])
    page.get_by_role("button", name="Next version").nth(1).click()
    expect(questions).to_have_text(["one", "four"])
    assert len(page.evaluate(KEPT)[0]["messages"]) == 4


def test_retry_keeps_the_earlier_answer_and_what_follows_it(server: FakeServer, page: Page) -> None:
    """Regression: the answer and all that followed were lost."""
    for question in ("one", "two"):
        ask_and_wait(page, question)
    page.get_by_role("button", name="Retry").first.click()
    expect(page.locator(".answer")).to_have_count(1)
    wait_for_end(page)
    assert versions(page) == ["2 of 2"]
    page.get_by_role("button", name="Retry").click()
    wait_for_end(page)
    assert versions(page) == ["3 of 3"]
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".branches .muted")).to_have_text(["2 of 3"])
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".turn .text")).to_have_text([re.compile(text) for text in ("one", "one", "two", "two")])
    ask_and_wait(page, "three")
    assert [message["content"] for message in server.bodies[-1]["messages"][::2]] == ["one", "two", "three"]


def test_version_without_an_answer_goes_and_the_one_before_is_shown(server: FakeServer, page: Page) -> None:
    for question in ("one", "two"):
        ask_and_wait(page, question)
    turns = [re.compile(text) for text in ("one", "one", "two", "two")]
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Retry").first.click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.locator(".turn .text")).to_have_text(turns)
    page.get_by_role("button", name="Edit").first.click()
    ask(page, "three")
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.locator(".turn .text")).to_have_text(turns)
    assert versions(page) == []
    expect(page.get_by_label("Message", exact=True)).to_have_value("three")
    expect(page.locator("#editing")).to_be_visible()
    page.unroute_all()
    page.keyboard.press("Enter")
    wait_for_end(page)
    expect(page.locator(".turn .text")).to_have_text([re.compile("three")] * 2)
    assert versions(page) == ["2 of 2"]


def test_answer_that_was_stopped_is_continued_from_its_last_token(server: FakeServer, page: Page) -> None:
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("on on")
    page.keyboard.press("Escape")
    wait_for_end(page)
    said = page.evaluate(KEPT)[0]["messages"][1]["content"]
    page.get_by_role("button", name="Continue").click()
    wait_for_end(page)
    assert "".join(map(chr, server.bodies[1]["prompt"])) == f"go on{said}"
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)  # it has come to its end


# -- kept conversations ------------------------------------------------------------------------------------------------


def test_reload_keeps_chat_documents_and_settings(server: FakeServer, page: Page) -> None:
    attach_and_wait(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("7")
    page.keyboard.press("Enter")
    ask_and_wait(page, "one")
    figures = page.locator(".answer .figures").text_content()
    reload(page)
    expect(page.locator(".answer .figures")).to_have_text(figures)
    assert answers(page) == ["You said: one <b>so</b> & so."]
    expect(documents(page)).to_have_text([re.compile("report.txt.*6,300 tokens")])
    ask_and_wait(page, "two")
    first, second = server.bodies
    assert second["messages"][0] == first["messages"][0] and len(second["messages"]) == 3
    assert first["seed"] == second["seed"] == 7


def test_chats_are_listed_renamed_and_deleted(page: Page) -> None:
    attach_and_wait(page)
    chats = page.locator("#chats .chat-name")
    ask_and_wait(page, "one")
    new_chat(page)
    page.get_by_role("button", name="Remove report.txt").click()
    ask_and_wait(page, "two")
    expect(chats).to_have_text(["two", "one"])
    chats.nth(1).click()
    expect(page.locator(".question .text")).to_have_text(["one"])
    expect(page.locator("#chats [aria-current]")).to_have_text("one")
    expect(documents(page)).to_have_count(1)
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the chat").fill("About the report")
    page.keyboard.press("Enter")
    expect(chats).to_have_text(["About the report", "two"])
    expect(chats.first).to_be_focused()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(chats).to_have_text(["two"])
    expect(page.locator(".question .text")).to_have_text(["two"])
    assert page.evaluate(KEPT.replace("conversations", "documents")) == []  # it went with its chat


def test_chat_deleted_while_its_answer_comes_stays_deleted(page: Page) -> None:
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("on on")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    wait_for_end(page)
    expect(page.locator("#chats .chat-name")).to_have_count(0)
    expect(page.get_by_role("heading", name="Ask about long documents")).to_be_visible()
    assert page.evaluate(KEPT) == []


def test_chats_are_searched_and_dated(page: Page) -> None:
    page.evaluate(
        """() => new Promise(resolve => {
            indexedDB.open("nanovllm").onsuccess = ({ target }) => {
                const stores = target.result.transaction("conversations", "readwrite");
                for (let i = 0; i < 6; i += 1) {
                    const changedMs = [Date.now(), Date.UTC(2019, 4, 15)][i % 2] - i;
                    const messages = [{ role: "user", content: `Question ${i}` },
                        { role: "assistant", content: `${"A".repeat(30)} answer number ${i}.`, note: "" }];
                    stores.objectStore("conversations").put({
                        id: `${i}`, title: "", changedMs, documentIds: [], messages,
                        forks: { "message-0": [[], [{ id: "x", role: "assistant", content: `version ${i}` }]] } });
                }
                stores.oncomplete = () => { target.result.close(); resolve(); };
            };
        })"""
    )
    reload(page)
    rows, search = page.locator("#chats .chat"), page.get_by_label("Search the chats")
    expect(rows).to_have_text(
        [re.compile(rf"Question {i}\d+:\d\d [AP]M") for i in (0, 2, 4)]
        + [re.compile(rf"Question {i}May 2019") for i in (1, 3, 5)]
    )
    search.fill("number 3")
    expect(rows).to_have_text([re.compile("Question 3May 2019…A+ answer number 3.")])
    search.fill("VERSION 4")
    expect(page.locator("#chats .chat-match")).to_have_text(["version 4"])
    search.fill("question 5")
    expect(page.locator("#chats .chat-name")).to_have_text(["Question 5"])
    expect(page.locator("#chats .chat-match")).to_have_count(0)
    search.fill("nothing")
    expect(page.locator("#none-found")).to_be_visible()
    search.fill("")
    expect(rows).to_have_count(6)


@pytest.mark.parametrize("name", ["Markdown", "JSON"])
def test_chat_is_exported(page: Page, name: str) -> None:
    attach_and_wait(page)
    ask_and_wait(page, "one: <two>/three?")
    page.get_by_role("button", name="Retry").click()
    wait_for_end(page)
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("dialog", name="Export").get_by_role("button", name=name).click()
    text = Path(download.value.path()).read_text()
    said = "You said: one: <two>/three? <b>so</b> & _so_."
    if name == "Markdown":
        assert download.value.suggested_filename == "one two three.md"
        assert text == (
            "# one: <two>/three?\n\nDocuments:\n\n- report.txt\n\n## Question\n\none: <two>/three?\n\n"
            f"## Answer\n\n{said}\n"
        )
    else:
        assert download.value.suggested_filename == "one two three.json"
        record = json.loads(text)
        assert record["documents"][0]["text"] == TEXT and len(record["messages"]) == 2
        assert [each["content"] for branch in record["forks"].values() for each in branch[0]] == [said]
    expect(page.get_by_role("dialog", name="Export")).to_be_hidden()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_sent_and_checked(server: FakeServer, page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog", name="Settings")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top-p").fill("0.9")
    page.get_by_label("Longest answer").fill("12")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_role("button", name="Done").click()
    expect(dialog).to_be_hidden()
    ask_and_wait(page, "one")
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.9, 12)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and "seed" not in body
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("3")
    page.get_by_role("button", name="Done").click()
    expect(dialog).to_be_visible()  # the browser says what is wrong
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("0.5")


def test_settings_count_for_a_question_sent_at_once(server: FakeServer, page: Page) -> None:
    """They counted when the browser said that the dialog had closed, which could be after the question."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("7")
    page.evaluate(
        """() => {
            document.querySelector("#settings form").requestSubmit();
            document.getElementById("question").value = "one";
            document.getElementById("composer").requestSubmit();
        }"""
    )
    wait_for_end(page)
    assert server.bodies[0]["seed"] == 7


def test_model_without_a_chat_template_continues_plain_text(server: FakeServer, page: Page) -> None:
    server.has_template = False
    attach_and_wait(page)
    for question in ("Once upon", "a time"):
        ask_and_wait(page, question)
    assert [("prompt" in body) for body in server.bodies] == [False, True, True]
    start = before("report.txt", TEXT)
    assert server.bodies[1]["prompt"] == f"{start}Once upon"
    assert server.bodies[2]["prompt"] == f"{start}Once uponYou said: Once upon <b>so</b> & _so_.\na time"
    assert len(answers(page)) == 2


def test_send_before_the_kept_chats_are_read_keeps_the_question(server: FakeServer, open_page: OpenPage) -> None:
    """Raised "Cannot read properties of null", and nothing was sent."""
    script = """
        const { getAll } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.getAll = function () {
          IDBObjectStore.prototype.getAll = getAll;
          document.querySelector("#question").value = "early";
          document.querySelector("#send").click();
          return getAll.call(this);
        };"""
    page = open_page(server.url, script)
    expect(page.locator("#question")).to_have_value("early")
    page.locator("#question").press("Enter")
    wait_for_end(page)
    assert len(answers(page)) == 1


# -- keys and errors -------------------------------------------------------------------------------------------------


def test_api_key_is_asked_for_and_kept_in_this_tab_only(server: FakeServer, open_page: OpenPage) -> None:
    server.api_key = "s3cret"
    page = open_page(server.url)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("This server asks for an API key.")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The server does not accept this key.")
    dialog.get_by_label("Key").fill("s3cret")
    page.get_by_role("button", name="Use the key").click()
    expect(page.locator("#model")).to_have_text(MODEL)
    ask_and_wait(page, "hello")
    assert answers(page) and json.loads(page.evaluate("JSON.stringify(Object.values(sessionStorage))")) == ["s3cret"]
    assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""
    expect(page.locator("#cache-summary")).to_contain_text("room for")


def test_api_key_refused_by_the_user_is_explained(server: FakeServer, open_page: OpenPage) -> None:
    server.api_key = "s3cret"
    page = open_page(server.url)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("alert")).to_have_text("The server asks for an API key.")
    expect(page.locator("#cache-summary")).to_have_text("needs an API key")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("refuse", "Prompt of 5,000 tokens exceeds max_model_len=4096; shorten the prompt."),
        ("be busy", "The server is busy. Try again in 7 s. 100 requests are waiting."),
        ("crash", "The server has failed (status 500). The engine cannot be used: a step failed."),
    ],
)
def test_refused_question_is_explained_and_given_back(page: Page, question: str, message: str) -> None:
    ask(page, question)
    expect(page.get_by_role("alert")).to_have_text(message)
    expect(page.get_by_label("Message", exact=True)).to_have_value(question)
    assert page.locator(".turn").count() == 0
    expect(page.get_by_role("heading", name="Ask about long documents")).to_be_visible()


@pytest.mark.parametrize(
    ("question", "message"),
    [("fail", "The request failed: NaN in its logits."), ("break off", "The connection ended before the answer did.")],
)
def test_answer_that_fails_midway_is_kept_and_explained(page: Page, question: str, message: str) -> None:
    ask(page, question)
    expect(page.get_by_role("alert")).to_have_text(message)
    assert answers(page) == [f"You said: {question} <b>so</b> & so."]
    assert page.locator(".answer .figures").text_content().endswith("ended by an error")


def test_answer_that_is_cut_off_says_so(page: Page) -> None:
    ask_and_wait(page, "be long")
    assert page.locator(".answer .figures").text_content().endswith("ended at the limit of an answer")


def test_server_that_comes_back_under_another_name_answers_again(server: FakeServer, page: Page) -> None:
    """Regression: the message that it was gone stayed, and requests were for a model that did not exist any more."""
    page.route(f"{server.url}/**", lambda route: route.abort())
    ask(page, "hello")
    alert = page.get_by_role("alert")
    expect(alert).to_have_text("The server cannot be reached. Check that it is running, and try again.")
    expect(page.locator("#cache-summary")).to_have_text("no connection")
    server.model = "another/model"
    page.unroute_all()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # ask now, and not in three seconds
    expect(alert).to_be_hidden()
    expect(page.locator("#model")).to_have_text("another/model")
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert answers(page) == ["You said: hello <b>so</b> & so."]


def test_longest_answer_is_cut_to_what_fits(server: FakeServer, page: Page) -> None:
    """Regression: a server with --max-model-len 1024 refused every question, as the page asked for 1,024 tokens."""
    server.max_model_len = 1024
    reload(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill("1024")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text(MODEL)
    ask_and_wait(page, "hello")
    assert answers(page) == ["You said: hello <b>so</b> & so."]
    assert [body["max_tokens"] for body in server.bodies] == [1024, 1024 - NUM_PROMPT_TOKENS]
    server.max_model_len = NUM_PROMPT_TOKENS
    reload(page)
    ask(page, "again")
    expect(page.get_by_role("alert")).to_have_text(
        "The conversation has 81 tokens; this server takes 81 tokens, with the answer. Begin a new chat."
    )
