"""POST /v1/completions through the openai client, whole and streamed."""

import json
from typing import Any

import httpx
import openai

LINE = "The passkey is 4711, says the old captain."
PROMPT = f"{LINE}\n\nThe passkey is"
REST = LINE.removeprefix("The passkey is")


def test_completion_prompt_is_continued(client: openai.OpenAI) -> None:
    prompts: list[Any] = [PROMPT, list(PROMPT.encode())]
    for prompt in prompts:
        done = client.completions.create(model="tiny", prompt=prompt, max_tokens=len(REST))
        assert done.choices[0].text == REST
        assert (done.object, done.model, done.choices[0].finish_reason) == ("text_completion", "tiny", "length")
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), len(REST))
        assert done.usage.total_tokens == len(PROMPT) + len(REST)
    assert client.completions.create(model="tiny", prompt=PROMPT).choices[0].text == REST[:16]  # OpenAI's default
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stop=[","])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (" 4711", "stop")


def test_completion_list_of_prompts_answers_each_n_times(client: openai.OpenAI) -> None:
    texts = [PROMPT, f"{LINE}\nThe passkey"]
    expected = [PROMPT + REST[:8]] * 2 + [texts[1] + (" is" + REST)[:8]] * 2
    given: list[Any] = [texts, [list(text.encode()) for text in texts]]
    for prompts in given:
        fields: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": 8, "n": 2, "echo": True}
        done = client.completions.create(**fields)
        assert [choice.text for choice in done.choices] == expected
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
        *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        streamed = ["", "", "", ""]
        for chunk in chunks:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == expected and last.choices == []
        for usage in (done.usage, last.usage):
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, texts)), 4 * 8)


def test_completion_streamed_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == REST[:20]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len(chunks) > 5
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_stream_with_the_usage_so_far(web: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "n": 2, "stream": True, "stream_options": options}
    response = web.post("/v1/completions", json=body)
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in response.text.split("\n\n")[:-2]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and 0 < counts[0] < 12 == counts[-1]
    assert {usage["prompt_tokens"] for usage in usages} == {len(PROMPT)}
    assert all(usage["total_tokens"] == len(PROMPT) + usage["completion_tokens"] for usage in usages)


def test_completion_stream_events_have_the_form_of_sse(web: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    response = web.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}


def test_completion_max_tokens_0_with_echo_returns_the_prompt(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (PROMPT, "length")
    assert done.usage is not None and done.usage.completion_tokens == 0
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "stream": True, "stream_options": options}
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, **fields))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == PROMPT
    assert {chunk.usage.completion_tokens for chunk in chunks if chunk.usage} == {0}
