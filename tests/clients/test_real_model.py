"""Official clients against a real model, SmolLM2-135M-Instruct from its GGUF file, whose answers nothing scripts."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from agent_process import NOTE, AgentPlace
from conftest import KEY
from http_server import site_server
from pydantic import BaseModel
from smollm2 import gguf_directory
from test_agents import aider

from nanovllm import AsyncLLM

pytestmark = pytest.mark.clients

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


class Capital(BaseModel):
    country: str
    capital: str


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    engine = AsyncLLM(gguf_directory(), device="cpu", max_model_len=2048, num_kvcache_blocks=32)
    with site_server(engine, [KEY], served_model_name=("smollm2",)) as url:
        yield url
    engine.close()


@pytest.fixture(scope="module")
def real_client(real_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_url}/v1", api_key=KEY, max_retries=0)


def test_openai_streams_an_answer(real_client: openai.OpenAI) -> None:
    chunks = real_client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == ANSWER and len([part for part in parts if part]) > 3


def test_openai_parses_an_answer_that_follows_a_schema(real_client: openai.OpenAI) -> None:
    parsed = real_client.chat.completions.parse(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=64, response_format=Capital
    )
    assert parsed.choices[0].message.parsed is not None and parsed.choices[0].message.parsed.capital == "Paris"


def test_anthropic_goes_on_with_a_conversation(real_url: str) -> None:
    client = anthropic.Anthropic(base_url=real_url, api_key=KEY, max_retries=0)
    fields: dict[str, Any] = {"model": "smollm2", "max_tokens": 40, "extra_body": {"temperature": 0}}
    first: Any = client.messages.create(messages=QUESTION, **fields)
    assert first.content[0].text == ANSWER and first.stop_reason == "end_turn"
    history = [*QUESTION, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And of Italy?"}]
    second: Any = client.messages.create(messages=history, **fields)
    assert "Italy" in second.content[0].text


def test_aider_answers_a_question(real_url: str, place: AgentPlace) -> None:
    """A session of a real coding agent with a real model. Other agents need tools, which this model does not take."""
    env = {"OPENAI_API_BASE": f"{real_url}/v1", "OPENAI_API_KEY": KEY}
    command = [*aider("smollm2"), "--chat-mode", "ask", "--message", QUESTION[0]["content"]]
    assert ANSWER in place.run(command, env)
    assert place.note.read_text() == NOTE
