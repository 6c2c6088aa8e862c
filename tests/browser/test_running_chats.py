"""Several chats of the page that are answered at the same time, in a browser."""

import re
from typing import Any

import pytest
from page_actions import KEPT, answers, ask, ask_and_wait, attach, documents, new_chat, reload, until, wait_for_end
from page_server import FakeServer
from playwright.sync_api import Locator, Page, Route, expect

pytestmark = pytest.mark.browser


def chat(page: Page, title: str) -> Locator:
    return page.locator("#chats .chat", has_text=re.compile(title))


def open_chat(page: Page, title: str) -> None:
    chat(page, title).locator(".chat-name").click()
    expect(page.locator(".question .text")).to_have_text([re.compile(title)])


def ask_unheard(page: Page, text: str) -> Route:
    """Ask a question whose request is held back from the server, and return the request once it was sent."""
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    ask(page, text)
    until(page, lambda: bool(held))
    return held[0]


def test_answers_go_on_while_other_chats_are_shown(server: FakeServer, page: Page) -> None:
    """Regression: another chat or a new one ended the answer that was coming, without a word."""
    server.may_go_on.clear()
    ask(page, "a b c d e f g h i j k l m n")
    expect(page.locator(".answer .text")).to_contain_text(" b c")
    new_chat(page)
    expect(page.locator("#send")).to_be_visible()
    ask(page, "A B C D E F G H I J K L M N")
    expect(page.locator(".answer .text")).to_contain_text(" B C")
    new_chat(page)
    ask_and_wait(page, "one")
    assert answers(page) == ["You said: one <b>so</b> & so."]
    mark = page.get_by_role("img", name="Answering")
    expect(mark).to_have_count(2)
    open_chat(page, "a b c")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".answer .text")).to_have_text(re.compile("You said: a b c d e f g h"))
    server.may_go_on.set()
    expect(page.locator(".answer .text")).to_have_text(re.compile("l m n <b>so</b> & so.$"))
    wait_for_end(page)
    open_chat(page, "A B C")
    expect(page.locator(".answer .text")).to_have_text(re.compile("L M N <b>so</b> & so.$"))
    expect(mark).to_have_count(0)
    assert server.num_abandoned == 0
    kept = page.evaluate(KEPT)
    assert {each["messages"][1]["content"].count(" ") for each in kept} == {5, 18}  # all of each answer


def test_stop_ends_the_answer_of_the_chat_that_is_shown(server: FakeServer, page: Page) -> None:
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("on on")
    new_chat(page)
    page.keyboard.press("Escape")  # which has nothing to stop here
    ask(page, "and\ngo on")
    expect(page.locator(".answer .text")).to_contain_text("on on")
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    expect(chat(page, "^go on").get_by_role("img", name="Answering")).to_be_visible()
    assert server.num_abandoned <= 1
    open_chat(page, "^go on")
    expect(page.locator("#stop")).to_be_visible()
    length = len(answers(page)[0])
    page.wait_for_function("length => document.querySelector('.answer .text').innerText.length > length", arg=length)
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator(".answer .figures").text_content().endswith("· stopped")


def test_prompt_that_is_read_goes_on_while_another_chat_is_shown(server: FakeServer, page: Page) -> None:
    server.has_progress = True
    reload(page)
    ask_and_wait(page, "one")
    server.may_go_on.clear()
    new_chat(page)
    ask(page, "two")
    bar = page.get_by_role("progressbar")
    expect(bar).to_have_attribute("aria-valuenow", "40")
    open_chat(page, "one")
    expect(bar).to_have_count(0)
    open_chat(page, "two")
    expect(bar).to_have_attribute("aria-valuenow", "40")
    server.may_go_on.set()
    wait_for_end(page)
    assert answers(page) == ["You said: two <b>so</b> & so."] and server.num_abandoned == 0


def test_failure_in_a_chat_that_is_not_shown_keeps_its_question(server: FakeServer, page: Page) -> None:
    request = ask_unheard(page, "one")
    new_chat(page)
    ask_and_wait(page, "two")
    request.abort()
    expect(page.get_by_role("img", name="Answering")).to_have_count(0)
    expect(page.get_by_role("alert")).to_be_hidden()
    open_chat(page, "one")
    failed = page.locator(".answer .figures")
    expect(failed).to_have_text(re.compile("^ended by an error: The server cannot be reached"))
    page.get_by_role("button", name="Retry").click()
    wait_for_end(page)
    assert answers(page) == ["You said: one <b>so</b> & so."]


def test_question_without_an_answer_is_not_sent_with_the_next_one(server: FakeServer, page: Page) -> None:
    ask_unheard(page, "one")
    page.get_by_label("Message", exact=True).fill("two")  # so that there is no place to give "one" back
    page.keyboard.press("Escape")
    wait_for_end(page)
    expect(page.locator(".question .text")).to_have_text(["one"])
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "two"}]


def test_file_goes_to_the_chat_that_it_was_dropped_on(server: FakeServer, page: Page) -> None:
    """Regression: it went to the chat that was shown when the file had been read."""
    ask_and_wait(page, "one")
    page.evaluate(
        """() => {
            const read = File.prototype.arrayBuffer, gate = new Promise(resolve => { window.goOn = resolve; });
            File.prototype.arrayBuffer = async function () { await gate; return read.call(this); };
        }"""
    )
    attach(page, "a.txt")
    new_chat(page)
    page.evaluate("window.goOn()")
    expect(page.locator("#announcement")).to_have_text("a.txt was added.")
    expect(documents(page)).to_have_count(0)
    open_chat(page, "one")
    expect(documents(page)).to_have_text([re.compile("a.txt.*6,300 tokens")])


def test_name_that_is_being_typed_survives_the_end_of_an_answer(server: FakeServer, page: Page) -> None:
    server.may_go_on.clear()
    ask(page, "a b c d e f g h i j k l m n")
    expect(page.locator(".answer .text")).to_contain_text(" b c")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the chat").fill("Let")
    server.may_go_on.set()
    wait_for_end(page)
    page.keyboard.type("ters")
    page.keyboard.press("Enter")
    expect(page.locator("#chats .chat-name")).to_have_text(["Letters"])


def test_chats_of_earlier_versions_can_be_continued(server: FakeServer, page: Page) -> None:
    """Their messages have no ids, and their titles are stored."""
    page.evaluate(
        """() => new Promise(resolve => {
            indexedDB.open("nanovllm").onsuccess = ({ target }) => {
                const stores = target.result.transaction("conversations", "readwrite");
                const messages = [{ role: "user", content: "zero" }, { role: "assistant", content: "Yes.", note: "" }];
                const record = { id: "1", title: "zero", changedMs: 5, documentIds: [], messages };
                stores.objectStore("conversations").put(record);
                stores.oncomplete = () => { target.result.close(); resolve(); };
            };
        })"""
    )
    reload(page)
    expect(page.locator("#chats .chat-name")).to_have_text(["zero"])
    ask_and_wait(page, "one")
    reload(page)
    expect(page.locator(".turn .text")).to_have_text(["zero", "Yes.", "one", "You said: one <b>so</b> & so."])
    page.get_by_role("button", name="Edit").nth(1).click()
    ask_and_wait(page, "two")
    kept: Any = page.evaluate(KEPT)
    assert [message["content"] for message in kept[0]["messages"][::2]] == ["zero", "two"]
