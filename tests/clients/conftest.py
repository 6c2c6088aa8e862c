"""Servers for real clients. Their models say what the chat template tells them to.

The model of `url` writes calls in JSON, as Qwen3 does. The model of `scripted_url` has the official chat template of
Qwen3.5, and does what a user's message tells it to (scripted_model.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentPlace
from http_server import site_server
from model_files import copy_with_template
from scripted_model import build_scripted_model
from tokenizer_kinds import add_tokens

from nanovllm import AsyncLLM
from nanovllm.models.retrieval_model import build_retrieval_model

KEY = "secret"
CONTEXT = 32768  # the least that docs/agents.md calls sensible
DOCS = Path(__file__).parents[2] / "docs"
# As in Qwen3, these are tokens. They take the places of bytes that UTF-8 has no use for
TOKENS = {"<think>": 0xF8, "</think>": 0xF9, "<tool_call>": 0xFA, "</tool_call>": 0xFB}
# First some reasoning and a call of the first tool, then its result, which is the whole answer if it is JSON. The model
# goes on as after the first "Copy:"
TEMPLATE = (
    "{%- set call = '<think>I ask.</think><tool_call>\\n{\"name\": \"' ~ (tools[0].function.name if tools else '') ~"
    ' \'", "arguments": {"city": "Bern"}}\\n</tool_call>\' -%}'
    "{%- if messages[-1].role == 'tool' %}{% set result = messages[-1].content -%}"
    "{% set text = '<think>So.</think>' ~ result if result[0] == '{' else 'The tool says ' ~ result -%}"
    "{%- elif tools %}{% set text = call %}{% else %}{% set text = '<think>Hm.</think>Hello!' %}{% endif -%}"
    "{%- if enable_thinking is false %}{% set text = text.split('</think>')[-1] %}{% endif -%}"
    "{{ '\n' }}Copy:{{ text }}<|endoftext|>{{ '\n' }}Copy:"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    retrieval_model = build_retrieval_model(tmp_path_factory.mktemp("retrieval"))
    directory = copy_with_template(retrieval_model, tmp_path_factory.mktemp("clients") / "model", TEMPLATE)
    add_tokens(directory, TOKENS)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.0}))
    return directory


@pytest.fixture(scope="session")
def url(model: Path) -> Iterator[str]:
    engine = AsyncLLM(model, device="cpu", max_model_len=1024, num_kvcache_blocks=32, max_num_batched_tokens=512)
    with site_server(engine, [KEY]) as url:
        yield url
    engine.close()


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
    return build_scripted_model(tmp_path_factory.mktemp("scripted"), texts)


@pytest.fixture
def place(tmp_path: Path) -> AgentPlace:
    return AgentPlace(tmp_path)


@pytest.fixture(scope="session")
def scripted_url(scripted_model: Path) -> Iterator[str]:
    engine = AsyncLLM(
        scripted_model, device="cpu", max_model_len=CONTEXT, num_kvcache_blocks=512, max_num_batched_tokens=4096
    )
    with site_server(engine, [KEY], served_model_name=("m",)) as url:
        yield url
    engine.close()
