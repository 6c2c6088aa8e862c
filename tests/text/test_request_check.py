"""Prompts and messages that are refused before they reach the queue. Bad lists of token ids: test_engine.py."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import finish_all
from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.errors import RequestError
from nanovllm.text.frontend import check_conversations, render_chat

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
USER = {"role": "user", "content": "Hello"}
PAD_TEMPLATE = "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer has one token more than the model has embeddings: `<pad>`, added for training."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("padded")
    write_tiny_tokenizer(write_tiny_model(directory, vocab_size=320))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.convert_tokens_to_ids("<pad>") == 320
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", num_kvcache_blocks=4) as engine:
        yield engine


CALLS: dict[str, Callable[[LLM, str], object]] = {
    "add_request": lambda llm, text: llm.add_request(text, GREEDY),
    "generate": lambda llm, text: llm.generate(["fine", text], GREEDY, use_tqdm=False),
    "stream": lambda llm, text: llm.stream(text, GREEDY),
    "chat": lambda llm, text: llm.chat([USER, {"role": "user", "content": text}], GREEDY, use_tqdm=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_text_with_a_token_beyond_the_vocabulary_is_refused_and_the_rest_goes_on(
    llm: LLM, call: Callable[[LLM, str], object]
) -> None:
    """Regression: only lists were checked. The id reached the embedding, which raised in every step from then on; on a
    GPU it ended the process, and with several ranks it was embedded as zeros."""
    expected = llm.generate(["Hello"], GREEDY, use_tqdm=False)[0]["token_ids"]
    running = llm.add_request("Hello", GREEDY)
    llm.step()
    message = r"contains '<pad>', token 320 \(at position \d+ .* vocabulary 0\.\.319; remove it .* or use the tokenizer"
    with pytest.raises(RequestError, match=message):
        call(llm, "some text<pad>")
    finished = finish_all(llm)
    assert list(finished) == [running] and finished[running]["token_ids"] == expected


def test_chat_template_that_writes_a_token_beyond_the_vocabulary_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", PAD_TEMPLATE)
    with pytest.raises(RequestError, match="'<pad>', token 320"):
        llm.chat([USER], GREEDY, use_tqdm=False)
    assert llm.is_finished()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (USER, r"messages has type dict, expected a list"),
        ("Hello", "messages has type str, expected a list"),
        (None, "messages has type NoneType"),
        ([], "messages is empty"),
        ([[]], "a conversation in messages is empty"),
        ([[USER], USER], "messages mixes messages and lists of messages"),
        ([USER, [USER]], r"messages\[1\] has type list, expected a dict"),
        ([USER, "Hello"], r"messages\[1\] has type str, expected a dict"),
        ([{"role": "user"}], r"messages\[0\] has content=None, expected a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has content=5, expected a string"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\] has content=None"),
        ([{"content": "Hello"}], r"messages\[0\] has role=None, expected a string"),
        ([{"role": 1, "content": "Hello"}], r"messages\[0\] has role=1"),
    ],
)
def test_chat_malformed_messages_are_a_value_error(llm: LLM, messages: Any, message: str) -> None:
    """Regression: KeyError: 0, jinja's UndefinedError, or a prompt that said "None"."""
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_check_conversations_takes_one_or_several_and_a_call_of_a_tool() -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    assert check_conversations([USER, call]) == [[USER, call]]
    assert check_conversations(([USER], (USER, call))) == [[USER], [USER, call]]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_chat_template_that_fails_is_a_value_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(
        RequestError, match=f"chat template cannot render these messages: .*{reason}.*; check their roles"
    ):
        render_chat(llm.tokenizer, [USER])


def test_template_that_is_none_is_not_blamed_on_the_messages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: of a damaged template it said that the roles of the messages are to be checked."""
    for template, message in (
        (
            "a\n{% if %}",
            r"not a valid Jinja template \(line 2: Expected an expression.*correct it in chat_template.jinja",
        ),
        ({"rag": "{{ 1 }}"}, "needs a tokenizer with a chat template"),
        (5, "needs a tokenizer with a chat template"),
        (" \n", "needs a tokenizer with a chat template"),
    ):
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        with pytest.raises(RequestError, match=message):
            llm.chat([USER], use_tqdm=False)
