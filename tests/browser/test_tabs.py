"""The page in two tabs of one browser. No action in one tab loses what was asked in the other.

A deaf tab hears no news of other tabs, as if each of its changes came just before them.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_actions import TEXT, ask, attach, attach_and_wait, documents, reload, until, wait_for_end
from page_actions import ask_and_wait as finish
from page_server import MODEL, FakeServer
from playwright.sync_api import Browser, BrowserContext, Page, expect

pytestmark = pytest.mark.browser

DEAF = "Object.defineProperty(BroadcastChannel.prototype, 'onmessage', { set() {} });"
SAID = "You said: {} <b>so</b> & so."
OpenTab = Callable[..., Page]


@pytest.fixture
def open_tab(server: FakeServer, browser: Browser) -> Iterator[OpenTab]:
    context: BrowserContext = browser.new_context()
    errors: list[Any] = []

    def open_tab(is_deaf: bool = False) -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(error))
        if is_deaf:
            page.add_init_script(DEAF)
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text(MODEL)
        return page

    yield open_tab
    context.close()
    assert not errors


def turns(page: Page) -> Any:
    return page.locator(".turn .text")


# -- what both have asked ----------------------------------------------------------------------------------------------


def test_questions_of_two_tabs_in_one_chat_are_all_kept(server: FakeServer, open_tab: OpenTab) -> None:
    """Regression: the last tab that saved wrote its whole conversation, and what the other had asked was gone."""
    first = open_tab()
    finish(first, "one")
    second = open_tab(is_deaf=True)
    finish(first, "two")
    expect(turns(second)).to_have_text(["one", SAID.format("one")])
    finish(second, "three")
    every = [text for question in ("one", "two", "three") for text in (question, SAID.format(question))]
    for page in (first, second):  # the first one too, without a reload
        expect(turns(page)).to_have_text(every)
    reload(second)
    expect(turns(second)).to_have_text(every)
    contents = [message["content"] for message in server.bodies[-1]["messages"]]
    assert contents[::2] == ["one", "two", "three"]  # the model is told of all


def test_answer_of_another_tab_is_shown_as_it_grows(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    finish(first, "one")
    second = open_tab()
    server.may_go_on.clear()
    ask(first, "a b c d e f g h i j k l m n")
    figures = second.locator(".answer .figures").last
    expect(turns(second)).to_have_count(4)
    expect(figures).to_have_text("being answered in another tab")
    expect(second.get_by_role("img", name="Answering")).to_be_visible()
    expect(second.locator(".answer").last.get_by_role("button", name="Retry")).to_have_count(0)
    third = open_tab()  # one that was not there when the answer began
    expect(third.locator(".answer .figures").last).to_have_text("being answered in another tab")
    finish(second, "two")  # both at once: the other one stands still
    server.may_go_on.set()
    wait_for_end(first)
    for page in (first, second, third):
        expect(turns(page).nth(3)).to_contain_text("l m n <b>so</b> & so.")
        expect(turns(page).nth(5)).to_have_text(SAID.format("two"))
        expect(page.get_by_role("img", name="Answering")).to_have_count(0)
    assert [message["content"] for message in server.bodies[2]["messages"]][-1] == "two"


def test_tab_that_is_closed_leaves_an_answer_to_continue(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    finish(first, "one")
    second = open_tab()
    server.may_go_on.clear()
    ask(first, "a b c d e f g h i j k l m n")
    expect(second.locator(".answer .figures").last).to_have_text("being answered in another tab")
    expect(turns(second).last).to_contain_text("You said: a b c")
    first.close(run_before_unload=True)
    expect(second.locator(".answer .figures").last).to_have_text("interrupted")
    expect(second.get_by_role("button", name="Continue")).to_be_visible()
    server.may_go_on.set()


def test_edit_in_a_tab_keeps_what_it_has_not_seen_in_a_branch(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    finish(first, "one")
    second = open_tab(is_deaf=True)
    finish(first, "two")
    second.get_by_role("button", name="Edit").click()
    finish(second, "three")
    for page in (first, second):
        expect(turns(page)).to_have_text(["three", SAID.format("three")])
    second.get_by_role("button", name="Previous version").click()
    for page in (first, second):
        expect(turns(page)).to_have_text(["one", SAID.format("one"), "two", SAID.format("two")])


def test_question_that_is_edited_in_another_tab_is_still_answered(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    finish(first, "one")
    server.may_go_on.clear()
    ask(first, "a b c d e f g h i j k l m n")
    expect(turns(first).last).to_contain_text("a b c")
    second = open_tab()
    expect(turns(second)).to_have_count(4)
    second.get_by_role("button", name="Edit").first.click()
    finish(second, "two")
    expect(turns(first)).to_have_text(["two", SAID.format("two")])
    expect(first.locator("#stop")).to_be_visible()
    server.may_go_on.set()
    wait_for_end(first)
    first.get_by_role("button", name="Previous version").click()
    for page in (first, second):
        expect(turns(page).nth(3)).to_contain_text("l m n <b>so</b> & so.")
    finish(second, "three")
    assert [each["content"] for each in server.bodies[-1]["messages"][::2]][-1] == "three"
    expect(turns(first)).to_have_count(6)


def test_answer_to_a_branch_that_another_tab_has_left_is_shown_there(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    finish(first, "one")
    deaf = open_tab(is_deaf=True)
    first.get_by_role("button", name="Edit").click()
    finish(first, "two")
    finish(deaf, "three")
    every = [text for question in ("one", "three") for text in (question, SAID.format(question))]
    for page in (first, deaf):
        expect(turns(page)).to_have_text(every)
    assert [each["content"] for each in server.bodies[-1]["messages"][::2]] == ["one", "three"]
    first.get_by_role("button", name="Next version").click()
    expect(turns(first)).to_have_text(["two", SAID.format("two")])


# -- what is deleted ---------------------------------------------------------------------------------------------------


def delete(page: Page) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()


def test_deleted_chat_does_not_come_back(server: FakeServer, open_tab: OpenTab) -> None:
    first, titles = open_tab(), "#chats .chat-name"
    finish(first, "one")
    hearing, deaf = open_tab(), open_tab(is_deaf=True)
    delete(first)
    expect(first.locator(titles)).to_have_count(0)
    expect(hearing.get_by_role("alert")).to_have_text("This chat was deleted in another tab.")
    expect(turns(hearing)).to_have_count(0)
    attach(deaf)
    expect(deaf.get_by_role("alert")).to_have_text("This chat was deleted in another tab.")
    finish(hearing, "two")
    for page in (first, deaf):
        reload(page)
        expect(page.locator(titles)).to_have_text(["two"])


def test_question_in_a_deleted_chat_is_given_back(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    finish(first, "one")
    second = open_tab(is_deaf=True)
    delete(first)
    expect(first.locator(".turn")).to_have_count(0)
    ask(second, "two")
    expect(second.get_by_role("alert")).to_have_text("This chat was deleted in another tab.")
    expect(second.get_by_label("Message", exact=True)).to_have_value("two")
    second.keyboard.press("Enter")
    expect(turns(second)).to_have_text(["two", SAID.format("two")])
    expect(second.locator("#chats .chat-name")).to_have_text(["two"])


def test_chat_deleted_in_another_tab_ends_its_answer(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    ask(first, "go on")
    expect(turns(first).last).to_contain_text("on on")
    second = open_tab()
    expect(turns(second)).to_have_count(2)
    delete(second)
    wait_for_end(first)
    expect(first.locator(".turn")).to_have_count(0)
    for page in (first, second):
        reload(page)
        expect(page.locator("#chats .chat-name")).to_have_count(0)


# -- documents and settings --------------------------------------------------------------------------------------------


def test_documents_of_two_tabs_are_all_kept(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    attach_and_wait(first, "a.txt")
    expect(first.locator("#chats .chat-name")).to_have_count(1)
    deaf, hearing = open_tab(is_deaf=True), open_tab()
    attach_and_wait(first, "b.txt")
    expect(documents(hearing)).to_have_count(2)
    expect(documents(deaf)).to_have_count(1)
    deaf.get_by_role("button", name="Remove a.txt").click()
    attach(deaf, "c.txt")
    for page in (deaf, hearing):
        expect(documents(page)).to_have_text([re.compile("b.txt.*6,300 tokens"), re.compile("c.txt.*6,300 tokens")])
    reload(deaf)
    expect(documents(deaf)).to_have_text([re.compile("b.txt"), re.compile("c.txt")])
    finish(hearing, "one")
    assert server.bodies[0]["messages"][0]["content"].count(TEXT) == 2


def test_documents_of_a_new_chat_outlive_the_chat_they_come_from(server: FakeServer, open_tab: OpenTab) -> None:
    first = open_tab()
    attach_and_wait(first)
    finish(first, "one")
    second = open_tab()
    second.get_by_role("button", name="New chat").first.click()
    expect(second.locator(".turn")).to_have_count(0)
    delete(first)
    expect(first.locator(".turn")).to_have_count(0)
    finish(second, "two")
    reload(second)
    expect(documents(second)).to_have_text([re.compile("report.txt.*6,300 tokens")])


def test_question_right_after_the_last_document_was_removed_is_asked(server: FakeServer, open_tab: OpenTab) -> None:
    """Regression: the empty chat was taken from the store, and the question came to a chat that seemed deleted."""
    page = open_tab()
    attach_and_wait(page)
    page.evaluate(
        """() => {
            document.querySelector("#documents [aria-label^=Remove]").click();
            document.getElementById("question").value = "one";
            document.getElementById("composer").requestSubmit();
        }"""
    )
    expect(turns(page)).to_have_text(["one", SAID.format("one")])
    wait_for_end(page)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one"}]
    reload(page)
    expect(turns(page)).to_have_text(["one", SAID.format("one")])
    expect(documents(page)).to_have_count(0)


def test_question_before_the_removed_document_was_kept_is_asked(server: FakeServer, open_tab: OpenTab) -> None:
    """Regression: the record with the document, whose text had to be read once more, was shown after newer records, and
    the question was gone.
    """
    page = open_tab()
    page.evaluate(
        """(text) => {
            const question = document.getElementById("question"), clipboardData = new DataTransfer();
            clipboardData.setData("text/plain", text);
            question.dispatchEvent(new ClipboardEvent("paste", { clipboardData, cancelable: true }));
            document.querySelector("#documents [aria-label^=Remove]").click();
            question.value = "one";
            document.getElementById("composer").requestSubmit();
        }""",
        TEXT,
    )
    expect(turns(page)).to_have_text(["one", SAID.format("one")])
    wait_for_end(page)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one"}]
    expect(documents(page)).to_have_count(0)


def shown_settings(page: Page) -> list[str]:
    """The dialog has the settings of the moment when it was opened."""
    page.get_by_role("button", name="Settings").click()
    values = [page.get_by_label(label).input_value() for label in ("Seed", "Top-p")]
    page.get_by_role("button", name="Cancel").click()
    return values


def test_settings_of_two_tabs_add_up(server: FakeServer, open_tab: OpenTab) -> None:
    first, second = open_tab(), open_tab()
    for page in (first, second):
        page.get_by_role("button", name="Settings").click()
    for page, label in ((first, "Seed"), (second, "Top-p")):
        page.get_by_label(label).fill("1")
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
    for page in (first, second):
        until(page, lambda page=page: shown_settings(page) == ["1", "1"])
        finish(page, "one")
        assert (server.bodies[-1]["seed"], server.bodies[-1]["top_p"]) == (1, 1)
