"""Cache salts: prompts share KV exactly if their salts are equal, through every way in."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, RequestError, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [i % 300 for i in range(600)]
SHARED = 512  # two blocks of 256 tokens
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 40, "enforce_eager": True}


@pytest.fixture(params=["resident", "offload"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    offload = {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 40, "kvcache_block_size": 256}
    options = OPTIONS if request.param == "resident" else OPTIONS | offload | {"num_kvcache_blocks": -1}
    with LLM(model, **options) as llm:
        yield llm


def salted(salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "cache_salt": salt}


def num_cached(llm: LLM, prompt: Any) -> int:
    return llm.generate([prompt], PARAMS, use_tqdm=False)[0]["num_cached_tokens"]


def test_generate_shares_only_between_equal_salts(llm: LLM) -> None:
    """Each salt computes the prompt once. No salt is a salt like the others."""
    salts = ["a", "b", None, "\ud800"]
    assert [num_cached(llm, salted(salt)) for salt in salts] == [0, 0, 0, 0]
    assert [num_cached(llm, salted(salt)) for salt in salts] == [SHARED] * 4
    assert num_cached(llm, PROMPT) == SHARED  # as with the salt None


def test_generate_salt_changes_no_token(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, salted("a"), salted("b")], PARAMS, use_tqdm=False)
    assert len({tuple(output["token_ids"]) for output in outputs}) == 1


def test_add_request_carries_the_salt(llm: LLM) -> None:
    cached = []
    for salt in ("a", "b", "a"):
        llm.add_request(salted(salt), PARAMS)
        while not llm.is_finished():
            cached += [output["num_cached_tokens"] for output in llm.step().finished.values()]
    assert cached == [0, 0, SHARED]


def test_async_generate_carries_the_salt(model: Path) -> None:
    async def cached(engine: AsyncLLM, salt: str) -> int:
        outputs = [update.output async for update in engine.generate(salted(salt), PARAMS)]
        assert outputs[-1] is not None
        return outputs[-1]["num_cached_tokens"]

    async def main() -> list[int]:
        async with AsyncLLM(model, **OPTIONS) as engine:
            return [await cached(engine, salt) for salt in ("a", "b", "a")]

    assert asyncio.run(main()) == [0, 0, SHARED]


@pytest.mark.parametrize("salt", ["", 3, ["a"]])
def test_add_request_bad_salt_is_refused(llm: LLM, salt: Any) -> None:
    with pytest.raises(RequestError, match=r"cache_salt=.* must be a non-empty string"):
        llm.add_request(salted(salt), PARAMS)
