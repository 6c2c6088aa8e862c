"""TextFrontend: the text around an engine of token ids, as the LLM and a server put the two together."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.model_config import ModelConfig
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
    return TextFrontend(ModelConfig.from_pretrained(str(model))[0], model)


def test_composed_by_hand_answers_as_the_llm_does(model: Path, text: TextFrontend) -> None:
    with LLM(model, **OPTIONS) as llm:
        (expected,) = llm.generate(["Hello"], PARAMS, use_tqdm=False)
    assert expected["text"]
    stop = expected["text"][3:5]
    engine, outbox = start_engine(prepare(model, OPTIONS), text.end_token_ids), Outbox()
    try:
        request = text.make_request("Hello", PARAMS)
        prompt, stopping = request.token_ids, replace(PARAMS, stop=stop)
        plain = engine.add_request(request, text.receiver(outbox, PARAMS, prompt))
        stopped = engine.add_request(text.make_request("Hello", stopping), text.receiver(outbox, stopping, prompt))
        ids_only = engine.add_request(request, Receiver(outbox))
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


LONG_TEXT = "".join(f"Line {i} of a document.\n" for i in range(2000))


def test_encode_long_text_is_kept_for_its_salt_alone(model: Path) -> None:
    text = TextFrontend(ModelConfig.from_pretrained(str(model))[0], model)
    conversation = [{"role": "user", "content": LONG_TEXT}]
    expected = text.tokenizer.encode(f"user: {LONG_TEXT}\nassistant:")
    sizes = [text._encoder.num_bytes]
    for salt in (None, "a"):
        for _ in range(2):
            (token_ids,) = text.encode_chat(conversation, cache_salt=salt)
            assert token_ids.tolist() == expected
            sizes.append(text._encoder.num_bytes)
            prompt = f"user: {LONG_TEXT} And?"
            request = text.make_request({"prompt": prompt, "cache_salt": salt}, PARAMS)
            assert (request.token_ids.tolist(), request.cache_salt) == (text.tokenizer.encode(prompt), salt)
            assert text._encoder.num_bytes == sizes[-1]
    assert 0 == sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]


def test_encode_long_text_is_refused_as_a_short_one(model: Path) -> None:
    text = TextFrontend(ModelConfig.from_pretrained(str(model))[0], model)
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
