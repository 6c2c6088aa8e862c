"""Refusals of the server: keys, sizes, limits, the queue, and the time in it. And the salts that keep users apart."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_loops import on_a_loop, until
from http_server import asgi_client, make_site
from starlette.types import Receive, Scope, Send
from waiting import LIMIT_S

from nanovllm import AsyncLLM, ConfigError, SamplingParams
from nanovllm.entrypoints.server.admission import MAX_LIST_ITEMS, MAX_N, MAX_STOP, RequestLimits
from nanovllm.entrypoints.server.app import Site
from nanovllm.entrypoints.server.errors import Refusal
from nanovllm.entrypoints.server.gate import API_KEY_VARIABLE, MAX_HELD_BODIES, ApiKeys, Gate, read_api_keys
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.entrypoints.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest

KEYS = ["first-key", "second-key"]
SECRET = "a private sentence"
ENDLESS = {"prompt": "x", "max_tokens": 10**5, "ignore_eos": True}


# -- keys --------------------------------------------------------------------------------------------------------------


def test_read_api_keys_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst-key\n\n  second-key  \n")
    assert read_api_keys(str(path), {API_KEY_VARIABLE: "third"}) == ["third", "first-key", "second-key"]
    assert read_api_keys(None, {}) == []
    for content in ("", "# only a comment\n", "two words\n", "clé\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="key") as caught:
            read_api_keys(str(path), {})
        assert "two words" not in str(caught.value)
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):  # an empty key would open the server
        read_api_keys(None, {API_KEY_VARIABLE: ""})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(str(tmp_path / "missing"), {})


def test_accept_takes_any_of_the_keys_and_nothing_else() -> None:
    keys = ApiKeys(KEYS)
    assert all(keys.accept(value) for value in (b"Bearer first-key", b"bearer second-key", b"Bearer  first-key "))
    for value in (b"", b"Bearer", b"Bearer ", b"first-key", b"Basic first-key", b"Bearer first-ke", b"Bearer \xff"):
        assert not keys.accept(value)


# -- the gate ----------------------------------------------------------------------------------------------------------


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    body = json.dumps({"size": len(message["body"]), "salt": scope.get("state", {}).get("cache_salt")}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def make_gate(keys: list[str] | None = None, **settings: Any) -> tuple[Gate, list[str]]:
    """The gate around `echo`, and the list that it adds the reasons of its refusals to."""
    reasons: list[str] = []
    options = ServerOptions(**({"max_body_mb": 1000 / 2**20, "max_receive_s": 3600} | settings))
    return Gate(echo, options, ApiKeys(keys or []), reasons.append), reasons


def ask(app: Any, *requests: dict[str, Any]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with asgi_client(app) as client:
            return [await client.request(**({"method": "POST", "url": "/v1/x"} | request)) for request in requests]

    return asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_gate_wrong_or_missing_key_is_401_in_openais_form() -> None:
    gate, reasons = make_gate(KEYS)
    two_headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer x")]
    refused = [
        *({"headers": bearer("x")}, {}, {"headers": two_headers}, {"method": "GET", "url": "/metrics"}),
        *({"method": "GET", "url": f"/{path}"} for path in ("page", "health/", "openapi.json", "kvcache")),
    ]
    for response in ask(gate, *refused):
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert reasons == ["api_key"] * len(refused)
    (response,) = ask(gate, {"url": "/v1/messages", "headers": {"x-api-key": "x"}})
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    reasons.clear()
    open_to_all = ({"method": "GET", "url": url} for url in ("/", "/health", "/version", "/page/chat.js"))
    assert [each.status_code for each in ask(gate, {"headers": bearer(KEYS[1])}, *open_to_all)] == [200] * 5
    without_keys, reasons = make_gate()
    (response,) = ask(without_keys, {"content": b"abc"})
    assert (response.status_code, response.json()["size"], reasons) == (200, 3, [])


def test_gate_salt_belongs_to_the_key() -> None:
    gate, _ = make_gate(KEYS)
    responses = ask(gate, *({"headers": bearer(key)} for key in (KEYS[0], KEYS[1], KEYS[0])))
    salts = [each.json()["salt"] for each in responses]
    assert salts[0] == salts[2] != salts[1]
    assert not any(key in salt for key in KEYS for salt in salts)
    for keys, options in (([KEYS[0], KEYS[0]], {}), (KEYS, {"cache_salt_per_key": False})):
        gate, _ = make_gate(keys, **options)
        assert ask(gate, {"headers": bearer(KEYS[0])})[0].json()["salt"] is None


LOCAL_HOSTS = ("localhost", "LocalHost:8000", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "")
FOREIGN_HOSTS = ("attacker.example", "attacker.example:8000", "localhost.attacker.example", "192.168.0.1", "[::2]:x")


def test_gate_local_server_without_keys_answers_only_its_own_hosts() -> None:
    """Regression: any page could read answers and /kvcache by letting its own host name resolve to 127.0.0.1."""

    def statuses(keys: list[str], *hosts: str, **options: Any) -> list[int]:
        gate, _ = make_gate(keys, **options)
        headers = bearer(KEYS[0]) if keys else {}
        return [each.status_code for each in ask(gate, *({"headers": headers | {"Host": host}} for host in hosts))]

    for host in ("127.0.0.1", "::1", "localhost"):
        assert statuses([], *LOCAL_HOSTS, host=host) == [200] * (len(LOCAL_HOSTS) - 1) + [403]
        assert statuses([], *FOREIGN_HOSTS, host=host) == [403] * len(FOREIGN_HOSTS)
    assert statuses(KEYS, *FOREIGN_HOSTS) == [200] * len(FOREIGN_HOSTS)
    assert statuses([], *FOREIGN_HOSTS, host="0.0.0.0") == [200] * len(FOREIGN_HOSTS)
    assert statuses([], *FOREIGN_HOSTS[:2], allowed_origins=("http://attacker.example:81",)) == [200, 200]
    gate, reasons = make_gate()
    (refused,) = ask(gate, {"headers": {"Host": FOREIGN_HOSTS[0]}})
    assert "allowed_origins" in refused.json()["error"]["message"] and reasons == ["host"]


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield bytes(100)


def test_gate_large_body_is_413_whether_or_not_it_says_so() -> None:
    gate, reasons = make_gate()
    responses = ask(
        gate,
        *({"content": bytes(size)} for size in (1000, 1001)),
        *({"content": in_pieces(size)} for size in (1000, 1100)),
    )
    assert [each.status_code for each in responses] == [200, 413, 200, 413]
    assert responses[2].json()["size"] == 1000
    assert "max_body_mb" in responses[1].json()["error"]["message"]
    assert reasons == ["body_size"] * 2


@on_a_loop
async def test_gate_bodies_of_open_requests_are_limited_together() -> None:
    """Regression: each body has a limit, but any number of them could be held in memory at once."""
    gate, reasons = make_gate()
    is_over = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await is_over.wait()
        await echo(scope, receive, send)

    gate._app = wait

    async with asgi_client(gate) as client:
        asked = [asyncio.create_task(client.post("/v1/x", content=bytes(1000))) for _ in range(MAX_HELD_BODIES)]
        await until(lambda: gate._num_held_bytes == MAX_HELD_BODIES * 1000)
        refused = await client.post("/v1/x", content=b"a")
        without_body = asyncio.create_task(client.get("/health"))
        is_over.set()
        answers = [*await asyncio.gather(*asked), await without_body, await client.post("/v1/x", content=b"a")]
    assert all(each.status_code == 200 for each in answers)
    assert (refused.status_code, gate._num_held_bytes) == (503, 0)
    assert reasons == ["bodies"]


@on_a_loop
async def test_gate_slow_body_is_408() -> None:
    """Regression: a client that never sent the end of its body kept what it had sent in memory for ever."""

    async def too_slow() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b"a"

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(sending), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    (gate, reasons), sending, sent = make_gate(max_receive_s=0.1), too_slow(), list[Any]()
    await gate({"type": "http", "path": "/v1/x", "headers": []}, receive, send)
    start, body = sent
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert "max_receive_s=0.1" in json.loads(body["body"])["error"]["message"]
    assert reasons == ["slow_body"]


def test_gate_draining_is_503_with_retry_after_for_everything() -> None:
    gate, reasons = make_gate()
    gate.is_draining = True
    asked, health = ask(gate, {}, {"method": "GET", "url": "/health"})
    assert asked.status_code == health.status_code == 503
    assert asked.headers["retry-after"] == "1"
    assert reasons == ["draining"] * 2


# -- limits ------------------------------------------------------------------------------------------------------------


COMPLETION = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def body_of(**fields: Any) -> Body:
    kind = (
        DetokenizeRequest if "tokens" in fields else ChatRequest if fields.keys() & CHAT.keys() else CompletionRequest
    )
    return kind.model_validate(fields if kind is not CompletionRequest else COMPLETION | fields)


def limits_of(max_model_len: int = 2048, **options: Any) -> RequestLimits:
    return RequestLimits(ServerOptions(**options), max_model_len)


def test_limits_too_much_is_refused_by_name() -> None:
    too_many: list[dict[str, Any]] = [
        {"n": MAX_N + 1},
        {"prompt": ["a"] * (MAX_LIST_ITEMS + 1)},
        {"prompt": [[1]] * (MAX_LIST_ITEMS + 1)},
        {"prompt": "a" * 101},
        {"prompt": ["a", "a" * 101]},
        {"prompt": [1] * 2049},
        {"prompt": [[1], [1] * 2049]},
        {"tokens": [1] * 2049},
        {"messages": CHAT["messages"] * (MAX_LIST_ITEMS + 1)},
        {"stop": ["a"] * (MAX_STOP + 1)},
        *({name: ["a"] * (MAX_LIST_ITEMS + 1)} for name in ("bad_words", "guided_choice")),
        {"stop_token_ids": [1] * (MAX_LIST_ITEMS + 1)},
        {"logit_bias": {str(token_id): 1 for token_id in range(MAX_LIST_ITEMS + 1)}},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * (MAX_LIST_ITEMS + 1)} | CHAT,
    ]
    limits = limits_of(max_prompt_chars=100)
    for fields in too_many:
        with pytest.raises(Refusal) as caught:
            limits.check_body(body_of(**fields))
        assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))


MODEL_LEN = 10_000  # 2 * 21 * 10,000 log-probabilities are fewer than 4 Mi


@pytest.mark.parametrize(
    ("prompts", "params", "factor"),
    [
        ([[1] * 1000] * 10, {"prompt_logprobs": 20}, 21 * 10_000),
        (["a" * 20_000] * 10, {"prompt_logprobs": 0}, 100_000),
        (["a"], {"logprobs": 20, "max_tokens": 8000, "n": 10}, 21 * 80_000),
        (["a"] * 10, {"logprobs": 3, "n": 10, "max_tokens": 16}, 4 * 1600),
        (["a" * 100], {"logprobs": 3, "prompt_logprobs": 3, "max_tokens": 10}, 4 * 110),
        (["a"], {"logprobs": 0, "n": 100, "max_tokens": None}, 1_000_000),
        ([[1] * MODEL_LEN], {"prompt_logprobs": 20, "n": 3}, 3 * 21 * MODEL_LEN),
    ],
)
def test_limits_count_all_logprobs_of_a_request(prompts: list[Any], params: dict[str, Any], factor: int) -> None:
    """Regression: 100 prompts of 131K tokens with prompt_logprobs=20 fit into a body, and not into memory."""
    limits, asked = limits_of(MODEL_LEN), SamplingParams(**params)
    limits.check_logprobs(prompts, asked)
    limits._max_logprobs = factor
    limits.check_logprobs(prompts, asked)
    limits._max_logprobs = factor - 1
    with pytest.raises(Refusal, match=f"up to {factor} log-probabilities, at most {factor - 1}; lower"):
        limits.check_logprobs(prompts, asked)


def test_limits_allow_what_is_just_enough() -> None:
    limits = limits_of(max_prompt_chars=100)
    limits.check_body(body_of(n=MAX_N, logprobs=20, prompt="a" * 100, stop=["a"] * MAX_STOP))
    limits.check_body(body_of(prompt=["a" * 100] * MAX_LIST_ITEMS, stop="a" * 100))
    limits.check_body(body_of(prompt=[1] * 2048))
    limits.check_body(body_of(prompt={"": None}))  # left to the endpoint; regression: KeyError
    assert limits_of().max_prompt_chars == 16 * 2048


def test_options_bad_value_is_refused() -> None:
    positive = ("max_queue", "max_prompt_chars", "max_wait_s", "max_body_mb", "max_receive_s", "max_unread_s")
    bad: list[tuple[str, Any]] = [
        *((name, value) for name in positive for value in (0, 2**31, "1")),
        *(("port", 70000), ("port", -1), ("host", ""), ("drain_s", -1.0), ("served_model_name", ("",))),
        *(("allowed_origins", (origin,)) for origin in ("example.org", "https://example.org/", "")),
    ]
    for name, value in bad:
        with pytest.raises(ConfigError, match=f"^{name}="):
            ServerOptions(**{name: value})


# -- the queue, over an engine -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(long_model: Path) -> Iterator[AsyncLLM]:
    """It runs one answer at a time."""
    engine = AsyncLLM(long_model, device="cpu", num_kvcache_blocks=600, max_num_batched_tokens=512, max_num_seqs=1)
    yield engine
    assert engine.failure is None
    engine.close()


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[Callable[..., Awaitable[httpx.Response]]]:
    """A function that sends a completion request. What is open in the end is aborted."""
    async with asgi_client(site.gate.outermost) as client:

        async def complete(headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
            return await client.post("/v1/completions", json=body, headers=headers)

        yield complete


@on_a_loop
async def test_queue_full_is_429_with_retry_after(engine: AsyncLLM) -> None:
    site = make_site(engine, max_queue=2)
    async with connected(site) as complete:
        running = asyncio.ensure_future(complete(**ENDLESS))
        await until(lambda: engine.llm.stats()["num_running"] == 1 and site.service.num_waiting == 0)
        waiting = asyncio.ensure_future(complete(**ENDLESS, n=2))
        await until(lambda: site.service.num_waiting == 2)
        assert site.service.num_open == 3
        refused = await complete(prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        never = await complete(prompt="x", n=3)
        assert never.status_code == 400
        for task in (running, waiting):
            task.cancel()
        await until(lambda: site.service.num_open == 0)
        assert site.service.num_waiting == 0
        assert (await complete(prompt="x", max_tokens=1)).status_code == 200
    assert 'reason="queue"} 2.0' in site.service.metrics.render().decode()


@on_a_loop
async def test_queue_full_refuses_what_would_be_tokenized_first(engine: AsyncLLM) -> None:
    """Regression: chats were tokenized before they counted, any number of them, each with a body in memory."""
    service = make_site(engine, max_queue=1).service
    may_end = threading.Event()
    preparing = asyncio.ensure_future(service.prepare(may_end.wait, LIMIT_S))
    await until(lambda: service.num_waiting == 1)
    with pytest.raises(Refusal) as caught:
        await service.prepare(int)
    assert caught.value.status == 429
    may_end.set()
    await preparing
    assert service.num_waiting == service.num_open == 0


def test_queue_retry_after_is_a_mean_wait_with_a_cap(engine: AsyncLLM) -> None:
    queue = make_site(engine, max_queue=1).service
    for _ in range(100):
        queue.add_wait(10_000)
    assert queue.retry_after_s == 60
    for seconds, shown in ((0.0, "1"), (1.0, "1"), (1.2, "2"), (59.01, "60")):
        refusal = Refusal(429, "queue", "wait", retry_after_s=seconds)
        assert refusal.response().headers["retry-after"] == shown


@on_a_loop
async def test_queue_waited_too_long_is_503_and_aborted(engine: AsyncLLM) -> None:
    patient, site = make_site(engine, max_wait_s=3600), make_site(engine, max_wait_s=0.1)
    async with connected(patient) as begin, connected(site) as complete:
        running = asyncio.ensure_future(begin(**ENDLESS))
        await until(lambda: engine.llm.stats()["num_running"] == 1 and patient.service.num_waiting == 0)
        whole, streamed = await asyncio.gather(complete(**ENDLESS), complete(**ENDLESS, stream=True))
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "service_unavailable")
        assert "retry-after" in whole.headers
        assert "max_wait_s=0.1" in streamed.text
        assert site.service.num_waiting == 0
        await until(lambda: engine.llm.stats()["num_waiting"] == 0)  # an abort takes effect after the step
        assert not running.done()  # it has begun, so it may take its time
        running.cancel()
        await until(lambda: patient.service.num_open == site.service.num_open == 0)


@on_a_loop
async def test_queue_request_that_is_refused_leaves_no_trace(engine: AsyncLLM) -> None:
    site = make_site(engine)
    async with connected(site) as complete:
        for body in ({"prompt": [1] * 2**17}, {"prompt": [999999]}, {"prompt": "x", "temperature": -1}):
            assert (await complete(**body)).status_code == 400
        assert site.service.num_open == site.service.num_waiting == 0


@on_a_loop
async def test_cache_salt_per_key_keeps_users_apart(engine: AsyncLLM) -> None:
    """Regression: this had to be asked for, and `usage` told each user what others had sent."""
    prompt, cached = "what one user asks, nobody else shall find out. " * 12, []
    async with connected(make_site(engine, KEYS)) as complete:
        for key, salt in [(0, None), (1, None), (0, None), (1, None), (0, "mine"), (0, "mine")]:
            done = await complete(bearer(KEYS[key]), prompt=prompt, max_tokens=1, cache_salt=salt)
            cached.append(done.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert [bool(num) for num in cached] == [False, False, True, True, False, True]


def test_cache_salt_per_key_keeps_tokenized_texts_apart(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions, chats and /tokenize all pass on the salt when they tokenize a text."""
    salts: list[str | None] = []
    encoder = engine.llm.text._encoder
    encode = encoder.encode

    def spy(text: str, *, add_special_tokens: bool, cache_salt: str | None) -> Any:
        salts.append(cache_salt)
        return encode(text, add_special_tokens=add_special_tokens, cache_salt=cache_salt)

    monkeypatch.setattr(encoder, "encode", spy)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    limits = {"max_tokens": 1}
    bodies = [
        ("/v1/completions", {"prompt": "x"} | limits),
        ("/v1/completions", {"prompt": "x", "add_special_tokens": False, "cache_salt": "mine"} | limits),
        ("/v1/chat/completions", chat | limits),
        ("/v1/chat/completions", chat | {"cache_salt": "mine"} | limits),
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", chat),
    ]
    asked = [{"url": url, "json": body, "headers": bearer(key)} for key in KEYS for url, body in bodies]
    site = make_site(engine, KEYS)
    assert [response.status_code for response in ask(site.gate.outermost, *asked)] == [200] * len(asked)
    assert None not in salts and not set(salts[: len(bodies)]) & set(salts[len(bodies) :])
    own, mine = salts[0], salts[1]
    assert own != mine and salts[: len(bodies)] == [own, mine, own, mine, own, own]


@on_a_loop
async def test_logs_hold_nothing_of_the_text(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with connected(make_site(engine, max_prompt_chars=100)) as complete:
        for body in ({"prompt": SECRET, "max_tokens": 2}, {"prompt": SECRET * 9}, {"prompt": SECRET, SECRET: 1}):
            await complete(**body)
    assert SECRET not in caplog.text


def test_allowed_origins_are_off_unless_asked_for(engine: AsyncLLM) -> None:
    origin = {"Origin": "https://example.org"}
    asked = {"method": "OPTIONS", "headers": origin | {"Access-Control-Request-Method": "POST"}, "url": "/v1/models"}
    (closed,) = ask(make_site(engine, KEYS).gate.outermost, asked)
    (opened,) = ask(make_site(engine, KEYS, allowed_origins=("https://example.org",)).gate.outermost, asked)
    assert "access-control-allow-origin" not in closed.headers
    assert opened.headers["access-control-allow-origin"] == "https://example.org"
