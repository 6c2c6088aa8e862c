"""Any body at any endpoint: never a 500, errors in the API's form, and an engine that answers correctly afterwards."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from http_server import asgi_client, make_site
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_files import copy_with_template
from schema_bodies import bodies
from tiers import examples

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server.errors import ANTHROPIC_TYPES
from nanovllm.entrypoints.server.messages import CountTokensRequest, MessagesRequest
from nanovllm.entrypoints.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nanovllm.entrypoints.server.responses import ResponsesRequest

PATHS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# It reads every part of a message, as those of large models do
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif -%}{%- for message in messages -%}"
    "{{ message.role }}: {{ message.content }}{%- for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments.items() | list }}</tool_call>{% endfor -%}{%- endfor -%}"
)
HEADERS = {"content-type": "application/json"}


def request_strategy(path: str) -> st.SearchStrategy[tuple[str, bytes]]:
    """Bodies of this endpoint, encoded as a client would, surrogates and NaN included."""
    schema = PATHS[path].model_json_schema()
    return bodies(schema, schema.get("$defs", {})).map(lambda body: (path, json.dumps(body).encode()))


REQUESTS = st.one_of([request_strategy(path) for path in PATHS for _ in range(3 if "completions" in path else 1)])


class Server:
    """The whole application in this process. An exception that no handler takes reaches the test."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.app = make_site(engine, max_queue=16, max_body_mb=0.1).gate.outermost
        self.loop = asyncio.new_event_loop()

    def post(self, *requests: tuple[str, bytes]) -> list[httpx.Response]:
        """Send requests at the same time."""

        async def send_all() -> list[httpx.Response]:
            async with asgi_client(self.app) as client:
                sent = (client.post(path, content=body, headers=HEADERS) for path, body in requests)
                return list(await asyncio.gather(*sent))

        return self.loop.run_until_complete(send_all())


@pytest.fixture(scope="module")
def server(retrieval_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its context is short, so that no body makes it work for long."""
    model = copy_with_template(retrieval_model, tmp_path_factory.mktemp("fuzz") / "model", TEMPLATE)
    engine = AsyncLLM(model, device="cpu", max_model_len=160, num_kvcache_blocks=3, max_num_seqs=4)
    server = Server(engine)
    yield server
    engine.close()
    server.loop.close()


def check_error(response: httpx.Response) -> None:
    error, is_messages = response.json(), response.request.url.path.startswith("/v1/messages")
    assert error.keys() == ({"type", "error"} if is_messages else {"error"}), error
    assert error["error"].keys() == {"message", "type", "param", "code"} and error["error"]["message"], error
    is_other = is_messages and response.status_code in ANTHROPIC_TYPES
    assert (error["error"]["type"] == "invalid_request_error") != is_other, error


def check_response(response: httpx.Response) -> None:
    """It is JSON, or a stream of JSON, and an error has the API's form and blames the client."""
    if response.headers["content-type"].startswith("text/event-stream"):
        if response.text.startswith("event: "):
            for event in response.text.removesuffix("\n\n").split("\n\n"):
                name, data = event.split("\n")
                fields = json.loads(data.removeprefix("data: "), parse_constant=reject_constant)
                assert name == f"event: {fields['type']}"
            return
        *events, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        answers = [json.loads(event.removeprefix("data: "), parse_constant=reject_constant) for event in events]
        for answer in answers:
            assert answer["choices"] or answer.get("usage") or answer["prompt_progress"], answer
        return
    answer = json.loads(response.content, parse_constant=reject_constant)
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413, 429), (response.status_code, answer)
        check_error(response)


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check_alive(server: Server) -> None:
    """A plain request is answered correctly, and nothing else is left in the engine."""
    body = {"prompt": "It is 4711.\nIt is", "max_tokens": 6, "temperature": 0}
    (response,) = server.post(("/v1/completions", json.dumps(body).encode()))
    assert response.json()["choices"][0]["text"] == " 4711."
    stats = server.engine.llm.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


@settings(max_examples=examples(100))
@given(requests=st.lists(REQUESTS, min_size=1, max_size=4))
@example(requests=[("/v1/completions", b'{"prompt": "It is", "guided_regex": "\\u00e9?", "bad_words": ["\\u00e9"]}')])
def test_server_any_body_is_answered_or_refused_in_the_form(server: Server, requests: list[tuple[str, bytes]]) -> None:
    for response in server.post(*requests):
        check_response(response)
    check_alive(server)


@settings(max_examples=examples(100))
@given(path=st.sampled_from(sorted(PATHS)), body=st.binary(max_size=40))
def test_server_any_bytes_are_refused_in_the_form(server: Server, path: str, body: bytes) -> None:
    (response,) = server.post((path, body))
    if response.status_code != 200:  # 40 bytes can be a request: {"prompt": ""} to /tokenize
        assert response.status_code == 400
        check_error(response)


@settings(max_examples=examples(100))
@given(name=st.text(max_size=20), method=st.sampled_from(["GET", "POST", "DELETE", "PUT"]))
def test_server_any_model_name_is_answered_in_the_form(server: Server, name: str, method: str) -> None:
    async def ask() -> httpx.Response:
        async with asgi_client(server.app) as client:
            return await client.request(method, f"/v1/models/{quote(name, safe='')}", follow_redirects=True)

    response = server.loop.run_until_complete(ask())
    assert response.status_code in (200, 404, 405)
    if response.status_code != 200:
        check_error(response)
