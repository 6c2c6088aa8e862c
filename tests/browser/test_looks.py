"""Fit and looks of the page: widths from a phone's to a desktop's, light and dark, with the keyboard alone.

The screenshots are kept in a temporary folder of pytest, whose name the test prints.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_actions import KEPT, ask, ask_and_wait, attach_and_wait, reload, until
from page_server import MODEL, FakeServer, OpenPage
from playwright.sync_api import Page, expect

from nanovllm.models.retrieval_model import CHAT_TEMPLATE

pytestmark = pytest.mark.browser

SIZES = {"320": (320, 640), "390": (390, 844), "landscape": (844, 390), "1440": (1440, 900)}
SCHEMES, WIDTHS = pytest.mark.parametrize("scheme", ["light", "dark"]), pytest.mark.parametrize("size", SIZES)


@SCHEMES
@WIDTHS
def test_page_fits_and_can_be_read(
    server: FakeServer, open_page: OpenPage, tmp_path: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    server.model = "an-organization/a-model-with-a-long-name-8B-Instruct"
    server.max_model_len = 20_000
    server.engine.show(written=1, resident=7, streamed=14, cpu_attended=9, waiting=5, cached=12)
    viewport = {"width": width, "height": height}
    page = open_page(server.url, viewport=viewport, color_scheme=scheme, has_touch=width < 1000)
    expect(page.locator("#model")).to_have_text(server.model)
    expect(page.locator("#cache-summary")).to_contain_text("12,288 of")
    look(page, tmp_path / "1-welcome.png")

    ask_and_wait(page, "show markdown")
    ask_and_wait(page, "word" * 60)
    for name, num_lines in (("report.txt", 300), (f"{'long-' * 20}.txt", 2000)):
        attach_and_wait(page, name, b"A line of text.\n" * num_lines)
    expect(page.locator("#excess")).to_be_visible()
    look(page, tmp_path / "2-answers.png")
    page.locator("#messages").evaluate("element => element.scrollTop = 0")
    look(page, tmp_path / "3-answers-start.png")

    if width < 1000:
        page.locator("#side-button").click()
    look(page, tmp_path / "4-side.png")
    page.locator("#cache > summary").click()
    expect(page.locator("#grid")).to_be_visible()
    page.locator("#figures").scroll_into_view_if_needed()
    look(page, tmp_path / "5-cache.png")
    if width < 1000:
        page.keyboard.press("Escape")
        expect(page.locator("#side")).to_be_hidden()
        expect(page.locator("#side-button")).to_be_focused()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("button", name="Done")).to_be_in_viewport(ratio=1)
    look(page, tmp_path / "6-settings.png")
    page.get_by_role("button", name="Cancel").click()

    server.may_go_on.clear()
    server.has_progress, server.max_model_len = True, 10**6  # all documents fit
    reload(page)
    ask(page, "one")
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "40")
    look(page, tmp_path / "7-reading.png")
    server.may_go_on.set()
    print(tmp_path)


@SCHEMES
@WIDTHS
def test_first_screen_of_the_built_in_model(
    server: FakeServer, open_page: OpenPage, tmp_path: Path, size: str, scheme: str
) -> None:
    server.model = "demo"
    server.engine.tokenizer = SimpleNamespace(chat_template=CHAT_TEMPLATE)
    server.engine.max_request_tokens = server.max_model_len = 20_000
    width, height = SIZES[size]
    page = open_page(server.url, viewport={"width": width, "height": height}, color_scheme=scheme)
    offer = page.get_by_role("button", name="Try it: a long document")
    expect(offer).to_be_in_viewport(ratio=1)
    expect(page.locator("#built-in-note")).to_be_visible()
    look(page, tmp_path / "1-offer.png")
    offer.click()
    questions = page.locator("#suggestions button")
    expect(questions).to_have_count(3)
    for question in questions.all():
        expect(question).to_be_in_viewport(ratio=1)
    look(page, tmp_path / "2-questions.png")
    print(tmp_path)


def look(page: Page, path: Path) -> None:
    until(page, lambda: not page.evaluate("document.getAnimations().some(each => each instanceof CSSTransition)"))
    page.screenshot(path=path)
    assert page.evaluate(FLAWS) == []


# Texts that cannot be read, and what does not fit. What may scroll on its own or ends in dots is none of it.
FLAWS = """() => {
    const flaws = [], screen = document.documentElement;
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const luminance = rgb => rgb.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = element => {
        for (let each = element; each; each = each.parentElement) {
            const colour = parse(getComputedStyle(each).backgroundColor);
            if (colour[3] !== 0) return luminance(colour);
        }
    };
    if (screen.scrollWidth > innerWidth) flaws.push(`the page is ${screen.scrollWidth} wide`);
    for (const box of document.querySelectorAll("#messages, #side, dialog[open]")) {
        if (box.scrollWidth > box.clientWidth + 1) flaws.push(`${box.id} scrolls sideways`);
    }
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement, style = getComputedStyle(element);
        if (!walker.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
        if (element.closest(".visually-hidden, .skip, option")) continue;
        const name = `${element.tagName} "${walker.currentNode.data.trim().slice(0, 30)}"`;
        const [text, behind] = [luminance(parse(style.color)), ground(element)];
        const contrast = (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05);
        if (contrast < 4.5) flaws.push(`${name} has a contrast of ${contrast.toFixed(1)}`);
        const isCut = element.scrollWidth > element.clientWidth + 1 && style.display !== "inline";
        if (isCut && style.textOverflow !== "ellipsis") flaws.push(`${name} is cut off`);
        const range = document.createRange();
        range.selectNodeContents(walker.currentNode);
        const { left, right } = range.getBoundingClientRect();
        const mayScroll = element.closest("pre, .table") || style.textOverflow === "ellipsis";
        if ((left < 0 || right > innerWidth + 1) && !mayScroll) flaws.push(`${name} is outside the screen`);
    }
    const title = document.createRange();
    title.selectNodeContents(document.querySelector("h1"));
    for (const shown of document.querySelectorAll("header button")) {
        const isShown = shown.checkVisibility(), { left } = shown.getBoundingClientRect();
        if (isShown && title.getBoundingClientRect().right > left) flaws.push(`${shown.id} covers the title`);
    }
    for (const id of ["question", "send", "settings-button", "model"]) {
        const element = document.getElementById(id), box = element.getBoundingClientRect();
        if (element.hidden || document.querySelector("dialog[open]")) continue;
        const isInside = box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
        if (box.width < 20 || !isInside) flaws.push(`${id} is hidden`);
    }
    return flaws;
}"""


def test_chat_is_not_covered_by_the_cache(server: FakeServer, open_page: OpenPage) -> None:
    """The cache is in the drawer, which closes before a question can be asked."""
    page = open_page(server.url, viewport={"width": 844, "height": 390})
    page.locator("#side-button").click()
    page.locator("#cache > summary").click()
    page.mouse.click(800, 200)
    expect(page.locator("#side")).to_be_hidden()
    ask_and_wait(page, "one")
    assert page.locator("#messages").bounding_box()["height"] > 200  # type: ignore[index]


# -- the keyboard ----------------------------------------------------------------------------------------------------


def test_everything_is_reached_by_tab_and_shows_its_focus(server: FakeServer, page: Page) -> None:
    attach_and_wait(page, "a.txt", b"text")
    ask_and_wait(page, "one")
    for _ in range(2):  # when the answer is kept, the list of chats is drawn, which may move the focus
        page.evaluate(KEPT)
    page.locator(".skip").focus()
    reached: list[str] = []
    for _ in range(30):
        name, outline = page.evaluate(
            """() => {
                const element = document.activeElement, row = element.closest(".composer-row");
                const style = getComputedStyle(element);
                const isShown = style.outlineStyle !== "none" || (row && getComputedStyle(row).boxShadow !== "none");
                return [element.id || element.textContent.trim() || element.tagName, isShown];
            }"""
        )
        if name in reached or element_is_body(page):
            break
        assert outline, f"{name} does not show that it has the focus"
        reached.append(name)
        page.keyboard.press("Tab")
    assert reached[0] == "Skip to the message" and reached[1:3] == ["settings-button", "attach"]
    assert [name for name in reached[3:] if not any(each in name for each in ("tokens in use", "Cache", "tok/s"))] == [
        *("a.txt", "✕", "new-chat", "one", "Rename", "Export", "Delete"),
        *("messages", "Edit", "Copy", "Retry", "attach-here", "question", "send"),
    ]


def element_is_body(page: Page) -> bool:
    return bool(page.evaluate("document.activeElement === document.body"))


def test_first_minute_needs_no_mouse(server: FakeServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 390, "height": 844})
    expect(page.locator("#model")).to_have_text(MODEL)
    press = page.keyboard.press
    page.locator("#side-button").focus()
    press("Enter")
    expect(page.locator("#attach")).to_be_focused()
    for _ in range(9):  # the focus stays in the drawer, or leaves the page
        press("Tab")
        assert not page.evaluate("document.activeElement.matches('main, #question, header *')")
    page.locator("#attach").focus()
    press("Escape")
    expect(page.locator("#side-button")).to_be_focused()
    page.locator("#question").focus()
    page.keyboard.type("go on")
    press("Enter")
    expect(page.locator(".answer .text")).to_contain_text("on on")
    press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#question")).to_be_focused()
    page.get_by_role("button", name="Continue").focus()
    press("Enter")
    expect(page.locator("#question")).to_be_focused()
    press("Escape")
    expect(page.locator("#send")).to_be_visible()
    page.get_by_role("button", name="Edit").focus()
    press("Enter")
    press("Control+A")
    page.keyboard.type("one")
    press("Enter")
    expect(page.locator(".answer .text")).to_have_text("You said: one <b>so</b> & so.")


def test_reduced_motion_has_none(server: FakeServer, open_page: OpenPage) -> None:
    page = open_page(server.url, reduced_motion="reduce")
    server.may_go_on.clear()
    ask(page, "go on")
    expect(page.locator(".growing")).to_be_visible()
    motions: list[Any] = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => [null, '::after'].map(part => getComputedStyle(e, part)))"
        ".map(s => parseFloat(s.transitionDuration) + (s.animationName === 'none' ? 0 : 1))"
    )
    server.may_go_on.set()
    assert max(motions) == 0
