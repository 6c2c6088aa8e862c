"""The view of the KV cache in a browser. How the page fits: test_looks.py."""

import re

import pytest
from page_actions import attach, reload, until
from page_server import FakeServer
from playwright.sync_api import Page, expect

from nanovllm.plan.kv_spec import BlockState

pytestmark = pytest.mark.browser

COUNTS = {"written": 1, "resident": 7, "streamed": 14, "cpu_attended": 9, "waiting": 5, "cached": 12, "free": 16}


def shown_counts(page: Page) -> dict[str, int]:
    rows = page.locator("#legend li:visible").all()
    return {str(row.get_attribute("data-state")): int(row.locator(".count").inner_text()) for row in rows}


def wait_for_blocks(page: Page, words: str) -> None:
    expect(page.locator("#cache-summary")).to_have_text(words)


@pytest.fixture
def page(page: Page) -> Page:
    """The page with the cache shown."""
    page.locator("#cache > summary").click()
    return page


# -- the cells -------------------------------------------------------------------------------------------------------


def test_blocks_in_use_are_shown_with_their_states_and_counts(server: FakeServer, page: Page) -> None:
    server.engine.show(**{name: count for name, count in COUNTS.items() if name != "free"})
    wait_for_blocks(page, "12,288 of 16,384 tokens in use, 1,792 on the GPU")
    assert shown_counts(page) == {name: count for name, count in COUNTS.items() if name != "free"}
    label = page.get_by_role("img").get_attribute("aria-label")
    assert label is not None and label.startswith("KV cache, blocks in use: 1 being written, 7 on the GPU, 14 streamed")
    expect(page.locator("#grid-caption")).to_have_text(
        "A cell is a block of 256 tokens. Room for 16,384 tokens in CPU memory, with 8 slots on the GPU."
    )
    server.engine.show(cached=3)
    wait_for_blocks(page, "768 of 16,384 tokens in use, 0 on the GPU")
    assert shown_counts(page) == {"cached": 3}


def test_bar_is_filled_by_use(server: FakeServer, page: Page) -> None:
    """Regression: it showed the shares of what was in use, so that 4 blocks of 972 filled all of it."""
    server.engine.show(resident=8, cached=8)
    wait_for_blocks(page, "4,096 of 16,384 tokens in use, 2,048 on the GPU")
    shares = page.locator("#shares .share").evaluate_all("all => all.map(e => Number(e.style.flexGrow))")
    assert sum(shares[:-1]) == 16 and shares[-1] == 48


def test_cells_are_drawn_in_the_colours_of_their_states(server: FakeServer, page: Page) -> None:
    server.engine.show(free=40, resident=20)  # the first cell is the first block in use
    wait_for_blocks(page, "5,120 of 16,384 tokens in use, 5,120 on the GPU")
    assert pixel(page, 10, 10) == (0x12, 0x90, 0x6D)
    server.engine.show(cached=20)
    expect(page.locator("[data-state=cached] .count")).to_have_text("20")
    assert pixel(page, 10, 10) == (0xA3, 0xAA, 0xB5)


def test_room_of_the_cache_says_what_one_chat_may_have(server: FakeServer, page: Page) -> None:
    """Regression: the first screen promised room for all tokens of the cache, where a request could have far fewer."""
    server.max_model_len = 8192
    reload(page)
    wait_for_blocks(page, "empty, room for 16,384 tokens, up to 8,192 in one chat")


def test_cell_under_the_pointer_is_named(server: FakeServer, page: Page) -> None:
    server.engine.show(free=40, waiting=20)
    wait_for_blocks(page, "5,120 of 16,384 tokens in use, 0 on the GPU")
    page.locator("#grid").hover(position={"x": 30, "y": 10})
    expect(page.locator("#grid-caption")).to_have_text("Block 41: waiting in CPU memory.")
    page.locator("#question").hover()
    expect(page.locator("#grid-caption")).to_contain_text("A cell is a block")


def test_document_says_how_much_of_it_is_where(server: FakeServer, page: Page) -> None:
    text = "A line.\n" * 300
    engine = server.engine
    engine.show(waiting=40, resident=3, cached=7)
    engine.hold(f'Document "a.txt":\n\n{text}', [40, 41, 42, 43, 44, 45, 46, 47, 48])
    attach(page, "a.txt", text.encode())
    expect(page.locator(".document")).to_contain_text("2,400 tokens · in the cache, 33% on the GPU")
    expect(page.locator("#cache-summary")).to_contain_text("12,800 of")
    caption = page.locator("#grid-caption")

    def is_named() -> bool:
        page.locator("#question").hover()
        page.locator("#grid").hover(position={"x": 10, "y": 10})  # its blocks come first
        return caption.inner_text() == "Block 40 of a.txt: on the GPU."

    until(page, is_named)  # the grid may be drawn once more, and then shows its caption again
    engine.show(waiting=40, resident=6)
    expect(page.locator(".document")).to_contain_text("67% in the cache, 67% on the GPU")


