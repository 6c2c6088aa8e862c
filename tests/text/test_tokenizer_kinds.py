"""Tokenizers of all kinds: encoding, streams, grammars and bad words agree with the tokenizer's own text."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_files import edit_json
from odd_drafters import OddDrafter
from tiers import examples
from tiny_models import write_tiny_model
from tokenizer_kinds import ADDED, KINDS, MISLABELLED, SAMPLE, llama_tokens, write_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.read_config import load_config
from nanovllm.engine.setup import Internals
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.detokenizer import Detokenizer, StopStrings, TokenDecoder
from nanovllm.text.frontend import TextFrontend
from nanovllm.text.structured import GrammarCompiler, TokenMatcher, Vocabulary
from nanovllm.text.tokenizer import load_tokenizer

ALL = [*KINDS, *MISLABELLED]
REAL = "SmolLM2 from GGUF"
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("ab the12,'\n \u00e9\u4f60\u597d\U0001f600\u2581", max_size=30),
    st.sampled_from([SAMPLE, f"a{ADDED[0]} b", f"the {ADDED[1]} wine", " the", "a  b", "\ufffd"]),
)

Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer: Path) -> Load:
    """Loads a tokenizer as a model's is loaded, once."""

    @cache
    def load(kind: str) -> Any:
        directory = smollm2_tokenizer if kind == REAL else write_tokenizer(kind, tmp_path_factory.mktemp("tokenizer"))
        return load_tokenizer(directory)

    return load


# -- what the file says ----------------------------------------------------------------------------------------------


def test_setting_that_transformers_ignores_gives_no_warning(tmp_path: Path) -> None:
    """Regression: the first answer of many models came with transformers' warning of a setting that corrupts texts."""
    directory = write_tokenizer("byte level", tmp_path)
    edit_json(directory / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode("a b , c .", add_special_tokens=False)) == "a b , c ."
    assert not tokenizer.clean_up_tokenization_spaces, "transformers would warn of it, once in a process"


