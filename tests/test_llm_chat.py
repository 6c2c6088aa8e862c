"""LLM.chat with vLLM's arguments, and what else scripts for vLLM call."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams, TextPrompt, TokensPrompt
from nanovllm.errors import RequestError

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 20, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }};{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}{% if think %}think{% endif %}"
)


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    with LLM(model, **OPTIONS) as llm:
        yield llm


def test_chat_passes_its_arguments_to_the_template(engine: LLM) -> None:
    def prompt_of(messages: Any = (USER,), **arguments: Any) -> str | None:
        (output,) = engine.chat(list(messages), GREEDY, False, chat_template=TEMPLATE, **arguments)
        assert output.prompt_token_ids == engine.get_tokenizer().encode(output.prompt, add_special_tokens=False)
        return output.prompt

    assert prompt_of() == "<user>Hi<answer>"
    assert prompt_of(add_generation_prompt=False) == "<user>Hi"
    assert prompt_of(tools=TOOLS, chat_template_kwargs={"think": True}) == "look;<user>Hi<answer>think"
    half = [USER, {"role": "assistant", "content": "Hel"}]
    continues = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(half, **continues) == "<user>Hi<assistant>Hel"
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    assert prompt_of([{"role": "user", "content": parts}]) == "<user>Hi\nyou<answer>"
    assert prompt_of(lora_request=None, chat_template_content_format="auto") == "<user>Hi<answer>"
    (output,) = engine.chat([USER], GREEDY, use_tqdm=False)
    assert output.prompt == "user: Hi\nassistant:"


def test_chat_refuses_by_name(engine: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    for messages, arguments, message in (
        ([{"role": "user", "content": [image]}], {}, r"messages\[0\] has a part {'type': 'image_url'.*expected"),
        ([{"role": "user", "content": ["Hi"]}], {}, r"messages\[0\] has a part 'Hi', expected"),
        ([USER], {"continue_final_message": True}, "add add_generation_prompt=False"),
        ([USER], {"chat_template_kwargs": {"tools": TOOLS}}, "chat_template_kwargs has tools, which is an argument"),
        ([USER], {"top_k": 5}, "chat has no option top_k; leave it out"),
        ([USER], {"lora_request": "x"}, "chat does not take lora_request='x': merge the adapter"),
        ([USER], {"enable_thinking": True}, "enable_thinking=True: use chat_template_kwargs=."),
    ):
        with pytest.raises(RequestError, match=message):
            engine.chat(messages, GREEDY, use_tqdm=False, **arguments)
    with pytest.raises(RequestError, match="the model's chat template does not take tools; leave them out"):
        engine.chat([USER], GREEDY, use_tqdm=False, tools=TOOLS)
    with pytest.raises(RequestError, match=r"prompt_token_ids=.*: give prompts="):
        engine.generate("Hi", GREEDY, False, prompt_token_ids=[[1]])
    with pytest.raises(RequestError, match=r"prompt_token_ids=.*: give prompts="):
        engine.generate(prompt_token_ids=[[1]], sampling_params=GREEDY)
    for first in (None, ["Hi"]):  # vLLM's former order: prompts, sampling_params, prompt_token_ids, use_tqdm
        with pytest.raises(RequestError, match=r"prompt_token_ids=\[\[1\]\]: give prompts="):
            engine.generate(first, GREEDY, [[1]], False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"inputs=.*: give prompts"):
        engine.generate(inputs=["Hi"], sampling_params=GREEDY)
    with pytest.raises(RequestError, match="use structured_outputs of SamplingParams"):
        engine.generate("Hi", GREEDY, guided_options_request={"guided_choice": ["a"]})
    with pytest.raises(RequestError, match="name the others"):
        engine.generate("Hi", GREEDY, False, None)
    with pytest.raises(RequestError, match="generate needs prompts"):
        engine.generate()


def test_chat_without_parameters_runs_to_the_end_of_the_context(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer ended after 64 tokens, which the command line's and the server's do not."""
    monkeypatch.setattr(engine, "sampling_defaults", {"temperature": 0, "ignore_eos": True})
    (output,) = engine.chat([{"role": "user", "content": "Hi" * 190}], use_tqdm=False)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 512 - len(output.prompt_token_ids) > 64
    monkeypatch.setattr(engine, "sampling_defaults", {"max_tokens": 3, "ignore_eos": True})
    assert len(engine.chat([USER], use_tqdm=False)[0].token_ids) == 3
    assert len(engine.generate("Hi", SamplingParams(ignore_eos=True), False)[0].token_ids) == 64


def test_prompts_may_be_vllms_dicts(engine: LLM) -> None:
    ids = engine.get_tokenizer().encode("Hello")
    prompts = [TextPrompt(prompt="Hello"), TokensPrompt(prompt_token_ids=ids), {"prompt": "Hello", "cache_salt": None}]
    first, second, third = engine.generate(prompts, GREEDY, use_tqdm=False)
    assert first.text == second.text == third.text and (first.prompt, second.prompt) == ("Hello", None)
    prompt = {"prompt": "Hello", "multi_modal_data": {"image": 1}}
    with pytest.raises(RequestError, match="multi_modal_data"):
        engine.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_reset_prefix_cache_forgets_earlier_prompts(model: Path, salt: str | None) -> None:
    prompt = {"prompt_token_ids": [*range(5, 305)], "cache_salt": salt}

    async def ask() -> list[int]:
        async with AsyncLLM(model, **OPTIONS) as engine:
            found = []
            for resets in (False, False, True, False, True):
                if resets:
                    assert await engine.reset_prefix_cache()
                (output,) = await (await engine.submit(prompt, GREEDY)).outputs()
                found.append(output.num_cached_tokens)
            return found

    assert asyncio.run(ask()) == [0, 256, 0, 256, 0]


def test_get_tokenizer_of_a_model_without_one_is_refused(model: Path) -> None:
    with LLM(model, **OPTIONS, skip_tokenizer_init=True) as llm, pytest.raises(RequestError, match="has no tokenizer"):
        llm.get_tokenizer()
