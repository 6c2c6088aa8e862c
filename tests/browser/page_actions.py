"""What the tests do on the page, each action with the wait that makes its effect certain."""

import re
import time
from collections.abc import Callable

from playwright.sync_api import Locator, Page, expect
from waiting import LIMIT_S

TEXT = "The passkey is 4711.\n" * 300
# All kept chats. The page's own transactions that began before are written when this one has ended
KEPT = """() => new Promise(resolve => {
    indexedDB.open("nanovllm").onsuccess = ({ target }) => {
        const all = target.result.transaction("conversations").objectStore("conversations").getAll();
        all.onsuccess = () => { target.result.close(); resolve(all.result); };
    };
})"""


def ask(page: Page, text: str) -> None:
    """Send a question. Afterwards Send is hidden until the answer has ended."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_end(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()


def ask_and_wait(page: Page, text: str) -> None:
    ask(page, text)
    wait_for_end(page)


def answers(page: Page) -> list[str]:
    return page.locator(".answer .text").all_inner_texts()


def documents(page: Page) -> Locator:
    return page.locator("#documents > li")


def attach(page: Page, name: str = "report.txt", content: bytes = TEXT.encode()) -> None:
    """Choose a file, which the page has yet to read."""
    page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": content})


def attach_and_wait(page: Page, name: str = "report.txt", content: bytes = TEXT.encode()) -> None:
    """Attach a document, and wait until its tokens are counted."""
    attach(page, name, content)
    expect(documents(page).last).to_have_text(re.compile(rf"{re.escape(name)}.*[\d,]+ tokens"))


def new_chat(page: Page) -> None:
    page.get_by_role("button", name="New chat").first.click()
    expect(page.locator(".turn")).to_have_count(0)


def reload(page: Page) -> None:
    """Reload the page once its changes are kept, and wait until it takes questions and knows the server."""
    page.evaluate(KEPT)
    page.reload()
    expect(page.locator("#model")).not_to_be_empty()


def until(page: Page, condition: Callable[[], bool]) -> None:
    """Wait for what no locator shows."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition has not become true"
        page.wait_for_timeout(20)
