"""Every feature of the engine through the official client, against what LLM.generate gives for the same parameters."""

import asyncio
import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from nanovllm import AsyncLLM, SamplingParams

LINE = "The passkey is 4711, says the old captain."
PROMPT = f"{LINE}\n\nThe passkey is"
MESSAGES: list[Any] = [{"role": "user", "content": f"{LINE}\nThe passkey is"}]
REPEATED = "ab"  # continued by more of "b"
NEARLY_Q = {"113": 23.5}  # after REPEATED, with this bias, "q" is only a little less likely than "b"
NO_SPACES = {str(ord(space)): -100 for space in " \t\n\r"}  # the model never ends those that JSON allows

# Fields of a request: those of OpenAI's API, and those for extra_body. The last one changes the answer
EDITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (REPEATED, {"logit_bias": NEARLY_Q, "presence_penalty": 2}, {}),
    (REPEATED, {"logit_bias": NEARLY_Q, "frequency_penalty": 2}, {}),
    (REPEATED, {"logit_bias": NEARLY_Q, "presence_penalty": 2, "frequency_penalty": -2}, {}),
    (" a b c d e f", {}, {"repetition_penalty": 3}),
    (REPEATED, {"seed": 4, "temperature": 8}, {}),
    (REPEATED, {"seed": 4, "temperature": 8, "top_p": 0.5}, {}),
    (REPEATED, {"seed": 5, "temperature": 8}, {"top_k": 2}),
    (REPEATED, {"seed": 6, "temperature": 8}, {"min_p": 0.01}),
    (PROMPT, {"logit_bias": {"52": -100, "65": 100}}, {}),
    (PROMPT, {}, {"bad_words": [" 4711", "7"]}),
    (PROMPT, {"stop": [",", "7"]}, {}),
    (PROMPT, {"stop": ","}, {"include_stop_str_in_output": True}),
    (PROMPT, {}, {"stop_token_ids": [ord(",")]}),
    (PROMPT, {"logit_bias": {"256": 100}}, {"min_tokens": 3}),
    (PROMPT, {"logit_bias": {"256": 60}}, {"ignore_eos": True, "skip_special_tokens": False}),
]


class Sighting(BaseModel):
    """What an answer can be parsed as."""

    kind: Literal["ship", "whale"]
    sure: bool


SCHEMA = Sighting.model_json_schema()


def expected_texts(engine: AsyncLLM, prompt: str | list[int], fields: dict[str, Any]) -> list[str]:
    """What the engine itself answers."""
    biases = fields.get("logit_bias")
    if biases is not None:
        fields = fields | {"logit_bias": {int(token_id): bias for token_id, bias in biases.items()}}
    params = SamplingParams(**({"temperature": 0, "max_tokens": 12} | fields))
    (output,) = engine.llm.generate([prompt], params, use_tqdm=False)
    return [str(each["text"]) for each in output.get("outputs", [output])]


def test_usage_counts_cached_tokens_once_for_each_prompt(client: openai.OpenAI) -> None:
    prompt = "How often is this prompt counted? " * 30
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "n": 3}
    whole = [client.completions.create(**fields).usage for _ in range(2)][1]
    *_, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for usage in (whole, last.usage):
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 3)
        assert 512 <= (usage.prompt_tokens_details.cached_tokens or 0) <= usage.prompt_tokens


@pytest.mark.parametrize(("prompt", "fields", "extra"), EDITS)
def test_completion_field_changes_the_answer_as_in_the_engine(
    client: openai.OpenAI,
    served: tuple[AsyncLLM, str],
    prompt: str,
    fields: dict[str, Any],
    extra: dict[str, Any],
) -> None:
    asked = {"temperature": 0, "max_tokens": 12} | fields
    done = client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **asked)
    assert [choice.text for choice in done.choices] == expected_texts(served[0], prompt, fields | extra)
    without_last = dict(list((fields | extra).items())[:-1])
    assert done.choices[0].text != expected_texts(served[0], prompt, without_last)[0]
    streamed = client.completions.create(model="tiny", prompt=prompt, extra_body=extra, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in streamed) == done.choices[0].text


@pytest.mark.parametrize(("prompt", "fields", "extra"), EDITS)
def test_chat_field_changes_the_answer_as_in_the_engine(
    client: openai.OpenAI,
    served: tuple[AsyncLLM, str],
    prompt: str,
    fields: dict[str, Any],
    extra: dict[str, Any],
) -> None:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    (token_ids,) = served[0].llm.chat_token_ids(messages)
    asked = {"temperature": 0, "max_tokens": 12} | fields
    done = client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **asked)
    assert [done.choices[0].message.content] == expected_texts(served[0], token_ids, fields | extra)


def test_chat_n_answers_with_a_seed_are_those_of_the_engine(
    client: openai.OpenAI, served: tuple[AsyncLLM, str]
) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 8, "max_tokens": 12}
    (token_ids,) = served[0].llm.chat_token_ids(MESSAGES)
    expected = expected_texts(served[0], token_ids, fields)
    done = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    assert [choice.message.content for choice in done.choices] == expected
    assert len(set(expected)) == 3


