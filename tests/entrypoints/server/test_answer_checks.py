"""The check of finished answers: what is checked, when, and what counts as a difference."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from event_loops import on_a_loop, until
from http_server import asgi_client, make_site
from tiny_models import write_tiny_model

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.entrypoints.server.admission import AnswerChecks, agrees
from nanovllm.entrypoints.server.metrics import Metrics
from nanovllm.outputs import Logprob, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=720)
    options: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 2, "num_cpu_blocks": 12}
    engine = AsyncLLM(str(path), device="cpu", kvcache_block_size=256, speculation="prompt_lookup", **options)
    yield engine
    engine.close()


async def answer(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    stream = await engine.submit([prompt], params)
    (output,) = await stream.outputs()
    return output


def count(metrics: Metrics) -> tuple[int, int]:
    lines = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if "{" in line)
    found = {key.split("{")[0]: float(value) for key, value in lines.items()}
    checks, differences = "nanovllm:answer_checks_total", "nanovllm:answer_check_differences_total"
    return int(found[checks]), int(found[differences])


@on_a_loop
async def test_checks_count_right_and_wrong_answers_and_wait_for_idleness(engine: AsyncLLM) -> None:
    idle = False
    metrics = Metrics("tiny", engine.llm.stats, lambda: 0)
    checks = AnswerChecks(engine, metrics, share=1.0, is_idle=lambda: idle)
    prompt = [7 * i % 300 for i in range(700)]
    output = await answer(engine, prompt, GREEDY)  # to the last position of the context
    assert len(prompt) + len(output["token_ids"]) == engine.llm.max_model_len
    checks.answer_ended(output, GREEDY)
    await asyncio.sleep(0.1)
    assert count(metrics) == (0, 0)  # the server is busy
    idle = True
    await until(lambda: count(metrics) == (1, 0))
    for position in (0, 10, 19):  # the last one is not part of the check's prompt
        wrong = output.copy()
        wrong["token_ids"] = [*output["token_ids"]]
        wrong["token_ids"][position] = (wrong["token_ids"][position] + 1) % 300
        checks.answer_ended(wrong, GREEDY)
    await until(lambda: count(metrics) == (4, 3))


@on_a_loop
async def test_checks_leave_out_what_greedy_tokens_do_not_explain(engine: AsyncLLM) -> None:
    metrics = Metrics("tiny", engine.llm.stats, lambda: 0)
    checks = AnswerChecks(engine, metrics, share=1.0, is_idle=lambda: True)
    for options in ({"temperature": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {3: 5.0}}, {"min_tokens": 2}):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 5, **options})
        checks.answer_ended(await answer(engine, [1, 2, 3], params), params)
    output = await answer(engine, [1, 2, 3], GREEDY)
    checks.answer_ended(output | {"finish_reason": "abort"}, GREEDY)  # type: ignore[typeddict-item]
    AnswerChecks(engine, metrics, share=0.0, is_idle=lambda: True).answer_ended(output, GREEDY)
    await asyncio.sleep(0.1)
    assert count(metrics) == (0, 0)


@on_a_loop
async def test_server_with_verify_share_checks_its_answers(engine: AsyncLLM) -> None:
    site = make_site(engine, verify_share=1.0)
    async with asgi_client(site.gate.outermost) as client:
        body = {"prompt": [[1, 2, 3], [4, 5, 6]], "max_tokens": 5, "temperature": 0}
        for stream in (False, True):
            assert (await client.post("/v1/completions", json=body | {"stream": stream})).status_code == 200
        await until(lambda: count(site.service.metrics) == (4, 0))


def test_agrees_allows_ties_only() -> None:
    entry = {5: Logprob(-0.7, 1, None), 6: Logprob(-0.8, 2, None)}
    for token_id, tie, expected in ((5, 0.002, True), (6, 0.002, False), (6, 0.25, True), (7, 0.25, False)):
        assert agrees([5, token_id], [entry, entry], tie) == expected
