"""Every feature of the engine through the official client, against what LLM.generate gives for the same parameters."""

import json
import re
from typing import Any, Literal

import openai
from pydantic import BaseModel

from nanovllm import AsyncLLM, SamplingParams

LINE = "The passkey is 4711, says the old captain."
PROMPT = f"{LINE}\n\nThe passkey is"
MESSAGES: list[Any] = [{"role": "user", "content": f"{LINE}\nThe passkey is"}]
NUM_TOKENS = 8
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
    """A class that an answer can be parsed as."""

    kind: Literal["ship", "whale"]
    sure: bool


SCHEMA = Sighting.model_json_schema()


def expected_texts(engine: AsyncLLM, prompt: str | list[int], fields: dict[str, Any]) -> list[str]:
    """The answers of the engine itself."""
    biases = fields.get("logit_bias")
    if biases is not None:
        fields = fields | {"logit_bias": {int(token_id): bias for token_id, bias in biases.items()}}
    params = SamplingParams(**({"temperature": 0, "max_tokens": NUM_TOKENS} | fields))
    (output,) = engine.llm.generate([prompt], params, use_tqdm=False)
    return [str(each["text"]) for each in output.get("outputs", [output])]


def test_fields_change_the_answer_as_in_the_engine(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    for prompt, fields, extra in EDITS:
        asked = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": extra} | fields
        done = client.completions.create(prompt=prompt, **asked)
        assert [choice.text for choice in done.choices] == expected_texts(served[0], prompt, fields | extra)
        without_last = dict(list((fields | extra).items())[:-1])
        assert done.choices[0].text != expected_texts(served[0], prompt, without_last)[0], extra or fields
        streamed = client.completions.create(prompt=prompt, stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in streamed) == done.choices[0].text
        messages: list[Any] = [{"role": "user", "content": prompt}]
        (token_ids,) = served[0].llm.chat_token_ids(messages)
        chat = client.chat.completions.create(messages=messages, **asked)
        assert [chat.choices[0].message.content] == expected_texts(served[0], token_ids, fields | extra)


def test_n_answers_with_a_seed_are_those_of_the_engine(client: openai.OpenAI, served: tuple[AsyncLLM, str]) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 8, "max_tokens": NUM_TOKENS}
    (token_ids,) = served[0].llm.chat_token_ids(MESSAGES)
    expected = expected_texts(served[0], token_ids, fields)
    done = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    assert [choice.message.content for choice in done.choices] == expected
    completed = client.completions.create(model="tiny", prompt=PROMPT, **fields)
    assert [choice.text for choice in completed.choices] == expected_texts(served[0], PROMPT, fields)
    assert len(set(expected)) == 3


def test_usage_counts_cached_tokens_once_for_each_prompt(client: openai.OpenAI) -> None:
    prompt = "How often is this prompt counted? " * 30
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "n": 3}
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Again. " * 90}], "max_tokens": 1}
    with_usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    first = client.completions.create(**fields).usage
    assert first is not None and first.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    client.chat.completions.create(**chat)
    again = [client.completions.create(**fields), [*client.completions.create(**fields, **with_usage)][-1]]
    chats = [client.chat.completions.create(**chat, n=3), [*client.chat.completions.create(**chat, **with_usage)][-1]]
    for usage in (each.usage for each in (*again, *chats)):
        assert usage is not None and usage.prompt_tokens_details is not None
        assert 512 <= (usage.prompt_tokens_details.cached_tokens or 0) <= usage.prompt_tokens
    assert all(each.usage and (each.usage.prompt_tokens, each.usage.completion_tokens) == (1020, 3) for each in again)


# -- the form of the answer ------------------------------------------------------------------------------------------


def test_chat_json_schema_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    """The client makes the schema from the class, with strict=true, and validates the answer."""
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "logit_bias": NO_SPACES}
    done = client.chat.completions.parse(**fields, response_format=Sighting)
    assert isinstance(done.choices[0].message.parsed, Sighting)
    assert done.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**fields, response_format=Sighting) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(done.choices[0].message.parsed, Sighting)


def test_chat_json_object_starts_an_object(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "logit_bias": {str(ord("}")): 100}}
    done = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=60, **fields)
    assert json.loads(done.choices[0].message.content or "") == {}


def test_completion_json_matches_its_schema(client: openai.OpenAI) -> None:
    for extra in (
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sighting", "schema": SCHEMA}}},
    ):
        fields: dict[str, Any] = {"max_tokens": 60, "logit_bias": NO_SPACES, "extra_body": extra}
        done = client.completions.create(model="tiny", prompt=PROMPT, **fields)
        Sighting.model_validate_json(done.choices[0].text)


def test_regex_and_choice_match_the_whole_answer(client: openai.OpenAI) -> None:
    regex, choices = "[a-c]{3}-[0-9]{2}", ["left", "straight on", "über den Fluß"]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 2, "seed": 1, "max_tokens": 30}
    extras: list[dict[str, Any]] = [{"structured_outputs": {"regex": regex}}, {"guided_regex": regex}]
    for extra in extras:
        done = client.completions.create(prompt=PROMPT, n=3, extra_body=extra, **asked)
        assert all(re.fullmatch(regex, choice.text) and choice.finish_reason == "stop" for choice in done.choices)
        chat = client.chat.completions.create(messages=MESSAGES, extra_body=extra, stream=True, **asked)
        assert re.fullmatch(regex, "".join(chunk.choices[0].delta.content or "" for chunk in chat))
    extras = [{"structured_outputs": {"choice": choices}}, {"guided_choice": choices}]
    for extra in extras:
        answers = client.chat.completions.create(messages=MESSAGES, n=3, extra_body=extra, **asked)
        assert all(choice.message.content in choices for choice in answers.choices)
