"""A real model, SmolLM2-135M-Instruct, on real text: its answers in every mode are those of transformers, in fp32."""

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from smollm2 import GGUF_NAME, gguf_directory, write_model
from tiny_models import greedy_reference

from benchmarks import real_model
from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals

pytestmark = pytest.mark.slow
FILE = gguf_directory() / GGUF_NAME
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OFFLOAD = {"enable_cpu_offload": True, "kvcache_block_size": 256}
MODES: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    "two slots": OFFLOAD | {"num_gpu_blocks": 2, "speculation": "off"},
    "the CPU's part": OFFLOAD | {"num_gpu_blocks": 4, "cpu_attention": "on", "speculation": "off"},
    "prompt lookup, small chunks": {"speculation": "prompt_lookup", "max_num_batched_tokens": 100},
    "resident drafts": OFFLOAD | {"num_gpu_blocks": 3, "speculation": "resident"},
    "shadow drafts": OFFLOAD | {"num_gpu_blocks": 3, "speculation": "shadow", "shadow_bits": 4},
}


@pytest.fixture(scope="module")
def expected(
    smollm2_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Prompts of real text and chats, with the answers of transformers."""
    from transformers import AutoTokenizer

    directory = write_model(tmp_path_factory.mktemp("values"), smollm2_tokenizer, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_tokenizer)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompts = [
        tokenizer.encode(inspect.getsource(argparse)[1000:5000]),
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
    ]
    yield [(prompt, greedy_reference(directory, prompt, NUM_TOKENS)) for prompt in prompts]


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_transformers(mode: str, expected: list[tuple[list[int], list[int]]]) -> None:
    """Asked twice: the second time, for fewer tokens, the prefixes are found."""
    prompts, answers = zip(*expected, strict=True)
    internals = Internals(always_guesses=True)  # even where a CPU would not gain by drafts
    with LLM(FILE, device="cpu", dtype="float32", max_model_len=2048, internals=internals, **MODES[mode]) as llm:
        for attempt, num_tokens in enumerate((NUM_TOKENS, NUM_TOKENS // 3)):
            outputs = llm.generate(list(prompts), replace(GREEDY, max_tokens=num_tokens), use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == [answer[:num_tokens] for answer in answers]
            assert all((output["num_cached_tokens"] > 0) == (attempt == 1) for output in outputs[:1])
        stats = llm.stats()
    if MODES[mode].get("speculation", "off") != "off":
        assert stats["num_accepted_guesses"] > 0, "real text has tokens that can be drafted"


def test_drafts_from_a_shadow_in_4_bits_are_right() -> None:
    """The log has the shares by task and bits."""
    cases = {"tasks": ["prose", "quote"], "temperatures": [0.0, 0.7], "drafters": ["shadow, 4 bits"]}
    args = argparse.Namespace(device="cpu", prompts=1, prompt_tokens=700, answer_tokens=128, **cases)
    rows = list(real_model.acceptance(args))
    num_counted = sum(row["num_draft_tokens"] for row in rows)
    assert num_counted > 400 and sum(row["right"] * row["num_draft_tokens"] for row in rows) >= 0.95 * num_counted


def test_answers_after_a_restart_come_from_the_disk(
    expected: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    prompt, answer = expected[0]
    for attempt in range(2):
        with LLM(FILE, device="cpu", dtype="float32", max_model_len=2048, kv_disk_path=str(tmp_path)) as llm:
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output["token_ids"] == answer and (output["num_cached_tokens"] > 0) == (attempt == 1)


def test_chat_streams_the_text_of_the_answer() -> None:
    """The template, the end token and the text come from the file."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=50)
    with LLM(FILE, device="cpu", dtype="float32", max_model_len=2048) as llm:
        (output,) = llm.chat(chat, params, use_tqdm=False)
        prompt = llm.text.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        pieces = list(llm.stream(prompt, params))
    assert output["text"] == "The capital of France is Paris." and output["finish_reason"] == "stop"
    assert "".join(pieces) == output["text"] and len(pieces) > 5
