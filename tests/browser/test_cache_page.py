"""The view of the KV cache in a browser, and how the page fits: dark mode, a phone, the keyboard."""

from typing import Any

import pytest
from page_server import FakeServer, OpenPage
from playwright.sync_api import Page, expect

from nanovllm.core.kv_spec import BlockState

pytestmark = pytest.mark.browser

PHONE_HEIGHT = 740
COUNTS = {"written": 1, "resident": 7, "streamed": 14, "cpu_attended": 9, "waiting": 5, "cached": 12, "free": 16}


def shown_counts(page: Page) -> dict[str, int]:
    rows = page.locator("#legend li:visible").all()
    return {str(row.get_attribute("data-state")): int(row.locator(".count").inner_text()) for row in rows}


def wait_for_blocks(page: Page, words: str) -> None:
    expect(page.locator("#cache-summary")).to_have_text(words)


# -- the cells -------------------------------------------------------------------------------------------------------


def test_cells_show_every_state_and_their_counts_add_up(server: FakeServer, page: Page) -> None:
    server.engine.show(**{name: count for name, count in COUNTS.items() if name != "free"})
    wait_for_blocks(page, "48 of 64 blocks in use")
    assert shown_counts(page) == COUNTS and sum(COUNTS.values()) == 64
    label = page.get_by_role("img").get_attribute("aria-label")
    assert label is not None and label.startswith("KV cache of 64 blocks: 1 being written, 7 on the GPU, 14 streamed")
    expect(page.locator("#grid-caption")).to_have_text(
        "One cell is one block of 256 tokens. Room for 16,384 tokens in CPU memory, with 8 slots on the GPU."
    )


def test_cells_are_drawn_in_the_colours_of_their_states(server: FakeServer, page: Page) -> None:
    server.engine.show(resident=20)
    wait_for_blocks(page, "20 of 64 blocks in use")
    assert pixel(page, 10, 10) == (0x12, 0x90, 0x6D)
    server.engine.show(cached=20)
    expect(page.locator("[data-state=cached] .count")).to_have_text("20")
    assert pixel(page, 10, 10) == (0xA9, 0xB3, 0xC1)


def pixel(page: Page, x: int, y: int) -> tuple[int, ...]:
    data = page.evaluate(f"[...document.getElementById('grid').getContext('2d').getImageData({x}, {y}, 1, 1).data]")
    return tuple(data[:3])


def test_all_gpu_engine_shows_neither_link_nor_cpu(server: FakeServer, open_page: OpenPage) -> None:
    for name in ("num_cpu_blocks", "link_byte_per_s", "cpu_attention_byte_per_s", "num_loaded_bytes", "num_cpu_tokens"):
        del server.engine.counters[name]
    page = open_page(server.url)
    wait_for_blocks(page, "0 of 64 blocks in use")
    assert list(shown_counts(page)) == ["written", "resident", "cached", "free"]
    assert page.get_by_role("meter").count() == 0


@pytest.mark.parametrize(("num_blocks", "per_cell"), [(1, "One cell is one block"), (8192, "One cell is one block")])
def test_pools_of_any_size_fit(server: FakeServer, open_page: OpenPage, num_blocks: int, per_cell: str) -> None:
    server.engine.states = bytes([BlockState.RESIDENT]) * num_blocks
    page = open_page(server.url)
    expect(page.locator("#grid-caption")).to_contain_text(per_cell)
    box = page.locator("#grid").bounding_box()
    assert box is not None and 0 < box["height"] <= 300


def test_huge_pool_shows_the_highest_state_of_each_group(server: FakeServer, open_page: OpenPage) -> None:
    states = bytearray(100_000)
    states[1] = BlockState.WRITTEN  # in the first cell
    server.engine.states = bytes(states)
    page = open_page(server.url)
    expect(page.locator("#grid-caption")).to_contain_text("One cell is 9 blocks")
    assert pixel(page, 1, 1) == (0xC2, 0x34, 0x7F)


# -- the meters ------------------------------------------------------------------------------------------------------


def test_meters_and_figures_follow_the_counters(server: FakeServer, page: Page) -> None:
    counters = server.engine.counters
    counters.update(num_running=1, num_waiting=2, guess_acceptance=0.87, tokens_per_pass=4.23)
    expect(page.locator("#acceptance")).to_have_text("87%, 4.2 a pass")
    expect(page.locator("#requests")).to_have_text("1 running, 2 waiting")
    counters.update(num_decode_tokens=300, num_prefill_tokens=9000, num_loaded_bytes=10e9, num_cpu_tokens=2000)
    expect(page.locator("#link-meter")).not_to_have_attribute("aria-valuenow", "0")
    for element_id in ("decode-rate", "prefill-rate"):
        assert page.locator(f"#{element_id}").inner_text().endswith(" tok/s")
    link, cpu = page.get_by_role("meter").all()
    assert str(link.get_attribute("aria-valuetext")).endswith(" GB/s of 55.0 GB/s")
    assert str(cpu.get_attribute("aria-valuetext")).endswith("MB/s of 48.0 GB/s")


