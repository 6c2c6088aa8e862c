"""What the clients of the soak do: good requests with answers known beforehand, bad ones, and ways to leave."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputs

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB_SIZE = 256  # of the built-in model
FEATURES: tuple[Json, ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
    {"repetition_penalty": 1.2, "temperature": 0.7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.9},
    {"logit_bias": {"10": -100, "32": 2.5}, "temperature": 0.6},
    {"min_tokens": 4, "stop": ["\n"]},
    {"n": 2, "temperature": 1.0},
    {"logprobs": 2},
    {"bad_words": ["the"], "temperature": 0.5},
    {"structured_outputs": {"choice": ["left", "right", "straight on"]}, "temperature": 1.0},
    {"structured_outputs": {"regex": "[a-f]{3,9}"}, "temperature": 1.0},
)
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b'{"prompt": 1}',
    b'{"prompt": "x", "nonsense": 1}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "max_tokens": 100000000}',
    b'{"prompt": "x", "logit_bias": {"999999": 1}}',
    b'{"prompt": "x", "model": "somebody else\'s"}',
    b'{"prompt": [1, 2, 1000000]}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b'{"prompt": "' + b"x" * 100_000 + b'", "max_tokens": 1}',
)


@dataclass(frozen=True)
class Case:
    """A good request without `stream`, and the texts of its answers on an idle engine, one for each choice."""

    path: str
    body: Json
    texts: list[str] = field(default_factory=list)


def make_cases(model: str, options: Json, num_cases: int, seed: int) -> list[Case]:
    """Seeded requests of random lengths with all features, answered one by one by an engine of their own."""
    rng = random.Random(seed)
    with LLM(model, **options) as llm:
        return [_answered(llm, *_request(rng, FEATURES[i % len(FEATURES)])) for i in range(num_cases)]


def _request(rng: random.Random, features: Json) -> tuple[str, Json]:
    """Half of the prompts begin with the same lines, so that they share blocks.

    No request is greedy: two continuations can be equally likely for the built-in model, and then rounding decides.
    """
    shared = "".join(f"line {i} of the text that many prompts share\n" for i in range(rng.choice((0, 0, 3, 20))))
    lines = (f"{rng.choice(('key', 'name', 'place'))} {rng.randrange(50)} is {rng.randrange(10**6)}" for _ in range(40))
    text = shared + "\n".join(list(lines)[: rng.randrange(1, 12)])
    body = {"max_tokens": rng.randrange(4, 24), "seed": rng.randrange(2**31), "temperature": 0.6} | features
    if rng.random() < 0.3 and "logprobs" not in features:
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, body | {"prompt": text}


def _answered(llm: LLM, path: str, body: Json) -> Case:
    fields = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
    params = SamplingParams(**fields)
    prompt = llm.chat_token_ids(body["messages"])[0] if path == CHAT else body["prompt"]
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    return Case(path, body, [each["text"] or "" for each in output.get("outputs", [output])])


def bad_request(rng: random.Random) -> tuple[str, bytes]:
    """A body that is refused, and where it goes."""
    if rng.random() < 0.3:  # noise in place of values
        keys = ("prompt", "messages", "max_tokens", "stop", "n", "stream", "response_format", "tools")
        noise = (None, -1, 1e99, "", [], {}, [None], {"type": "?"}, "\u0000", True)
        body = {key: rng.choice(noise) for key in rng.sample(keys, 4)} | {"unknown": 1}
        return rng.choice((COMPLETIONS, CHAT)), json.dumps(body).encode()
    return COMPLETIONS, rng.choice(BAD_BODIES)


def texts_of(path: str, payload: bytes, is_stream: bool, num_choices: int) -> list[str]:
    """The texts of an answer's choices. Raises ValueError for an answer that did not end as it should."""
    texts = [""] * num_choices
    reasons: list[str | None] = [None] * num_choices
    events = [json.loads(payload)] if not is_stream else _events(payload)
    for event in events:
        if "error" in event:
            raise ValueError(f"an error in the answer: {event['error']}")
        for choice in event["choices"]:
            part = choice.get("delta" if is_stream else "message") if path == CHAT else choice
            texts[choice["index"]] += (part.get("content") if path == CHAT else part["text"]) or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    if not all(reason in ("stop", "length") for reason in reasons):
        raise ValueError(f"finish reasons {reasons}")
    return texts


def _events(payload: bytes) -> list[Json]:
    *events, done = [event[6:] for event in payload.decode().split("\n\n") if event]
    if done != "[DONE]":
        raise ValueError("the stream has no end")
    return [json.loads(event) for event in events]
