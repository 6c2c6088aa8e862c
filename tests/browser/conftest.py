"""A headless Chromium, and the page in it. `make browser` installs the browser and playwright, which drives it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from install_chromium import BROWSERS, find_browser
from page_server import FakeServer, Host, OpenPage, serving
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

FLAGS = [
    "--host-resolver-rules=MAP page.test 127.0.0.1",  # a host whose http is not a secure context
    *"--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split(),
    *"--disable-component-update --disable-sync".split(),
]
TIMEOUT_MS = 60_000  # of a wait that only bounds a hang, for a page on a busy machine
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.fail(f"no browser found ({', '.join(BROWSERS)}); `make browser` installs one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """One real server for all tests, because to start and stop one takes a second."""
    host = Host()
    with serving(host) as host.url:
        yield host


@pytest.fixture
def server(host: Host) -> FakeServer:
    """A new one for each test. What is left of the requests of earlier tests goes to theirs."""
    server = FakeServer(host.url)
    host.app = server.app()
    return server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Open a page in a new context, which takes `options` such as a viewport, and wait until it takes questions.

    `script` runs before the page's own scripts.

    At the end, no page may have asked another host for anything, raised an error, or broken its policy.
    """
    pages: list[Page] = []
    requests: list[Request] = []
    complaints: list[str] = []

    def open_page(url: str, script: str = "", **options: Any) -> Page:
        page = browser.new_context(**options).new_page()
        page.add_init_script(script)
        page.set_default_timeout(TIMEOUT_MS)
        page.on("request", lambda request: requests.append(request))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if is_complaint(message.text) else None)
        page.goto(url)
        pages.append(page)
        expect(page.locator("#send")).to_be_enabled()
        return page

    yield open_page
    hosts = {page.url.split("/")[2] for page in pages}
    for page in pages:
        page.context.close()
    assert {request.url.split("/")[2] for request in requests} <= hosts
    assert not complaints


def is_complaint(text: str) -> bool:
    """Return True if the console says that the page is wrong. A request that was refused may be part of a test."""
    return "Content Security Policy" in text or "TrustedHTML" in text or "Uncaught" in text


@pytest.fixture
def page(server: FakeServer, open_page: OpenPage) -> Page:
    """The page of `server`, once it knows the model and has drawn the cache."""
    page = open_page(server.url)
    expect(page.locator("#cache-summary")).to_contain_text(re.compile("in use|room for"))
    return page
