"""Log-probabilities in OpenAI's two forms and in vLLM's, and what lm_eval asks for, against those of the engine."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from http_server import OPTIONS
from tiny_models import write_tiny_model
from tokenizer_kinds import write_tokenizer

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.entrypoints.server import make_app
from nanovllm.entrypoints.server.answers import chat_logprobs, completion_logprobs
from nanovllm.entrypoints.server.errors import dumps_in_parts
from nanovllm.plan.outputs import Logprob

PROMPT = "One two three four.\nOne two"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


def engine_logprobs(engine: AsyncLLM, prompt: Any, max_tokens: int) -> tuple[list[float], list[float | None]]:
    """Log-probabilities of the answer's tokens and of the prompt's."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, prompt_logprobs=2)
    (output,) = engine.llm.generate([prompt], params, use_tqdm=False)
    first = [None if entry is None else next(iter(entry.values())).logprob for entry in output["prompt_logprobs"]]
    return [next(iter(entry.values())).logprob for entry in output["logprobs"]], first


def test_completion_logprobs_are_those_of_the_engine(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    expected, _ = engine_logprobs(served[0], PROMPT, 6)
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "logprobs": 2, "temperature": 0}
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    for found in (streamed, [client.completions.create(**fields).choices[0].logprobs]):
        logprobs = [each for each in found if each is not None]
        assert [token for each in logprobs for token in each.tokens or []] == list(" three")
        assert [value for each in logprobs for value in each.token_logprobs or []] == pytest.approx(expected, abs=1e-4)
        assert [value for each in logprobs for value in each.text_offset or []] == list(range(6))
        assert all(len(top) in (2, 3) for each in logprobs for top in each.top_logprobs or [])


def test_chat_logprobs_are_those_of_the_engine(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    engine, _ = served
    expected, _ = engine_logprobs(engine, engine.llm.chat_token_ids(MESSAGES)[0], 5)
    fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    streamed = [
        chunk.choices[0].logprobs for chunk in client.chat.completions.create(model="tiny", **fields, stream=True)
    ]
    for found in (streamed, [client.chat.completions.create(model="tiny", **fields).choices[0].logprobs]):
        content = [token for each in found if each is not None for token in each.content or []]
        assert [token.token for token in content] == list(" thre")
        assert [token.bytes for token in content] == [[ord(char)] for char in " thre"]
        assert [token.logprob for token in content] == pytest.approx(expected, abs=1e-4)
        assert all(len(token.top_logprobs) == 3 for token in content)
        assert all(token.top_logprobs[0].token == token.token for token in content)  # it is greedy


def test_completion_echo_with_logprobs_scores_the_prompts(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    """This is how lm_eval finds out how likely a text is. Regression: only the first of n answers had the prompt's."""
    fields: dict[str, Any] = {"model": "tiny", "echo": True, "logprobs": 1, "temperature": 0}
    for prompt, max_tokens, n in ((PROMPT, 0, 1), (PROMPT, 1, 1), (PROMPT, 2, 2), ("ab", 2, 2)):
        token_ids = list(prompt.encode())
        answer, scores = engine_logprobs(served[0], token_ids, max(1, max_tokens))
        done = client.completions.create(prompt=[token_ids], max_tokens=max_tokens, n=n, **fields)
        for choice in done.choices:
            logprobs = choice.logprobs
            assert logprobs is not None and logprobs.tokens is not None
            assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert logprobs.token_logprobs[1:] == pytest.approx(scores[1:] + answer[:max_tokens], abs=1e-4)
            assert "".join(logprobs.tokens) == choice.text
            assert logprobs.text_offset == list(range(len(prompt) + max_tokens))
        assert done.usage is not None and done.usage.completion_tokens == n * max_tokens


@pytest.mark.parametrize("kind", ["byte level", "SentencePiece"])
def test_offsets_of_an_echo_are_places_in_its_text(tmp_path: Path, kind: str) -> None:
    """Regression: they counted the token for the beginning, which the tokenizer adds and the text of a string lacks."""
    model = write_tiny_model(tmp_path, "llama", vocab_size=384)
    write_tokenizer(kind, model)
    body = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 3}
    with closing(AsyncLLM(str(model), device="cpu")) as engine, TestClient(make_app(engine, OPTIONS)) as web:
        ids = engine.llm.tokenizer.encode("the wine")
        for prompt in ("the wine", ids, ids[1:]):
            (choice,) = web.post("/v1/completions", json={"prompt": prompt, **body}).json()["choices"]
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert len(tokens) == len(offsets) == len(ids) + 3 - (prompt == ids[1:]) and offsets[0] == 0
            ends = [*offsets[1:], len(choice["text"])]
            parts = [choice["text"][start:end] for start, end in zip(offsets, ends, strict=True)]
            assert parts[2:] == tokens[2:] and "".join(tokens[:2]).endswith("".join(parts[:2]))


def test_prompt_logprobs_have_the_form_of_vllm(web: httpx.Client, served: tuple[AsyncLLM, str]) -> None:
    _, expected = engine_logprobs(served[0], PROMPT, 1)
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 1, "n": 2}
    choices = web.post("/v1/completions", json=body).json()["choices"]
    for choice in choices:  # regression: the second answer had an empty list
        assert choice["logprobs"] is None
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        own = [entry[str(token_id)] for entry, token_id in zip(rest, PROMPT.encode()[1:], strict=True)]
        assert [each["logprob"] for each in own] == pytest.approx(expected[1:], abs=1e-4)
        assert "".join(each["decoded_token"] for each in own) == PROMPT[1:]


def test_completion_logprobs_tokens_of_equal_text_keep_the_most_likely() -> None:
    entry = {7: Logprob(-2.0, 3, "\ufffd"), 8: Logprob(-0.5, 1, "\ufffd"), 9: Logprob(-1.0, 2, "x")}
    found = completion_logprobs([None, entry], 2, first_text="ab", offset=5)
    assert found["top_logprobs"] == [None, {"\ufffd": -0.5, "x": -1.0}]
    assert (found["tokens"], found["token_logprobs"], found["text_offset"]) == (["ab", "\ufffd"], [None, -2.0], [5, 7])
    in_order = {8: Logprob(-0.5, 1, "\ufffd"), 9: Logprob(-1.0, 2, "\ufffd")}
    assert completion_logprobs([in_order], 2)["top_logprobs"] == [{"\ufffd": -0.5}]


def test_json_in_parts_is_the_same_json() -> None:
    for content in ({}, [], {"a": [1.5, None, {"b": "\ud800"}] * 70, "c": [[]] * 250, "d": {"e": [{}]}}):
        assert dumps_in_parts(content) == json.dumps(content)


def test_chat_logprobs_lists_the_most_likely_in_order() -> None:
    entry = {7: Logprob(-1.0, 2, "é"), 8: Logprob(-0.5, 1, "x"), 9: Logprob(-2.0, 3, None)}
    (token,) = chat_logprobs([entry], 2)["content"]
    assert (token["token"], token["bytes"]) == ("é", [195, 169])
    assert [top["token"] for top in token["top_logprobs"]] == ["x", "é"]