def test_engine_that_fails_is_named(server: FakeServer, page: Page) -> None:
    page.route("**/kvcache", lambda route: route.fulfill(status=503, body="{}"))
    wait_for_blocks(page, "the engine has failed")
    page.unroute("**/kvcache")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # instead of waiting for the next time
    wait_for_blocks(page, "0 of 64 blocks in use")


def test_hidden_page_asks_for_nothing(server: FakeServer, page: Page) -> None:
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", { value: true, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(300)  # a request may be on its way
    requests: list[Any] = []
    page.on("request", lambda request: requests.append(request))
    page.wait_for_timeout(1200)
    assert not requests


# -- how the page fits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_scheme_is_the_systems(server: FakeServer, open_page: OpenPage, scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme)
    wait_for_blocks(page, "0 of 64 blocks in use")
    for selector in ("body", "header", "aside", ".composer-row", "#question", "#send", ".hint", "#welcome p"):
        contrast = page.evaluate(CONTRAST, selector)
        assert contrast >= 4.5, f"{selector} has a contrast of {contrast:.1f}"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(244, 245, 247)", "dark": "rgb(15, 18, 22)"}[scheme]


CONTRAST = """selector => {  // as WCAG 2 defines it
    let element = document.querySelector(selector);
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const light = rgb => rgb.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const text = light(parse(getComputedStyle(element).color));
    let behind = parse(getComputedStyle(element).backgroundColor);
    while (behind[3] === 0) {
        element = element.parentElement;
        behind = parse(getComputedStyle(element).backgroundColor);
    }
    const ground = light(behind);
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
}"""


@pytest.mark.parametrize("width", [360, 320])
def test_phone_needs_no_horizontal_scrolling(server: FakeServer, open_page: OpenPage, width: int) -> None:
    page = open_page(server.url, viewport={"width": width, "height": PHONE_HEIGHT}, has_touch=True)
    wait_for_blocks(page, "0 of 64 blocks in use")
    expect(page.locator("#cache-body")).to_be_hidden()
    page.set_input_files("#file", {"name": "long-" * 30, "mimeType": "text/plain", "buffer": b"x" * 5000})
    page.get_by_label("Message", exact=True).fill("word" * 100)
    page.keyboard.press("Enter")
    page.locator("#send").wait_for()
    page.locator("#settings-button").click()
    page.locator("#cache > summary").click()
    expect(page.locator("#grid")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('messages').scrollWidth") <= width
    for element_id in ("question", "send", "attach", "settings-button", "new-chat"):
        box = page.locator(f"#{element_id}").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, element_id
        assert box["y"] >= 0 and box["y"] + box["height"] <= PHONE_HEIGHT, element_id


def test_everything_is_reached_by_tab_and_shows_its_focus(server: FakeServer, page: Page) -> None:
    page.locator("#settings-button").click()
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"})
    expect(page.locator("#document")).to_be_visible()
    page.locator("#new-chat").focus()
    page.keyboard.press("Shift+Tab")  # to the first element of all
    reached: list[str] = []
    for _ in range(20):
        name, outline = page.evaluate(
            """() => {
                const element = document.activeElement, row = element.closest(".composer-row");
                const style = getComputedStyle(element);
                const isShown = style.outlineStyle !== "none" || (row && getComputedStyle(row).boxShadow !== "none");
                return [element.id || element.className || element.tagName, isShown];
            }"""
        )
        if name in reached or name == "BODY":
            break
        assert outline, f"{name} does not show that it has the focus"
        reached.append(name)
        page.keyboard.press("Tab")
    assert reached == [
        "skip", "new-chat", "settings-button", "temperature", "max-tokens", "format", "change-key", "messages",
        "SUMMARY", "remove-document", "question", "attach", "send",
    ]  # fmt: skip


def test_reduced_motion_has_none(server: FakeServer, open_page: OpenPage) -> None:
    page = open_page(server.url, reduced_motion="reduce")
    wait_for_blocks(page, "0 of 64 blocks in use")
    page.evaluate("document.getElementById('turns').innerText = ''")
    durations = page.evaluate(
        "[...document.querySelectorAll('*')].map(e => getComputedStyle(e))"
        ".map(s => parseFloat(s.transitionDuration) + (s.animationName === 'none' ? 0 : 1))"
    )
    assert max(durations) == 0
