"""/metrics: what it counts, that servers do not share it, and that a failed engine does not break it."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import asgi_client, make_site
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import AsyncLLM, EngineError
from nanovllm.entrypoints.server.metrics import Metrics, log_throughput
from nanovllm.plan.outputs import RequestOutput

OUTPUT: RequestOutput = {
    "text": "abc",
    "token_ids": [1, 2, 3],
    "prompt_token_ids": [4] * 10,
    "finish_reason": "stop",
    "num_prompt_tokens": 10,
    "num_cached_tokens": 6,
    "ttft_s": 0.2,
    "tpot_s": 0.01,
}
STATS: dict[str, Any] = {
    "num_running": 3,
    "num_waiting": 2,
    "num_preemptions": 1,
    "load_byte_per_s": None,
    "guess_acceptance": 0.5,
    "drafters": {"shadow": {"num_guesses": 9, "num_accepted_guesses": 6, "accepted_by_position": [0.75, 0.5]}},
}


def values(rendered: bytes) -> dict[str, float]:
    """Name of each sample, without our prefix, and with its labels other than the model's -> value."""
    found = {}
    for family in text_string_to_metric_families(rendered.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            labels = ",".join(sample.labels.values())
            found[sample.name.removeprefix("nanovllm:") + (f"[{labels}]" if labels else "")] = sample.value
    return found


def make_metrics(stats: Callable[[], dict[str, Any]] = lambda: STATS) -> Metrics:
    return Metrics("tiny", stats, lambda: 7)


def test_metrics_count_answers_and_refusals() -> None:
    metrics = make_metrics()
    metrics.answer_ended(OUTPUT)
    metrics.answer_ended(OUTPUT | {"finish_reason": "length", "ttft_s": None, "tpot_s": None})
    metrics.answers_abandoned(2)
    metrics.refused("queue")
    found = values(metrics.render())
    expected = {
        "prompt_tokens_total": 20,
        "generation_tokens_total": 6,
        "prefix_cache_hits_total": 12,
        "request_success_total[stop]": 1,
        "request_success_total[length]": 1,
        "request_success_total[abort]": 2,
        "requests_refused_total[queue]": 1,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.2,
        "time_to_first_token_seconds_bucket[0.1]": 0,
        "time_to_first_token_seconds_bucket[0.25]": 1,
        "time_per_output_token_seconds_count": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_metrics_read_the_engine_when_they_are_rendered() -> None:
    stats = dict(STATS)
    metrics = make_metrics(lambda: stats)
    assert values(metrics.render())["num_requests_running"] == 3
    stats["num_running"] = 4
    found = values(metrics.render())
    expected = {
        "num_requests_running": 4,
        "num_requests_waiting": 2,
        "num_preemptions_total": 1,
        "spec_decode_draft_acceptance_rate": 0.5,
        "spec_decode_drafter_tokens_total[shadow]": 9,
        "spec_decode_acceptance_rate_per_pos[shadow,1]": 0.5,
        "num_answers_in_queue": 7,
        "engine_is_running": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert "load_bytes_per_second" not in found  # it has not been measured
    stats |= {"num_gpu_blocks": 4, "num_free_gpu_blocks": 4, "num_cpu_blocks": 8, "num_free_cpu_blocks": 6}
    assert values(metrics.render())["kv_cache_usage_perc"] == 0.25


def test_metrics_failed_engine_leaves_the_counters() -> None:
    def raise_error() -> dict[str, Any]:
        raise EngineError("a step failed")

    metrics = make_metrics(raise_error)
    metrics.answers_abandoned(1)
    found = values(metrics.render())
    assert (found["engine_is_running"], found["request_success_total[abort]"]) == (0, 1)
    assert "num_requests_running" not in found


def test_metrics_of_two_servers_are_separate() -> None:
    one, other = make_metrics(), make_metrics()
    one.refused("queue")
    assert "requests_refused_total[queue]" not in values(other.render())


@pytest.fixture
def engine(retrieval_model: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        retrieval_model,
        device="cpu",
        max_model_len=1024,
        max_num_batched_tokens=256,
        enable_cpu_offload=True,
        kvcache_block_size=256,
        num_gpu_blocks=2,
        num_cpu_blocks=16,
        cpu_attention="off",
        speculation="prompt_lookup",
    )
    yield engine
    engine.close()


def test_metrics_over_http_show_requests_blocks_and_guesses(engine: AsyncLLM) -> None:
    """Two slots and a prompt of four blocks: blocks are streamed, and the answer copies the prompt."""

    async def main() -> dict[str, float]:
        async with asgi_client(make_site(engine).gate.outermost) as client:
            body = {"prompt": "The passkey is 4711, says the captain. " * 22 + "The", "max_tokens": 20}
            for _ in range(2):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.post("/v1/completions", json=body | {"n": 1000})).status_code == 400
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return values(response.content)

    found = asyncio.run(main())
    assert found["request_success_total[length]"] == 2
    assert found["generation_tokens_total"] == 40
    assert found["prefix_cache_hits_total"] > 0
    assert found["requests_refused_total[n]"] == 1
    for name in ("num_resident_blocks", "streamed_block_reads_total", "loaded_bytes_total", "num_cpu_blocks"):
        assert found[name] > 0, name
    assert found["spec_decode_num_accepted_tokens_total"] > 0
    assert found["num_requests_running"] == found["num_requests_waiting"] == found["num_answers_in_queue"] == 0


def test_throughput_is_logged_while_there_is_work_and_not_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    steps = iter([(0, 0, 0), (500, 20, 2), (500, 20, 0), (500, 20, 0), (500, 20, 1)])

    def stats() -> dict[str, Any]:
        try:
            prefill, decode, running = next(steps)
        except StopIteration as end:
            raise EngineError("closed") from end
        return STATS | {"num_prefill_tokens": prefill, "num_decode_tokens": decode, "num_running": running}

    with caplog.at_level(logging.INFO, "nanovllm"):
        asyncio.run(log_throughput(lambda: stats() | {"num_waiting": 0}, interval_s=0.01))
    first, second = (record.getMessage() for record in caplog.records)
    assert "prompts 50000 tok/s, answers 2000.0 tok/s; running: 2, waiting: 0; KV cache" in first
    assert "prompts 0 tok/s, answers 0.0 tok/s; running: 1" in second