def test_min_tokens_delays_the_end(client: openai.OpenAI) -> None:
    lengths = []
    for min_tokens in (0, 40):
        usage = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=50, extra_body={"min_tokens": min_tokens}
        ).usage
        assert usage is not None
        lengths.append(usage.completion_tokens)
    assert lengths[0] < 40 <= lengths[1]


# -- the form of the answer ------------------------------------------------------------------------------------------


def test_chat_json_schema_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    """The client makes the schema from the class, with strict=true, and validates the answer."""
    done = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Sighting, max_tokens=60, logit_bias=NO_SPACES
    )
    assert isinstance(done.choices[0].message.parsed, Sighting)
    assert done.choices[0].finish_reason == "stop"


def test_chat_json_schema_streamed_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Sighting, max_tokens=60, logit_bias=NO_SPACES
    ) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(done.choices[0].message.parsed, Sighting)


def test_chat_json_object_starts_an_object(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=60,
        logit_bias={str(ord("}")): 100},
    )
    assert json.loads(done.choices[0].message.content or "") == {}


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sighting", "schema": SCHEMA}}},
    ],
)
def test_completion_json_matches_its_schema(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, logit_bias=NO_SPACES, extra_body=extra)
    Sighting.model_validate_json(done.choices[0].text)


@pytest.mark.parametrize("field", ["structured_outputs", "guided_regex"])
def test_regex_matches_the_whole_answer(client: openai.OpenAI, field: str) -> None:
    regex = "[a-c]{3}-[0-9]{2}"
    extra: dict[str, Any] = {field: {"regex": regex} if field == "structured_outputs" else regex}
    done = client.completions.create(
        model="tiny", prompt=PROMPT, n=3, temperature=2, seed=1, extra_body=extra, max_tokens=20
    )
    assert all(re.fullmatch(regex, choice.text) and choice.finish_reason == "stop" for choice in done.choices)
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra, stream=True)
    assert re.fullmatch(regex, "".join(chunk.choices[0].delta.content or "" for chunk in chat))


@pytest.mark.parametrize("field", ["structured_outputs", "guided_choice"])
def test_choice_is_one_of_the_strings(client: openai.OpenAI, field: str) -> None:
    choices = ["left", "straight on", "über den Fluß"]
    extra: dict[str, Any] = {field: {"choice": choices} if field == "structured_outputs" else choices}
    done = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, temperature=2, seed=1, extra_body=extra, max_tokens=30
    )
    assert all(choice.message.content in choices for choice in done.choices)


def test_structured_answer_has_logprobs_of_its_own_tokens(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=1,
        extra_body={"structured_outputs": {"choice": ["left"]}},
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [token.token for token in logprobs.content][:4] == list("left")


# -- what is reported ------------------------------------------------------------------------------------------------


def test_prompt_logprobs_reach_the_client_as_an_additional_field(
    client: openai.OpenAI, served: tuple[AsyncLLM, str]
) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    (output,) = served[0].llm.generate([list(PROMPT.encode())], params, use_tqdm=False)
    expected = [next(iter(entry.values())).logprob for entry in output["prompt_logprobs"][1:]]
    done = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, n=2, seed=1, extra_body={"prompt_logprobs": 1}
    )
    assert done.choices[0].model_extra == done.choices[1].model_extra  # the second answer had an empty list
    first, *rest = (done.choices[0].model_extra or {})["prompt_logprobs"]
    assert first is None
    own = [entry[str(token_id)]["logprob"] for entry, token_id in zip(rest, PROMPT.encode()[1:], strict=True)]
    assert own == pytest.approx(expected, abs=1e-4)


def test_chat_repeated_document_reports_cached_tokens(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "The ship's log says nothing. " * 20}, *MESSAGES]
    cached = []
    for _ in range(2):
        stream = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        usage = list(stream)[-1].usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0 and cached[1]


def test_completion_echo_with_logprobs_and_n_repeats_the_prompts(client: openai.OpenAI) -> None:
    """All answers to a prompt but the first echoed its text and left its log-probabilities out."""
    done = client.completions.create(
        model="tiny", prompt=[PROMPT, REPEATED], echo=True, logprobs=2, max_tokens=2, n=2, temperature=0
    )
    for choice, prompt in zip(done.choices, [PROMPT, PROMPT, REPEATED, REPEATED], strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
        assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert "".join(logprobs.tokens[: len(prompt)]) == prompt
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(prompt) + 2
        assert logprobs.text_offset[: len(prompt)] == list(range(len(prompt)))
        assert None not in logprobs.token_logprobs[1:]


def test_async_client_streams_and_leaves_early(url: str, served: tuple[AsyncLLM, str]) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=1500, extra_body={"ignore_eos": True}, stream=True
            )
            async with stream:
                first = await anext(aiter(stream))
            for _ in range(2500):
                if not served[0].llm.stats()["num_running"]:
                    break
                await asyncio.sleep(0.002)
            return first.choices[0].text

    assert asyncio.run(ask())
    assert served[0].llm.stats()["num_running"] == 0