def pixel(page: Page, x: int, y: int) -> tuple[int, ...]:
    data = page.evaluate(f"[...document.getElementById('grid').getContext('2d').getImageData({x}, {y}, 1, 1).data]")
    return tuple(data[:3])


def test_engine_without_offload_shows_neither_link_nor_slots(server: FakeServer, page: Page) -> None:
    for name in ("num_cpu_blocks", "link_byte_per_s", "cpu_attention_byte_per_s", "num_loaded_bytes", "num_cpu_tokens"):
        del server.engine.counters[name]
    server.engine.show(resident=2)
    wait_for_blocks(page, "512 of 16,384 tokens in use")
    expect(page.get_by_role("meter")).to_have_count(0)


def test_on_a_cpu_nothing_is_said_of_a_gpu(server: FakeServer, page: Page) -> None:
    server.engine.device.type = "cpu"
    server.engine.show(**{name: count for name, count in COUNTS.items() if name != "free"})
    wait_for_blocks(page, "12,288 of 16,384 tokens in use")
    assert "GPU" not in page.locator("#side").inner_text()


@pytest.mark.parametrize(("num_blocks", "words"), [(1, "A cell is a block"), (8192, "A cell is a block")])
def test_pools_of_any_size_fit(server: FakeServer, page: Page, num_blocks: int, words: str) -> None:
    server.engine.states = bytes([BlockState.RESIDENT]) * num_blocks
    expect(page.locator("#cache-summary")).to_contain_text(f"{num_blocks * 256:,} of")
    expect(page.locator("#grid-caption")).to_contain_text(words)
    box = page.locator("#grid").bounding_box()
    assert box is not None and 0 < box["height"] <= 300


def test_cell_of_several_blocks_shows_their_highest_state(server: FakeServer, page: Page) -> None:
    states = bytearray([BlockState.CACHED]) * 100_000
    states[1] = BlockState.WRITTEN  # in the first cell
    server.engine.states = bytes(states)
    expect(page.locator("#grid-caption")).to_contain_text("A cell is 11 blocks of 256 tokens each")
    assert pixel(page, 1, 1) == (0xC2, 0x34, 0x7F)


# -- the meters ------------------------------------------------------------------------------------------------------


def test_meters_and_figures_follow_the_counters(server: FakeServer, page: Page) -> None:
    counters = server.engine.counters
    counters.update(num_running=1, num_waiting=2, guess_acceptance=0.87, tokens_per_pass=4.23)
    counters.update(drafters={"shadow": {"accepted_by_position": [0.97, 0.9, 0.85, 0.8, 0.5]}})
    expect(page.locator("#acceptance")).to_have_text("87%, 4.2 a pass")
    by_place = "shadow, guess kept at position 1: 97%, 4: 80%, 5: 50%"
    expect(page.locator("#guesses")).to_have_attribute("title", by_place)
    expect(page.locator("#requests")).to_have_text("1 running, 2 waiting")
    names = ("num_decode_tokens", "num_prefill_tokens", "num_loaded_bytes", "num_cpu_tokens")

    def are_shown() -> bool:
        for name, count in zip(names, (300, 9000, 10e9, 2000), strict=True):
            counters[name] += count  # the rates of an engine that does nothing fall to 0
        shown = [page.locator(f"#{name}-rate").inner_text() for name in ("decode", "prefill")]
        shown += [str(meter.get_attribute("aria-valuetext")) for meter in page.get_by_role("meter").all()]
        number = r"[\d.,]*[1-9][\d.,]*"
        units = ("tok/s", "tok/s", "[GM]B/s of 55.0 GB/s", "[GM]B/s of 48.0 GB/s")
        return all(re.fullmatch(f"{number} {unit}", text) for text, unit in zip(shown, units, strict=True))

    until(page, are_shown)


def test_engine_that_fails_is_named(server: FakeServer, page: Page) -> None:
    page.route("**/kvcache", lambda route: route.fulfill(status=503, body="{}"))
    wait_for_blocks(page, "the engine has failed")
    page.unroute("**/kvcache")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # instead of waiting for the next time
    wait_for_blocks(page, "empty, room for 16,384 tokens")


def test_hidden_page_asks_for_nothing(server: FakeServer, page: Page) -> None:
    page.evaluate(
        """() => {
            window.numRequests = 0; // that begin from now on
            const fetched = window.fetch;
            window.fetch = (...args) => { window.numRequests += 1; return fetched(...args); };
            Object.defineProperty(document, "hidden", { value: true, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(1500)
    assert page.evaluate("window.numRequests") == 0
