"""The chat of the page at /, in a browser: what is sent, what is shown, and what is said when something fails."""

import json
import re

import pytest
from page_server import MODEL, NUM_PROMPT_TOKENS, FakeServer, OpenPage
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

TEXT = "The passkey is 4711.\n" * 300


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    return page.locator(".answer .text").all_inner_texts()


def wait_for_end(page: Page) -> None:
    page.locator("#send").wait_for(state="visible")


def attach(page: Page, name: str = "report.txt", content: bytes = TEXT.encode()) -> None:
    page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": content})


# -- messages --------------------------------------------------------------------------------------------------------


def test_answer_is_streamed_and_its_figures_follow(server: FakeServer, page: Page) -> None:
    server.may_go_on.clear()
    ask(page, "a b c d e f g h i j k l m n o p q r s t u v w x y z")
    expect(page.locator(".answer .text")).to_contain_text(" b c")
    assert " z" not in answers(page)[0]
    server.may_go_on.set()
    wait_for_end(page)
    assert answers(page)[0].endswith("x y z <b>so</b> & **so**.")
    figures = page.locator(".answer .figures").inner_text()
    assert re.fullmatch(
        r"3,214 prompt tokens, 3,072 of them cached · first token after [\d.]+ m?s · 31 tokens at [\d.]+ tok/s", figures
    )
    body = server.bodies[0]
    assert body["stream"] and body["max_tokens"] == 1024 and "temperature" not in body


def test_text_is_never_read_as_html(page: Page) -> None:
    ask(page, "<img src=x onerror=alert(1)>")
    wait_for_end(page)
    assert page.locator("#turns img, #turns b").count() == 0
    assert "<img src=x onerror=alert(1)> <b>so</b>" in answers(page)[0]


def test_later_questions_carry_the_history(server: FakeServer, page: Page) -> None:
    for question in ("one", "two"):
        ask(page, question)
        wait_for_end(page)
    assert [(m["role"], m["content"]) for m in server.bodies[1]["messages"]] == [
        ("user", "one"),
        ("assistant", "You said: one <b>so</b> & **so**."),
        ("user", "two"),
    ]
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("heading", name="Ask about a long document")).to_be_visible()
    ask(page, "three")
    wait_for_end(page)
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
    assert page.locator(".answer .figures").inner_text().endswith("· stopped")
    expect(page.get_by_role("alert")).to_be_hidden()
    ask(page, "again")
    wait_for_end(page)
    assert server.num_abandoned == 1
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_new_chat_while_an_answer_comes_ends_it(server: FakeServer, page: Page) -> None:
    ask(page, "go on")
    page.locator("#stop").wait_for()
    page.get_by_role("button", name="New chat").click()
    wait_for_end(page)
    assert answers(page) == []
    ask(page, "hello")
    wait_for_end(page)
    assert len(server.bodies[1]["messages"]) == 1


# -- the document ----------------------------------------------------------------------------------------------------


def test_dropped_file_comes_before_the_conversation(server: FakeServer, page: Page) -> None:
    transfer = page.evaluate_handle(
        """text => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([text], "report.txt", { type: "text/plain" }));
            return transfer;
        }""",
        TEXT,
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
    expect(page.locator("#drop-hint")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(page.locator("#document")).to_contain_text("report.txt 6,300 characters")
    expect(page.locator("#drop-hint")).to_be_hidden()
    ask(page, "What is the passkey?")
    wait_for_end(page)
    page.get_by_role("button", name="New chat").click()
    ask(page, "And where is it?")
    wait_for_end(page)
    first, second = (body["messages"][0]["content"] for body in server.bodies)
    start = f'Document "report.txt":\n\n{TEXT}\n\nEnd of the document.\n\n'
    assert first == f"{start}What is the passkey?" and second == f"{start}And where is it?"


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
    expect(page.locator("#document")).to_contain_text("pasted text 6,300 characters")
    page.get_by_role("button", name="Remove the document").click()
    expect(page.locator("#document")).to_be_hidden()
    ask(page, "one")
    wait_for_end(page)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\xff\xfe", "photo.png is not UTF-8 text. Save it as plain text first."),
        (b" \n", "photo.png is empty."),
    ],
)
def test_file_that_is_not_text_is_refused(page: Page, content: bytes, message: str) -> None:
    attach(page, "photo.png", content)
    expect(page.get_by_role("alert")).to_have_text(message)
    expect(page.locator("#document")).to_be_hidden()


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_sent_and_checked(server: FakeServer, page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_be_focused()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Longest answer").fill("12")
    ask(page, "one")
    wait_for_end(page)
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (0.5, 12)
    page.get_by_label("Temperature").fill("3")
    ask(page, "two")
    expect(page.get_by_role("alert")).to_have_text("The temperature must be a number from 0 to 2.")
    assert len(server.bodies) == 1


def test_model_without_a_chat_template_continues_plain_text(server: FakeServer, page: Page) -> None:
    server.has_template = False
    attach(page)
    for question in ("Once upon", "a time"):
        ask(page, question)
        wait_for_end(page)
    assert [("prompt" in body) for body in server.bodies] == [False, True, True]
    start = f'Document "report.txt":\n\n{TEXT}\n\nEnd of the document.\n\n'
    assert server.bodies[1]["prompt"] == f"{start}Once upon"
    assert server.bodies[2]["prompt"] == f"{start}Once uponYou said: Once upon <b>so</b> & **so**.\na time"
    assert len(answers(page)) == 2


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
    ask(page, "hello")
    wait_for_end(page)
    assert answers(page) and json.loads(page.evaluate("JSON.stringify(Object.values(sessionStorage))")) == ["s3cret"]
    assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""
    expect(page.locator("#cache-summary")).to_contain_text("in use")


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
    expect(page.get_by_role("heading", name="Ask about a long document")).to_be_visible()


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("fail", "The request failed: NaN in its logits."),
        ("break off", "The connection ended before the answer did."),
    ],
)
def test_answer_that_fails_midway_is_kept_and_explained(page: Page, question: str, message: str) -> None:
    ask(page, question)
    expect(page.get_by_role("alert")).to_have_text(message)
    assert answers(page) == [f"You said: {question} <b>so</b> & **so**."]
    assert page.locator(".answer .figures").inner_text().endswith("ended by an error")


def test_answer_that_is_cut_off_says_so(page: Page) -> None:
    ask(page, "be long")
    wait_for_end(page)
    assert page.locator(".answer .figures").inner_text().endswith("cut off at the longest answer")


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
    assert answers(page) == ["You said: hello <b>so</b> & **so**."]


def test_longest_answer_is_cut_to_what_fits(server: FakeServer, page: Page) -> None:
    """Regression: a server with --max-model-len 1024 refused every question, as the page asked for 1,024 tokens."""
    server.max_model_len = 1024
    page.reload()
    expect(page.locator("#model")).to_have_text(MODEL)
    ask(page, "hello")
    wait_for_end(page)
    assert answers(page) == ["You said: hello <b>so</b> & **so**."]
    assert [body["max_tokens"] for body in server.bodies] == [1024, 1024 - NUM_PROMPT_TOKENS]
    server.max_model_len = NUM_PROMPT_TOKENS
    ask(page, "again")
    expect(page.get_by_role("alert")).to_contain_text("exceeds max_model_len=81; shorten the prompt")