@pytest.mark.parametrize("kind", ALL)
def test_tokenizer_encodes_and_decodes_as_its_file_says(kind: str, tmp_path: Path) -> None:
    """Regression: transformers built another tokenizer from `tokenizer_class` and `model_type`. A byte-level one called
    Llama lost every space, and each qwen2 had Qwen2's pattern.
    """
    directory = write_tokenizer(kind, tmp_path / "snapshots" / "0123abcd")
    tokenizer, file = load_tokenizer(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in (SAMPLE, " a  b", "12345 it's", f"a{ADDED[0]} b</s> c", "caf\u00e9 \u4f60", "\n\n x"):
        token_ids = file.encode(text).ids
        assert tokenizer.encode(text) == token_ids
        assert tokenizer.decode(token_ids) == file.decode(token_ids, skip_special_tokens=False)
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == file.decode(token_ids)
    assert len(tokenizer) == file.get_vocab_size()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize("kind", KINDS)
def test_correct_files_make_the_tokenizer_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = write_tokenizer(kind, tmp_path)
    tokenizer, plain = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(tokenizer) is type(plain) and tokenizer.get_vocab() == plain.get_vocab()
    for text in (SAMPLE, f"a{ADDED[0]} b</s> c"):
        for add_special_tokens in (False, True):
            expected = plain.encode(text, add_special_tokens=add_special_tokens)
            assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected


def test_tokens_around_a_text_and_the_chat_template_are_those_of_the_config(tmp_path: Path) -> None:
    directory = write_tokenizer("byte level called Llama", tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    for adds_bos in (True, False):
        config |= {"add_bos_token": adds_bos, "chat_template": "{{ messages[0].content }}"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(directory)
        assert tokenizer.encode("a")[0] == AutoTokenizer.from_pretrained(directory).encode("a")[0]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b"


@pytest.mark.parametrize("name", ["T5Tokenizer", "XLMRobertaTokenizerFast", "NoSuchTokenizer", 5])
def test_tokenizer_class_that_cannot_read_the_file_is_not_needed(name: Any, tmp_path: Path) -> None:
    """Regression: a wrong class, of which transformers makes nothing at all, was an error of the tokenizer's files."""
    directory = write_tokenizer("byte level", tmp_path)
    content = json.loads((directory / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    for file in ("config.json", "tokenizer_config.json"):
        (directory / file).write_text(json.dumps(content | {"model_type": "llama"}))
        tokenizer, expected = load_tokenizer(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
        assert tokenizer.encode(SAMPLE) == expected.encode(SAMPLE).ids
        assert tokenizer.eos_token == "</s>"


def write_without_tokenizer_json(directory: Path, tokenizer_class: str) -> Path:
    """Write a byte-level tokenizer as vocab.json and merges.txt."""
    model = json.loads((write_tokenizer("byte level", directory) / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    config = llama_tokens(tokenizer_class=tokenizer_class)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_tokenizer_without_the_vocabulary_of_its_files_is_refused(tmp_path: Path) -> None:
    """Regression: of vocab.json with the name of another class transformers made an empty tokenizer, which encoded
    every text to no tokens. So did an empty tokenizer.json.
    """
    tokenizer = load_tokenizer(write_without_tokenizer_json(tmp_path / "right", "GPT2Tokenizer"))
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    directory = write_without_tokenizer_json(tmp_path / "wrong", "LlamaTokenizer")
    with pytest.raises(CheckpointError, match=r"vocab.json gives token .* does not have this token; .*tokenizer_class"):
        load_tokenizer(directory)
    directory = write_tokenizer("byte level", tmp_path / "empty")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"has no tokens except its \d+ added tokens; download its files again"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no vocabulary, only tokenizer_config.json; add tokenizer.json or "):
        load_tokenizer(directory)


def test_added_tokens_have_the_ids_of_every_file_that_gives_one(tmp_path: Path) -> None:
    """Regression: transformers numbered an added token anew, so prompts had another token than the file says."""
    directory = write_tokenizer("byte level", tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    for token, token_id, found in (("<new>", size, None), ("<new>", size + 5, size), ("<think>", 7, None)):
        known = load_tokenizer(directory).convert_tokens_to_ids(token) if token == "<think>" else found
        entry = AddedToken(token, normalized=False).__getstate__()
        added = {"added_tokens_decoder": {str(token_id): entry}}
        for name, content in (("tokenizer_config.json", config | added), ("added_tokens.json", {token: token_id})):
            (directory / name).write_text(json.dumps(content))
            if known is None:
                assert load_tokenizer(directory).encode(token)[-1] == token_id
            else:
                with pytest.raises(
                    CheckpointError, match=f"{name} gives token '{token}' the id {token_id}, .* {known};"
                ):
                    load_tokenizer(directory)
            (directory / name).write_text(json.dumps(config if name == "tokenizer_config.json" else {}))


def test_tokenizer_that_transformers_changes_in_any_case_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast

    def changed(directory: str, **_: Any) -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{directory}/tokenizer.json")
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        return tokenizer

    directory = write_tokenizer("byte level called Llama", tmp_path)
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", changed)
    with pytest.raises(CheckpointError, match=r"another normalizer from the files in .* than tokenizer.json has"):
        load_tokenizer(directory)


# -- bytes, streams and whole texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ALL, REAL])
def test_grammar_engine_has_the_bytes_that_the_tokenizer_decodes(kind: str, load: Load) -> None:
    """Regression: of tokenizers exported from GGUF, llguidance took the letters for spaces and newlines as they are."""
    tokenizer = load(kind)
    vocabulary = Vocabulary(tokenizer, len(tokenizer) + 3, (tokenizer.eos_token_id,))
    decode = TokenDecoder(tokenizer, skip_special_tokens=False).decode
    (anchor,) = tokenizer.encode("wine", add_special_tokens=False)[-1:]
    before = decode([anchor])
    for token_id in range(len(tokenizer)):
        found = vocabulary.tokens.decode_bytes([token_id])
        if found == b"<[%d]>" % token_id:  # no text has byte 255
            assert vocabulary.tokens.is_special_token(token_id) and decode([anchor, token_id]) == before + "\ufffd"
            continue
        assert before + found.decode(errors="replace") == decode([anchor, token_id])
    rng = random.Random(0)
    text_tokens = [i for i in range(len(tokenizer)) if vocabulary.tokens.decode_bytes([i]) != b"<[%d]>" % i]
    for _ in range(200):
        token_ids = rng.choices(text_tokens, k=20)
        data = b"".join(vocabulary.tokens.decode_bytes([token_id]) for token_id in token_ids)
        if "\ufffd" not in data.decode(errors="replace"):
            assert before + data.decode() == decode([anchor, *token_ids])


def plain_text(tokenizer: Any, prompt: list[int], answer: list[int], skip: bool) -> str:
    """Return what an answer adds to the text of its prompt. A character that it completes is its own."""

    def decode(token_ids: list[int]) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=skip)
        return text

    whole, before = decode(prompt + answer), decode(prompt)
    num_same = next((i for i, pair in enumerate(zip(whole, before, strict=False)) if pair[0] != pair[1]), len(before))
    begun = [decode(prompt[: max(0, len(prompt) - num_incomplete)]) for num_incomplete in range(4)]
    clean = min(begun, key=lambda text: text.count("\ufffd"))
    return whole[max(num_same, len(clean)) :]


def check_stream(tokenizer: Any, token_ids: list[int], num_prompt_tokens: int, longest: int) -> None:
    prompt, answer = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    rng = random.Random(len(token_ids))
    for skip in (True, False):
        detokenizer = Detokenizer(TokenDecoder(tokenizer, skip), StopStrings(), prompt=prompt)
        pieces, end = [], 0
        while end < len(answer):
            start, end = end, min(end + rng.randint(1, longest), len(answer))
            pieces.append(detokenizer.update(answer[start:end], finished=end == len(answer)))
        assert "".join(pieces) == detokenizer.text == plain_text(tokenizer, prompt, answer, skip)


@pytest.mark.parametrize("kind", [*ALL, REAL])
@settings(max_examples=examples(300))
@given(text=TEXTS, more=TEXTS, share=st.floats(0, 1), longest=st.sampled_from([1, 4, 20]))
@example(text="the red", more=" wine", share=1.0, longest=1)
@example(text="\u597d" * 12, more="\u4f60", share=0.61, longest=1)
def test_text_of_an_answer_is_what_it_adds_to_the_prompt(
    kind: str, load: Load, text: str, more: str, share: float, longest: int
) -> None:
    """Regression: the first word of an answer lost its space, "a cat" went on as "a catthe"."""
    tokenizer = load(kind)
    token_ids = tokenizer.encode(text) + tokenizer.encode(more, add_special_tokens=False)
    check_stream(tokenizer, token_ids, round(share * len(token_ids)), longest)


@pytest.mark.parametrize("kind", [*ALL, REAL])
@settings(max_examples=examples(200))
@given(data=st.data())
def test_text_of_random_tokens_is_what_they_add_to_the_prompt(kind: str, load: Load, data: st.DataObject) -> None:
    tokenizer = load(kind)
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    if "<0x00>" in tokenizer.get_vocab() and "\ufffd" in tokenizer.decode(token_ids):
        # A single wrong byte would also change the text before it
        token_ids = [i for i in token_ids if not tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
    check_stream(tokenizer, token_ids, data.draw(st.integers(0, len(token_ids))), data.draw(st.sampled_from([1, 5])))


@pytest.mark.parametrize("kind", ["SentencePiece", "Unigram", "Llama 2 of transformers 5"])
def test_stop_string_with_a_space_is_found_in_the_first_token(kind: str, load: Load) -> None:
    tokenizer = load(kind)
    prompt, (first, *others) = tokenizer.encode("the wine"), tokenizer.encode("the the", add_special_tokens=False)
    detokenizer = Detokenizer(TokenDecoder(tokenizer), StopStrings((" the",)), prompt=prompt)
    text = detokenizer.update([first], False) + "".join(detokenizer.update([each], False) for each in others)
    assert (text, detokenizer.stopped) == ("", True)


@pytest.mark.parametrize("kind", [*ALL, REAL])
def test_texts_of_tokens_add_up_to_the_text(kind: str, load: Load) -> None:
    """Regression: tokens of log-probabilities lacked their spaces, so the offsets after them were wrong."""
    tokenizer = load(kind)
    decoder = TokenDecoder(tokenizer, skip_special_tokens=False)
    token_ids = tokenizer.encode("the red wine, the blue sky", add_special_tokens=False)
    texts = [decoder.token_text(token_id) for token_id in token_ids]
    assert "".join(texts).removeprefix(" ") == "the red wine, the blue sky"


# -- bad words -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models that make any tokens of these tokenizers."""

    @cache
    def write(kind: str) -> Path:
        directory = write_tiny_model(
            tmp_path_factory.mktemp("model"), "llama", vocab_size=384, max_position_embeddings=512
        )
        return write_tokenizer(kind, directory)

    return write


BAD_WORDS = ["a", " t", "it", "\n", "\u00e9", "r", "</s>x", "1", "wine", "\u4f60"]
SAMPLED = {"temperature": 1.5, "seed": 0, "n": 4, "max_tokens": 24, "ignore_eos": True, "bad_words": BAD_WORDS}


def no_tokens(seq: Sequence, count: int) -> list[int]:
    return []


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"internals": Internals(works_ahead=True)},
    "guesses": {
        "internals": Internals(works_ahead=True, always_guesses=True, drafters=(OddDrafter("random", no_tokens, 384),)),
        "speculation": "auto",
    },
    "preempted": {"num_kvcache_blocks": 6, "max_num_seqs": 6},
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("SentencePiece", how) for how in HOW),
        ("exported from GGUF", "ahead"),
        *(pytest.param(kind, "plain", marks=pytest.mark.slow) for kind in KINDS if kind != "SentencePiece"),
    ],
)
def test_answers_never_contain_bad_words(kind: str, how: str, models: Callable[[str], Path]) -> None:
    """Regression: a word after a space, after a newline, or in other tokens was missed."""
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 20} | HOW[how]
    prompts = [random.Random(length).choices(range(300), k=length) for length in (5, 245)]
    with LLM(models(kind), **options) as llm:
        for more in ({}, {"skip_special_tokens": False}, {"ignore_eos": False, "min_tokens": 8}):
            params = SamplingParams(**(SAMPLED | more))
            outputs = [each for output in llm.generate(prompts, params, use_tqdm=False) for each in output["outputs"]]
            for output in outputs:
                text = output["text"]
                assert text is not None and not any(word in text for word in BAD_WORDS), text
                assert len(output["token_ids"]) == 24 or (output["finish_reason"] == "stop" and more)
            assert len({output["text"] for output in outputs}) > 1
        if how == "preempted":
            assert llm.stats()["num_preemptions"] > 0
        if how == "guesses":
            assert llm.stats()["num_guesses"] > 0


def test_end_tokens_are_not_forbidden_by_their_letters(models: Callable[[str], Path]) -> None:
    """The letters of "</s>" are not in the text of an answer that ends with it."""
    text = frontend(models("byte level"))
    eos, bos = text.tokenizer.eos_token_id, text.tokenizer.bos_token_id

    def forbidden(**params: Any) -> list[int]:
        bad_words = text.rules(SamplingParams(**params)).bad_words
        assert bad_words is not None
        bits = np.unpackbits(bad_words.mask(0).view(np.uint8), bitorder="little")
        return [token_id for token_id in (eos, bos) if not bits[token_id]]

    assert forbidden(bad_words=["s"]) == []
    assert forbidden(bad_words=["s"], skip_special_tokens=False) == [bos]
    assert forbidden(bad_words=["s"], skip_special_tokens=False, ignore_eos=True) == [eos, bos]
    assert forbidden(bad_words=["s"], skip_special_tokens=False, include_stop_str_in_output=True) == [eos, bos]
    assert forbidden(bad_words=["</s>", "x"]) == [eos]


def test_bad_words_that_cannot_be_kept_out_are_refused(models: Callable[[str], Path]) -> None:
    text = frontend(models("byte level"))
    for word in ("a\ud800", "\ufffd"):
        with pytest.raises(RequestError, match=r"bad_words has .* which is not valid Unicode text; leave it out"):
            text.rules(SamplingParams(bad_words=["ok", word]))
    every_byte = [chr(byte) for byte in range(128)] + [chr(0x80 + i) for i in range(0x80)]
    text.rules(SamplingParams(bad_words=every_byte))  # parts of characters are left


def frontend(directory: Path) -> TextFrontend:
    return TextFrontend(load_config(str(directory))[0], directory)


# -- through the engine ----------------------------------------------------------------------------------------------


def test_answers_of_an_engine_keep_the_first_space(models: Callable[[str], Path]) -> None:
    """Regression: streams, whole answers and log-probabilities of a tokenizer of SentencePiece lost it."""
    with LLM(models("SentencePiece"), device="cpu", dtype="float32", num_kvcache_blocks=20) as llm:
        decode = llm.tokenizer.decode
        prompt = llm.tokenizer.encode("the red")
        vocabulary = llm.tokenizer.get_vocab()
        word = next(name for name in sorted(vocabulary) if re.fullmatch("\u2581[a-z]+", name))
        bias = {vocabulary[word]: 100.0, vocabulary["n"]: 90.0}
        begin = word.replace("\u2581", " ")
        params = SamplingParams(temperature=0, max_tokens=12, logit_bias=bias, presence_penalty=2.0, logprobs=0)
        for given in (prompt, "the red"):
            (output,) = llm.generate([given], params, use_tqdm=False)
            token_ids = output["token_ids"]
            expected = decode(prompt + token_ids, skip_special_tokens=True).removeprefix("the red")
            assert expected.startswith(begin) and output["text"] == expected
            assert "".join(llm.stream(given, params)) == expected
            texts = [entry[token_id].text for token_id, entry in zip(token_ids, output["logprobs"], strict=True)]
            assert "".join(texts) == expected
            assert llm.text.decode(token_ids, after=prompt) == expected
        (stopped,) = llm.generate(["the red"], replace(params, stop=[begin]), use_tqdm=False)
        assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


# -- the real tokenizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "answers"),
    [
        ({"regex": "[a-z]+, [a-z]+"}, ["red, blue"]),
        ({"choice": ["red wine", "blue sky"]}, ["red wine", "blue sky"]),
        ({"json_object": True}, ['{"a b": " c d",\n "e": 1}', '{"text": "To depict fathomless bounds  \\n"}']),
        ({"json": {"type": "object", "properties": {"a": {"type": "string"}}}}, ['{"a": "x y z"}']),
    ],
)
def test_real_tokenizer_answers_may_have_spaces(outputs: dict[str, Any], answers: list[str], load: Load) -> None:
    """Regression: no space was possible; regex and choices ended in an error, and JSON had raw newlines in strings."""
    tokenizer = load(REAL)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    grammar = compiler.compile(StructuredOutputs(**outputs))
    for answer in answers:
        matcher = TokenMatcher(grammar, False)
        assert all(map(matcher.accept, tokenizer.encode(answer)))
        assert matcher.accept(tokenizer.eos_token_id) and matcher.is_finished and matcher.error is None
    rng = np.random.default_rng(0)
    for _ in range(3):  # random answers match, too
        matcher, token_ids = TokenMatcher(grammar, False), list[int]()
        while not matcher.is_finished and len(token_ids) < 60:
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            following = np.flatnonzero(bits)
            ends = tokenizer.eos_token_id in following
            token_ids.append(tokenizer.eos_token_id if ends else int(rng.choice(following)))
            assert matcher.accept(token_ids[-1])
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        if matcher.is_finished and "regex" in outputs:
            assert re.fullmatch(outputs["regex"], text)
        elif matcher.is_finished and "choice" in outputs:
            assert text in outputs["choice"]
        elif matcher.is_finished:
            assert isinstance(json.loads(text), dict)


@pytest.mark.slow
def test_real_model_answers_in_json_and_in_lists(smollm2: Path) -> None:
    prompts = ["Three colours as JSON: ", "Two colours: ", "Which drink do you want? I want "]
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 60}},
        "required": ["text"],
        "additionalProperties": False,
    }
    outputs = [{"json": schema}, {"regex": "[a-z]{1,12}, [a-z]{1,12}"}, {"choice": ["red wine", "blue sky"]}]
    params = [
        SamplingParams(n=4, seed=0, max_tokens=150, structured_outputs=StructuredOutputs(**each)) for each in outputs
    ]
    with LLM(smollm2, device="cpu", max_model_len=1024, num_kvcache_blocks=64) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    texts = [[each["text"] or "" for each in answer["outputs"]] for answer in answers]
    assert all(isinstance(json.loads(text)["text"], str) for text in texts[0]) and any(" " in text for text in texts[0])
    assert all(re.fullmatch("[a-z]{1,12}, [a-z]{1,12}", text) for text in texts[1])
    assert {*texts[2]} <= {"red wine", "blue sky"}


