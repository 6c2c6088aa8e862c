"""The page: which files are served, and how; what /kvcache says. What they do in a browser: tests/browser/."""

import base64
import re
from dataclasses import dataclass

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from page_server import FakeEngine

from nanovllm.entrypoints.server.errors import add_error_handlers
from nanovllm.entrypoints.server.page import DIRECTORY, KVView, add_page, kv_router
from nanovllm.errors import EngineError
from nanovllm.models.retrieval_model import CHAT_TEMPLATE
from nanovllm.plan.kv_spec import BlockState

POLICY = {
    *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
    *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    *("require-trusted-types-for 'script'", "trusted-types 'none'"),
}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    add_page(app)
    return TestClient(app)


def test_every_file_is_served_with_the_policy(client: TestClient) -> None:
    paths = [f"/page/{path.name}" for path in DIRECTORY.iterdir()]
    assert len(paths) == 14
    for path in ("/", *paths):
        response = client.get(path)
        assert response.status_code == 200
        assert set(response.headers["content-security-policy"].split("; ")) == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get("/page/chat.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/").headers["etag"]
    assert client.get("/", headers={"If-None-Match": tag}).status_code == 304
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "../page.py"])
def test_other_paths_are_not_found(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_files_name_no_other_host_and_only_files_that_exist() -> None:
    for path in DIRECTORY.iterdir():
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\"' )]+", text)) - {
            *("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")  # names, not addresses
        }
        assert not addresses, f"{path.name} names {addresses}"
        for name in re.findall(r"from \"\./([\w.]+)\"|\"page/([\w.]+)\"", text):
            assert (DIRECTORY / (name[0] or name[1])).is_file(), f"{path.name} loads {name}"


def test_every_id_that_a_script_asks_for_is_in_the_page() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', (DIRECTORY / "index.html").read_text()))
    for path in DIRECTORY.glob("*.js"):
        asked = set(re.findall(r'(?:byId|getElementById)\("([\w-]+)"\)', path.read_text()))
        assert asked <= ids, f"{path.name} asks for {asked - ids}"


# -- /kvcache ----------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_snapshot_has_one_byte_for_each_block() -> None:
    engine = FakeEngine()
    engine.show(written=1, resident=2, cached=3)
    snapshot = KVView(engine).snapshot()
    names = [snapshot["state_names"][state] for state in base64.b64decode(snapshot["states"])]
    assert names == ["written"] + ["resident"] * 2 + ["cached"] * 3 + ["free"] * 58
    assert (snapshot["num_blocks"], snapshot["block_size"], snapshot["num_slots"]) == (64, 256, 8)
    assert snapshot["limits"] == {"link_byte_per_s": 55e9, "cpu_byte_per_s": 48e9}


def test_snapshot_is_made_ten_times_a_second_at_most() -> None:
    engine, clock = FakeEngine(), Clock()
    view = KVView(engine, clock)
    first = view.snapshot()
    engine.show(resident=2)
    clock.now_s += 0.09
    assert view.snapshot() is first
    clock.now_s += 0.02
    assert base64.b64decode(view.snapshot()["states"])[:2] == bytes([BlockState.RESIDENT] * 2)


def test_rates_are_those_of_the_last_seconds() -> None:
    engine, clock = FakeEngine(), Clock()
    view = KVView(engine, clock)
    assert set(view.snapshot()["rates"].values()) == {None}
    for _ in range(50):  # 5 s at 100 tokens a second, then at 20
        clock.now_s += 0.1
        engine.counters["num_decode_tokens"] += 10
        engine.counters["num_loaded_bytes"] += 10**9
        engine.counters["num_cpu_tokens"] += 256
        rates = view.snapshot()["rates"]
    assert round(rates["decode_token_per_s"]) == 100 and rates["prefill_token_per_s"] == 0
    assert round(rates["link_byte_per_s"]) == 10**10 and round(rates["cpu_byte_per_s"]) == 10 * 28 * 2**20
    for _ in range(25):
        clock.now_s += 0.1
        engine.counters["num_decode_tokens"] += 2
        rates = view.snapshot()["rates"]
    assert round(rates["decode_token_per_s"]) == 20 and rates["link_byte_per_s"] == 0


def test_rates_are_unknown_after_a_long_pause() -> None:
    engine, clock = FakeEngine(), Clock()
    view = KVView(engine, clock)
    view.snapshot()
    clock.now_s += 60
    assert view.snapshot()["rates"]["decode_token_per_s"] is None


def test_engine_without_offload_has_no_slots_and_no_link() -> None:
    engine = FakeEngine()
    for name in ("num_cpu_blocks", "link_byte_per_s", "cpu_attention_byte_per_s", "num_loaded_bytes", "num_cpu_tokens"):
        del engine.counters[name]
    snapshot = KVView(engine).snapshot()
    assert snapshot["num_slots"] is None and set(snapshot["limits"].values()) == {None}


def test_kvcache_is_json_that_nobody_keeps() -> None:
    app = FastAPI()
    app.include_router(kv_router(FakeEngine()))
    response = TestClient(app).get("/kvcache")
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    assert response.json()["num_blocks"] == 64


def test_example_is_offered_with_the_built_in_model_alone() -> None:
    engine, app = FakeEngine(), FastAPI()
    app.include_router(kv_router(engine))
    client = TestClient(app)
    assert client.get("/example").json() is None
    engine.tokenizer.chat_template = CHAT_TEMPLATE
    example = client.get("/example").json()
    assert all(f"{question} " in example["text"] for question in example["questions"]) and len(example["text"]) > 19_000
    engine.max_request_tokens = 1000  # too few
    assert client.get("/example").json() is None


def test_blocks_of_a_prompt_are_located_as_far_as_they_are_known() -> None:
    engine, app = FakeEngine(), FastAPI()
    app.include_router(kv_router(engine))
    client, text = TestClient(app), "".join(map(chr, range(1000)))
    engine.hold(text, [7, 3, 5])
    for num_tokens, block_ids in ((0, []), (255, []), (256, [7]), (767, [7, 3]), (1000, [7, 3, 5])):
        answer = client.post("/kvcache", json={"tokens": list(range(num_tokens))}).json()
        assert answer == {"engine": client.get("/kvcache").json()["engine"], "block_ids": block_ids}
    engine.blocks[3].prefix_ids = [99, 2]  # now another prompt's
    assert client.post("/kvcache", json={"tokens": list(range(1000))}).json()["block_ids"] == [7]


def test_kvcache_of_a_failed_engine_is_503() -> None:
    class FailedEngine(FakeEngine):
        def block_states(self) -> bytes:
            raise EngineError("the engine cannot be used: a step failed")

    app = FastAPI()
    add_error_handlers(app)
    app.include_router(kv_router(FailedEngine()))
    response = TestClient(app).get("/kvcache")
    assert response.status_code == 503 and "a step failed" in response.json()["error"]["message"]
