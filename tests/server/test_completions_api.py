"""POST /v1/completions through the openai client, whole and streamed."""

import json
from typing import Any

import httpx
import openai
import pytest

from nanovllm import AsyncLLM, SamplingParams

LINE = "The passkey is 4711, says the old captain."
PROMPT = f"{LINE}\n\nThe passkey is"
REST = LINE.removeprefix("The passkey is")


def test_completion_text_prompt_is_continued(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=len(REST))
    assert done.choices[0].text == REST
    assert (done.object, done.model, done.choices[0].finish_reason) == ("text_completion", "tiny", "length")
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(PROMPT)
    assert done.usage.completion_tokens == len(REST)
    assert done.usage.total_tokens == len(PROMPT) + len(REST)


def test_completion_default_length_is_16(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt=PROMPT).choices[0].text == REST[:16]


def test_completion_repeated_prompt_reports_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "a line that fills more than a block. " * 10 + PROMPT
    for is_repeated in (False, True):
        usage = client.completions.create(model="tiny", prompt=prompt).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == is_repeated


def test_completion_token_ids_is_continued(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt=list(PROMPT.encode()), max_tokens=10)
    assert done.choices[0].text == REST[:10]


@pytest.mark.parametrize("as_ids", [False, True])
def test_completion_list_of_prompts_answers_each_n_times(client: openai.OpenAI, as_ids: bool) -> None:
    texts = [PROMPT, f"{LINE}\nThe passkey"]
    prompts: Any = [list(text.encode()) for text in texts] if as_ids else texts
    done = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, n=2, echo=True)
    expected = [PROMPT + REST[:8]] * 2 + [texts[1] + (" is" + REST)[:8]] * 2
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(map(len, texts))
    assert done.usage.completion_tokens == 4 * 8


def test_completion_streamed_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == REST[:20]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len(chunks) > 5
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_streamed_several_answers_with_echo_and_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt=[PROMPT, LINE],
        max_tokens=5,
        n=2,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, chunks = ["", "", "", ""], list(stream)
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == texts[1] == PROMPT + REST[:5]
    assert texts[2].startswith(LINE) and texts[3].startswith(LINE)
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT) + len(LINE), 20)


def test_completion_stream_with_the_usage_so_far(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "n": 2, "stream": True, "stream_options": options}
    response = httpx.post(f"{url}/v1/completions", json=body)
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in response.text.split("\n\n")[:-2]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and 0 < counts[0] < 12 == counts[-1]
    assert {usage["prompt_tokens"] for usage in usages} == {len(PROMPT)}
    assert all(usage["total_tokens"] == len(PROMPT) + usage["completion_tokens"] for usage in usages)


def test_completion_stream_events_have_the_form_of_sse(url: str) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}


def test_completion_stop_string_and_fields_of_vllm(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stop=[","])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (" 4711", "stop")
    extra = {"include_stop_str_in_output": True, "top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [44]}
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stop=",", extra_body=extra)
    assert done.choices[0].text == " 4711,"


def test_completion_seed_gives_the_tokens_of_llm(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    params = SamplingParams(temperature=1e5, seed=3, max_tokens=12, n=2, ignore_eos=True)
    expected = served[0].llm.generate([PROMPT] * 2, params.per_answer(), use_tqdm=False)
    done = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=1e5, seed=3, max_tokens=12, n=2, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in done.choices] == [output["text"] for output in expected]
    assert done.choices[0].text != done.choices[1].text


def test_completion_max_tokens_0_with_echo_returns_the_prompt(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True)
    assert done.choices[0].text == PROMPT
    assert done.usage is not None and done.usage.completion_tokens == 0
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT
