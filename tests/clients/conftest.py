"""A server for real clients: its model says what the chat template tells it to, as it copies what was said before."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
from http_server import app_server

from nanovllm import AsyncLLM
from nanovllm.demo.retrieval_model import build_retrieval_model
from nanovllm.server.app import Site
from nanovllm.server.gate import ApiKeys
from nanovllm.server.options import ServerOptions

KEY = "secret"
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
    directory = tmp_path_factory.mktemp("clients") / "model"
    copytree(build_retrieval_model(tmp_path_factory.mktemp("retrieval")), directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    vocab |= {token_id: token for token, token_id in TOKENS.items()}
    tokenizer["model"]["vocab"] = {token: token_id for token_id, token in vocab.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [{"id": token_id, "content": token, **flags} for token, token_id in TOKENS.items()]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.0}))
    return directory


@pytest.fixture(scope="session")
def url(model: Path) -> Iterator[str]:
    engine = AsyncLLM(model, device="cpu", max_model_len=1024, num_kvcache_blocks=32, max_num_batched_tokens=512)
    site = Site(engine, ServerOptions(served_model_name=("tiny",)), ApiKeys([KEY]))
    with app_server(site.gate.outermost) as url:
        yield url
    engine.close()
