"""Models, tokens and text, health and version."""

import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

from nanovllm import AsyncLLM, __version__


def test_models_lists_all_names_and_finds_each(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias/of tiny"]
    assert client.models.retrieve("alias/of tiny").id == "alias/of tiny"
    card = client.models.retrieve("tiny").model_extra or {}
    assert card["max_model_len"] == card["max_request_tokens"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    done = client.completions.create(model="alias/of tiny", prompt="Hello", max_tokens=1)
    assert done.model == "tiny"


def test_tokenize_and_detokenize_are_inverse(web: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Grüße, 世界", "return_token_strs": True}
    tokens = web.post("/tokenize", json=body).json()
    assert tokens["tokens"] == list("Grüße, 世界".encode())
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 2048)
    assert len(tokens["token_strs"]) == tokens["count"]
    text = web.post("/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "Grüße, 世界"}


def test_tokenize_messages_gives_the_prompt_of_a_chat(web: httpx.Client, served: tuple[AsyncLLM, str]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    tokens = web.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert [tokens] == served[0].llm.chat_token_ids(messages)


def test_tokenize_and_detokenize_bad_bodies_are_refused(web: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    for body in ({}, {"prompt": "x", "messages": messages}, {"prompt": 1}):
        assert web.post("/tokenize", json=body).status_code == 400
    for tokens in ([-1], [9999], ["1"], None):
        response = web.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400 and response.json()["error"]["message"]


def test_document_is_returned_as_text_or_refused(web: httpx.Client) -> None:
    text = "Der Käse für Frau Müller hat eine Größe von fünf Zoll."
    answer = web.post("/v1/documents/text", params={"name": "Käse.txt"}, content=text.encode("latin-1"))
    assert (answer.status_code, answer.json()) == (200, {"name": "Käse.txt", "text": text})
    for params, content, message in (
        ({"name": "a.bin"}, bytes(9), "a.bin is not text; documents are plain text, PDF, DOCX and HTML"),
        ({"name": "a.pdf"}, b"%PDF-1.4", "a.pdf is "),
        ({}, b"text", "name"),
    ):
        answer = web.post("/v1/documents/text", params=params, content=content)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_health_and_version_answer(web: httpx.Client) -> None:
    health = web.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready"})
    assert web.get("/version").json() == {"version": __version__}


def test_head_is_answered_where_get_is(web: httpx.Client) -> None:
    """Regression: only /health and the page took HEAD, which HTTP asks of everything that takes GET."""
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/version", "/metrics", "/"):
        head, get = web.head(path), web.get(path)
        assert head.status_code == get.status_code == 200 and not head.content, path
        assert head.headers["content-type"] == get.headers["content-type"]
    assert web.head("/v1/models/other").status_code == 404


def test_server_without_its_packages_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from nanovllm.entrypoints.server import make_app"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError" in done.stderr
    assert "pip install --constraint constraints.txt '.[server]'" in done.stderr


def test_server_settings_load_no_web_framework() -> None:
    code = "import nanovllm.entrypoints.server, sys; sys.exit('fastapi' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
