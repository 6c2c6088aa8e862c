"""An engine remembers nothing of requests that have ended."""

import itertools
from contextlib import aclosing
from pathlib import Path

import pytest
from event_loops import on_a_loop
from leftovers import FIRST_ID, leftovers
from tiny_engines import KINDS

from nanovllm import LLM, AsyncLLM, RequestError, SamplingParams
from nanovllm.sampling_params import StructuredOutputs

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 300, "enforce_eager": True}
MANY = [
    SamplingParams(max_tokens=8, ignore_eos=True, n=3),
    SamplingParams(max_tokens=20, stop=["e"], logprobs=2, presence_penalty=0.5),
    SamplingParams(max_tokens=5, prompt_logprobs=1, stop_token_ids=list(range(200))),
    SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(choice=["yes", "no"])),
]


@pytest.mark.parametrize("kind", KINDS)
def test_llm_remembers_nothing_of_requests_that_have_ended(model: Path, kind: str) -> None:
    with LLM(str(model), **(OPTIONS | KINDS[kind] | {"speculation": "prompt_lookup"})) as llm:
        llm.engine._request_ids = itertools.count(FIRST_ID)
        llm.generate(["the same words, the same words", "Hello", [1, 2] * 200, "x"], MANY, use_tqdm=False)
        running, waiting = (llm.add_request([3, 4] * 100, SamplingParams(max_tokens=90)) for _ in range(2))
        llm.step()
        assert leftovers(llm)
        llm.abort(waiting)
        llm.abort(running)
        while not llm.is_finished():
            llm.step()
        with pytest.raises(RequestError):
            llm.generate([1] * 5000, use_tqdm=False)
        assert leftovers(llm) == []


@on_a_loop
async def test_async_llm_remembers_nothing_of_requests_that_have_ended(model: Path) -> None:
    llm = AsyncLLM(model, **OPTIONS, **KINDS["offload"])
    llm.llm.engine._request_ids = itertools.count(FIRST_ID)
    async for _ in llm.generate(["Hello", [1, 2] * 200], MANY[0]):
        pass
    async with aclosing(llm.generate("Hello", SamplingParams(max_tokens=900, ignore_eos=True))) as updates:
        await anext(updates)
    async for _ in llm.generate("Hello", MANY[1]):
        pass
    left = leftovers(llm)
    llm.close()
    assert left == []
