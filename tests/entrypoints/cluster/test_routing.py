"""The choice of a replica: the keys of requests, and PrefixRouting."""

import json
import random
from typing import Any

from nanovllm.entrypoints.cluster.front import MIN_BEGINNING_BYTES, PrefixRouting, RequestKey, key_of, request_key

A, B, C = "replica-a", "replica-b", "replica-c"
IDLE = {A: 0, B: 0, C: 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def text(seed: int, num_bytes: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def key(path: str = COMPLETIONS, salt: str | None = None, **fields: Any) -> RequestKey:
    return request_key("POST", path, json.dumps(fields).encode(), salt)


# -- keys ------------------------------------------------------------------------------------------------------------


def test_key_has_a_beginning_for_each_doubling() -> None:
    least = MIN_BEGINNING_BYTES
    for num_bytes, num in ((0, 0), (1, 0), (least - 1, 0), (least, 1), (2 * least - 1, 1), (2 * least, 2), (2**20, 13)):
        assert len(key_of(text(0, num_bytes)).beginnings) == num
    lone_surrogates = b'{"prompt": "' + b"\\ud800" * 300 + b'"}'
    assert request_key("POST", COMPLETIONS, lone_surrogates, None).beginnings


def test_keys_agree_exactly_in_the_beginnings_that_are_shared() -> None:
    for num_shared in (255, 256, 511, 512, 3000, 4096):
        shared = text(0, num_shared)
        keys = [key_of(shared + text(seed, 5000)).beginnings for seed in (1, 2)]
        agreeing = [left == right for left, right in zip(*keys, strict=True)]
        expected = [MIN_BEGINNING_BYTES << i <= num_shared for i in range(len(agreeing))]
        assert agreeing == expected


def test_prompts_in_all_forms_have_beginnings() -> None:
    prompt, ids = "word " * 200, list(range(500))
    forms = [key(prompt=form) for form in (prompt, [prompt, "other"], ids, [ids, [1]])]
    assert forms[0] == forms[1] and forms[2] == forms[3] != forms[0]
    message = {"role": "user", "content": prompt}
    parts = {"role": "user", "content": [{"type": "text", "text": prompt}]}
    chats = [key(CHAT, messages=[message]), key(CHAT, messages=[parts])]
    assert chats[0] == chats[1] != forms[0]
    assert all(len(each.beginnings) > 1 for each in forms + chats)
    with_tools = key(CHAT, messages=[message], tools=[{"type": "function", "function": {"name": "f"}}])
    assert not set(with_tools.beginnings) & set(chats[0].beginnings)
    longer = [message, {"role": "assistant", "content": None}, {"role": "user", "content": "more " * 50}]
    first = chats[0].beginnings
    assert key(CHAT, messages=longer).beginnings[: len(first)] == first


def test_header_that_differs_in_each_request_is_not_in_the_key() -> None:
    """Regression: the turns of a conversation with Claude Code had no beginning in common, so they lost their cache."""
    keys = []
    for number in (1, 2):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, {"type": "text", "text": "x"}]
        messages = [{"role": "user", "content": "y" * 4000}]
        keys.append(key("/v1/messages", system=system, messages=messages))
    assert keys[0] == keys[1] and keys[0].beginnings


def test_salts_separate_keys() -> None:
    prompt = "word " * 200
    keys = [key(prompt=prompt), key(prompt=prompt, salt="k"), key(prompt=prompt, cache_salt="c"),
            key(prompt=prompt, salt="k", cache_salt="c")]  # fmt: skip
    beginnings = [beginning for each in keys for beginning in each.beginnings]
    assert len(set(beginnings)) == len(beginnings)


def test_malformed_body_has_no_beginnings_and_raises_nothing() -> None:
    prompts = (b"{}", b"[]", b'["a", 1e400]', b'[1, "a"]', b"[99999999999999999999]")
    messages = (b"3", b"[3]", b'[{"role": "user", "content": [3]}]', b'[{"content": "x"}]')
    bodies = (b"", b"x", b"[]", b"3", b"{}", b"\xff", b"[" * 100_000)
    bodies += tuple(b'{"prompt": %b}' % prompt for prompt in prompts)
    for body in bodies + tuple(b'{"messages": %b}' % each for each in messages):
        assert request_key("POST", COMPLETIONS, body, None).beginnings == ()
        assert request_key("POST", CHAT, body, None).beginnings == ()


def test_get_requests_all_go_to_one_replica() -> None:
    routing = PrefixRouting()
    sticky = request_key("GET", "/kvcache", b"", None)
    assert len({routing.choose(sticky, {A: a, B: 5 - a, C: 3}) for a in range(6)}) == 1


# -- routing ---------------------------------------------------------------------------------------------------------


def test_questions_follow_their_document() -> None:
    routing, generator = PrefixRouting(), random.Random(1)
    documents = [text(seed, 20_000) for seed in range(30)]
    homes = [routing.choose(key_of(document), IDLE) for document in documents]
    assert set(homes) == {A, B, C}
    for _ in range(100):
        number = generator.randrange(30)
        question = key_of(documents[number] + text(generator.randrange(10**9), 500))
        queues = {replica: generator.randrange(16) for replica in IDLE}
        assert routing.choose(question, queues) == homes[number]


def test_overloaded_replica_shares_its_document() -> None:
    routing = PrefixRouting(max_queue_gap=4)
    document = key_of(text(0, 5000))
    home = routing.choose(document, IDLE)
    others = sorted(IDLE.keys() - {home})
    assert routing.choose(document, IDLE | {home: 4}) == home
    second = routing.choose(document, {home: 5, others[0]: 0, others[1]: 1})
    assert second == others[0]
    assert routing.choose(document, {home: 5, others[0]: 2, others[1]: 1}) == second  # it holds the document, too
    assert routing.choose(document, {home: 1, others[0]: 2, others[1]: 0}) == home


def test_common_system_prompt_does_not_draw_all_documents_to_one_replica() -> None:
    routing, system = PrefixRouting(), text(0, 1200)
    chosen = [routing.choose(key_of(system + text(seed, 20_000)), IDLE) for seed in range(1, 61)]
    assert min(chosen.count(replica) for replica in IDLE) >= 10


def test_unknown_prompts_go_to_the_shortest_queue_and_routers_that_know_nothing_agree() -> None:
    routing = PrefixRouting()
    assert all(routing.choose(key_of(text(seed, 1000)), {A: 2, B: 1, C: 2}) == B for seed in range(20))
    assert routing.choose(RequestKey(), {A: 1, B: 1, C: 0}) == C
    keys = [key_of(text(seed, 3000)) for seed in range(50)]
    queues = (IDLE, dict(reversed(IDLE.items())))
    choices = [[PrefixRouting().choose(each, some) for each in keys] for some in queues]
    assert choices[0] == choices[1] and set(choices[0]) == {A, B, C}


def test_text_keeps_its_replica_when_another_comes() -> None:
    keys = [key_of(text(seed, 100)) for seed in range(200)]
    before = [PrefixRouting().choose(each, {A: 0, B: 0}) for each in keys]
    after = [PrefixRouting().choose(each, IDLE) for each in keys]
    assert all(new in (old, C) for old, new in zip(before, after, strict=True))
    assert 40 < after.count(C) < 95


def test_lost_replica_is_forgotten() -> None:
    routing = PrefixRouting()
    document = key_of(text(0, 5000))
    home = routing.choose(document, IDLE)
    rest = {replica: queue for replica, queue in IDLE.items() if replica != home}
    routing.forget_all_but(rest)
    assert not routing._holders
    new_home = routing.choose(document, rest)
    assert new_home != home and routing.choose(document, rest | {home: 0, new_home: 3}) == new_home


def test_memory_is_bounded_and_forgets_the_least_recently_used() -> None:
    routing = PrefixRouting(max_beginnings=40)
    used, unused = key_of(text(0, 1000)), key_of(text(1, 1000))
    homes = {each: routing.choose(each, IDLE) for each in (used, unused)}
    queues = {replica: 0 if replica != homes[used] else 1 for replica in IDLE}
    for seed in range(2, 100):
        routing.choose(key_of(text(seed, 1000)), queues)
        assert routing.choose(used, queues) == homes[used]
    assert len(routing._holders) == 40
    assert unused.beginnings[-1] not in routing._holders
