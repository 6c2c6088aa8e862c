"""GET /kvcache: the snapshot, who shares it, its rates, and an engine that has failed."""

import base64
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.testclient import TestClient
from page_server import FakeEngine

from nanovllm.core.block_state import BlockState
from nanovllm.errors import EngineError
from nanovllm.server.errors import add_error_handlers
from nanovllm.server.page import KVView, kv_router


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


def test_kvcache_of_a_failed_engine_is_503() -> None:
    class FailedEngine(FakeEngine):
        def block_states(self) -> bytes:
            raise EngineError("the engine cannot be used: a step failed")

    app = FastAPI()
    add_error_handlers(app)
    app.include_router(kv_router(FailedEngine()))
    response = TestClient(app).get("/kvcache")
    assert response.status_code == 503 and "a step failed" in response.json()["error"]["message"]
