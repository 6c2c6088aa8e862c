"""Engines of one folder, one after the other, as a script: each loads what the one before stored, and stores more.

    python disk_restart.py '{"model": "qwen3-0.6b", "path": "/tmp/kv", "prompt_tokens": 6000, "engines": [{...}, ...]}'

`engines` are the options of each. The last line of the output is JSON, a list of `Result`s. A script has a separate
allocator (PYTORCH_CUDA_ALLOC_CONF).
"""

import json
import random
import sys
import time
from typing import Any, NamedTuple

import torch
from integrity import check_scheduler

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.disk import tier
from nanovllm.engine.setup import Internals
from nanovllm.plan.sequence import Sequence


class Answer(NamedTuple):
    """An answer, the tokens that were not computed for it, and a sum of each extent's K and V in each layer."""

    token_ids: list[int]
    logprobs: list[float]
    num_cached_tokens: int
    sums: list[int]


class Result(NamedTuple):
    """An engine's answers: to the prompt of the engine before, unless it is the first, and to its own."""

    answers: list[Answer]
    num_failures: int
    num_misses: int
    num_stored_bytes: int


def sums_of_blocks(llm: LLM, prompt: list[int]) -> list[int]:
    """A sum of the bits of each whole block of a prompt that is in memory, [K and V, layers, blocks] in a row."""
    kv, memory = llm.scheduler.kv, llm.runner.memory
    match = kv.pool.match(Sequence(0, prompt, SamplingParams(), seed=0))
    caches = memory.cache if memory.offload is None else (memory.offload.k_cache_cpu, memory.offload.v_cache_cpu)
    if memory.offload is not None:
        memory.offload.streams.synchronize()
    words = torch.int32 if memory.dtype == torch.float32 else torch.int16
    sums = [cache[:, list(match.whole_blocks)].view(words).sum((2, 3, 4), dtype=torch.int64) for cache in caches]
    return torch.cat(sums).flatten().tolist()


def answer(llm: LLM, prompt: list[int]) -> Answer:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    output: Any = llm.generate([prompt], params, use_tqdm=False)[0]
    if llm.runner.device.type == "cuda":
        torch.cuda.synchronize()
    chosen = [entry[token_id].logprob for entry, token_id in zip(output["logprobs"], output["token_ids"], strict=True)]
    return Answer(output["token_ids"], chosen, output["num_cached_tokens"], sums_of_blocks(llm, prompt))


def run(model: str, path: str, prompt_tokens: int, engines: list[dict[str, Any]]) -> list[Result]:
    tier.STALL_S = 600.0  # no load is given up because a thread was delayed
    results = []
    for i, options in enumerate(engines):
        numbers = [i - 1, i] if i else [0]
        prompts = [random.Random(number).choices(range(5, 250), k=prompt_tokens) for number in numbers]
        always_loads = Internals(least_load_tokens=0)
        with LLM(model, load_format="dummy", kv_disk_path=path, internals=always_loads, **options) as llm:
            answers = []
            for prompt in prompts:
                answers.append(answer(llm, prompt))
                while llm.scheduler.store.num_pending:  # type: ignore[union-attr]
                    time.sleep(0.01)
            stats = llm.stats()
            check_scheduler(llm.scheduler)
            counts = (int(stats[f"num_disk_{name}"]) for name in ("failures", "misses", "stored_bytes"))
            results.append(Result(answers, *counts))
    return results


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
