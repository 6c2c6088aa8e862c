"""Offload at the sizes of Qwen3-0.6B: slots and staging of several GiB, contexts of 9,000 tokens, the whole vocabulary.

The answers equal the answers of an engine whose cache is all on the GPU. Weights are random. Where slots are few,
drafts come from a shadow, as by default.
"""

import random
from typing import Any, TypeAlias

import pytest
from integrity import check_scheduler

from nanovllm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

Answers: TypeAlias = list[tuple[list[int], list[float]]]
ENGINE = {"device": "cuda", "dtype": "float32", "load_format": "dummy", "max_model_len": 16384, "max_num_seqs": 8}
OFFLOAD = {"enable_cpu_offload": True, "cpu_attention": "off"}
CACHES: dict[str, dict[str, Any]] = {
    "small slots, streamed": {"kvcache_block_size": 256, "num_cpu_blocks": 120, "num_gpu_blocks": 20},
    "small slots, resident": {"kvcache_block_size": 256, "num_cpu_blocks": 120, "num_gpu_blocks": 100},
    "large slots, streamed": {"kvcache_block_size": 4096, "num_cpu_blocks": 10, "num_gpu_blocks": 4},
    "large slots, the CPU attends": {
        "kvcache_block_size": 4096,
        "num_cpu_blocks": 10,
        "num_gpu_blocks": 3,
        "cpu_attention": "on",
    },
}


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(150_000), k=num_tokens)


def answers(llm: LLM) -> Answers:
    """Two long prompts, then short ones that arrive while others decode, so that their chunks run as graphs. The first
    long prompt again finds its blocks in CPU memory.
    """
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    ids, finished = [llm.add_request(prompt(9000, seed), params) for seed in range(2)], {}
    for step in range(10_000):
        if 2 <= step < 8:
            ids.append(llm.add_request(prompt(100 * step, step), params))
        if step > 8 and llm.is_finished():
            break
        finished |= llm.step().finished
    again: Any = llm.generate([prompt(9000, 0)], params, use_tqdm=False)[0]
    assert again["num_cached_tokens"] > 8000
    outputs: list[Any] = [*(finished[request_id] for request_id in ids), again]
    check_scheduler(llm.scheduler)
    return [
        (
            output["token_ids"],
            [entry[i].logprob for entry, i in zip(output["logprobs"], output["token_ids"], strict=True)],
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def expected() -> Answers:
    with LLM("qwen3-0.6b", num_kvcache_blocks=120, **ENGINE) as llm:
        return answers(llm)


@pytest.mark.parametrize("cache", CACHES)
def test_offload_of_real_size_gives_the_answers_of_all_gpu(cache: str, expected: Answers) -> None:
    """A GPU test of copies and pools that runs only at the size of tiny models overlooks what the driver refuses."""
    with LLM("qwen3-0.6b", **(ENGINE | OFFLOAD | CACHES[cache])) as llm:
        assert ("num_shadow_pages" in llm.stats()) == (
            cache in ("small slots, streamed", "large slots, the CPU attends")
        )
        for (token_ids, logprobs), (expected_ids, expected_logprobs) in zip(answers(llm), expected, strict=True):
            assert token_ids == expected_ids
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