@pytest.mark.slow
def test_real_model_with_a_wrong_tokenizer_class_goes_on_sensibly(smollm2: Path, tmp_path: Path) -> None:
    """Regression: "The capital of France is" went on with "land.com", because the prompt had lost its spaces."""
    for path in smollm2.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((smollm2 / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    params = SamplingParams(temperature=0, max_tokens=20)
    texts = []
    for directory in (smollm2, tmp_path):
        with LLM(directory, device="cpu", max_model_len=1024, num_kvcache_blocks=8) as llm:
            (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
            texts.append(output["text"] or "")
    assert texts[0] == texts[1] and texts[0].startswith(" Paris")


@pytest.mark.slow
def test_real_model_never_says_a_bad_word(smollm2: Path) -> None:
    """Regression: with "landmarks" forbidden, answers had " landmarks"."""
    prompt = "Paris is famous for its"
    words = ["landmarks", "art", "beautiful", "rich", "the"]
    with LLM(smollm2, device="cpu", max_model_len=1024, num_kvcache_blocks=64) as llm:
        for bad_words in ([], words):
            params = SamplingParams(n=4, seed=1, max_tokens=60, bad_words=bad_words)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            texts = [each["text"] or "" for each in output["outputs"]]
            assert any(word in text for word in words for text in texts) == (not bad_words)
