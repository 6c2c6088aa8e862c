"""TextFrontend: the text around an engine of token ids, as the LLM and a server put the two together."""

import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.read_config import load_config
from nanovllm.engine.setup import prepare
from nanovllm.engine.startup import start_engine
from nanovllm.errors import RequestError
from nanovllm.plan.outputs import Outbox, Receiver
from nanovllm.plan.sequence import Sequence
from nanovllm.text.frontend import TextFrontend

OPTIONS = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 20}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def text(model: Path) -> TextFrontend:
    return TextFrontend(load_config(str(model))[0], model)


def test_composed_by_hand_answers_as_the_llm_does(model: Path, text: TextFrontend) -> None:
    with LLM(model, **OPTIONS) as llm:
        (expected,) = llm.generate(["Hello"], PARAMS, use_tqdm=False)
    assert expected["text"]
    stop = expected["text"][3:5]
    engine, outbox = start_engine(prepare(model, OPTIONS), text.end_token_ids), Outbox()
    try:
        requests = [text.make_request("Hello", params) for params in (PARAMS, replace(PARAMS, stop=stop), PARAMS)]
        sequences = [seq for request in requests for seq in engine.make_sequences(request)]
        receivers = [text.receiver(outbox, seq.params, seq.token_ids) for seq in sequences[:2]]
        plain, stopped, ids_only = map(engine.add_sequence, sequences, (*receivers, Receiver(outbox)))
        finished = {}
        while engine.has_requests or outbox:
            finished |= engine.next_output(outbox).finished
    finally:
        engine.close()
    assert finished[plain]["text"] == expected["text"]
    assert finished[stopped]["text"] == expected["text"][: expected["text"].index(stop)]
    assert finished[stopped]["finish_reason"] == "stop"
    assert finished[ids_only]["text"] is None
    assert finished[ids_only]["token_ids"] == finished[plain]["token_ids"] == expected["token_ids"]


NUM_LONG_IDS = 100_000
LONG_PROMPTS: dict[str, tuple[Callable[[list[int]], Any], int]] = {  # and the bytes that checking an id takes
    "list": (list, 10),
    "tuple": (tuple, 10),
    "array": (lambda ids: array("q", ids), 10),
    "numpy": (np.array, 10),
    "dict": (lambda ids: {"prompt_token_ids": ids}, 10),
    "array of int32": (lambda ids: array("i", ids), 18),
    "numpy uint16": (lambda ids: np.array(ids, np.uint16), 18),
    "not contiguous": (lambda ids: np.array(ids).repeat(2)[::2], 18),
}


def test_long_prompts_are_copied_once(text: TextFrontend) -> None:
    """Regression: a prompt of 1,000,000 token ids became a list, and was copied five times on its way to the engine.

    The user may change the prompt afterwards.
    """
    ids = [2 + i % 300 for i in range(NUM_LONG_IDS)]
    for kind, (make, num_bytes) in LONG_PROMPTS.items():
        prompt = make(ids)
        tracemalloc.start()
        (request,) = text.make_requests(prompt, PARAMS)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < num_bytes * NUM_LONG_IDS, kind
        if not isinstance(prompt, dict | tuple):
            prompt[0] = 7
        assert request.token_ids == array("q", ids), kind


LONG_TEXT = "".join(f"Line {i} of a document.\n" for i in range(2000))


def test_encode_long_text_is_kept_for_its_salt_alone(model: Path) -> None:
    text = TextFrontend(load_config(str(model))[0], model)
    conversation = [{"role": "user", "content": LONG_TEXT}]
    expected = text.tokenizer.encode(f"user: {LONG_TEXT}\nassistant:")
    sizes = [text._encoder.num_bytes]
    for salt in (None, "a"):
        for _ in range(2):
            (encoded,) = text.encode_chat(conversation, cache_salt=salt)
            assert list(encoded["prompt_token_ids"]) == expected
            sizes.append(text._encoder.num_bytes)
            prompt = f"user: {LONG_TEXT} And?"
            request = text.make_request({"prompt": prompt, "cache_salt": salt}, PARAMS)
            assert (request.token_ids.tolist(), request.cache_salt) == (text.tokenizer.encode(prompt), salt)
            assert text._encoder.num_bytes == sizes[-1]
    assert 0 == sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]


def test_encode_long_text_is_refused_as_a_short_one(model: Path) -> None:
    text = TextFrontend(load_config(str(model))[0], model)
    text.tokenizer.add_tokens(["<new>"])
    for bad in ("<new>", "\ud800"):
        with pytest.raises(RequestError) as short:
            text.encode_prompt(f"a {bad}")
        text.encode_prompt(LONG_TEXT)
        with pytest.raises(RequestError) as long:
            text.encode_prompt(f"{LONG_TEXT}a {bad}")
        position = len(text.encode_prompt(LONG_TEXT))
        assert str(long.value) == str(short.value).replace("position 2", f"position {position + 2}")


def test_receiver_delivered_twice_brings_a_piece_once(text: TextFrontend) -> None:
    """An abort delivers too, and nothing new has been read then."""
    receiver = text.receiver(Outbox(), PARAMS, [])
    seq = Sequence(0, text.encode_prompt("H"), PARAMS, seed=0)
    assert receiver.read(seq) is None
    receiver.deliver(seq)
    seq.finish_reason = "abort"
    receiver.deliver(seq)
    assert receiver.outbox.content.texts == {0: "H"}
    assert receiver.outbox.content.finished[0]["text"] == "H"


def test_receiver_aborted_delivers_what_was_held_back(text: TextFrontend) -> None:
    """Regression: an answer that might have been the start of a stop string came back as an empty text, and the first
    bytes of a character were lost.
    """
    whole = text.encode_prompt("Hello wor").tolist()
    cut = text.encode_prompt("né").tolist()[:-1]  # in the middle of the é
    for answer, before_abort, expected in ((whole, "", "Hello wor"), (cut, "n", "n\ufffd")):
        params = SamplingParams(max_tokens=99, stop="Hello world")
        receiver = text.receiver(Outbox(), params, [1])
        seq = Sequence(0, [1], params, seed=0)
        for token_id in answer:
            seq.token_ids.append(token_id)
            assert receiver.read(seq) is None
            receiver.deliver(seq)
        streamed = receiver.outbox.fetch().texts[0]
        assert streamed == before_abort
        seq.finish_reason = "abort"
        receiver.deliver(seq)
        content = receiver.outbox.fetch()
        assert streamed + content.texts[0] == content.finished[0]["text"] == expected
