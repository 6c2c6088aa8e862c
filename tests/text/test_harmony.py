"""Answers in the harmony format of gpt-oss: their messages, their stop strings, and the grammar of their calls."""

import json
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kinds import add_tokens
from transformers import AutoTokenizer

from nanovllm.entrypoints.server.call_formats import HARMONY
from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import END_TOKEN_ID, save_tokenizer
from nanovllm.sampling_params import HarmonyTags, SamplingParams, StructuredOutputs
from nanovllm.text.detokenizer import Detokenizer, StopStrings, TokenDecoder
from nanovllm.text.harmony import HarmonyScanner, begun_message, num_analysis_tokens
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

NAMES = ("start", "end", "message", "channel", "constrain", "return", "call")
TOKENS = {f"<|{name}|>": token_id for name, token_id in zip(NAMES, range(0xF5, 0xFC), strict=True)}
ENDS = (END_TOKEN_ID, TOKENS["<|return|>"], TOKENS["<|call|>"])
BEGIN, NEXT = "<|start|>assistant", "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm <|end|> é.\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    add_tokens(directory, TOKENS, special=True)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 258, ENDS)


# -- messages ----------------------------------------------------------------------------------------------------------


def scan(pieces: list[str], begun: str = BEGIN) -> list[tuple[str, str, str, str]]:
    """Return the parts of an answer, with adjacent ones of one message joined."""
    scanner = HarmonyScanner(begun)
    parts = [part for piece in pieces for part in scanner.feed(piece)] + scanner.feed("", is_last=True)
    found = []
    for (kind, channel, recipient), group in groupby(parts, key=lambda part: (part.kind, part.channel, part.recipient)):
        found.append((kind, "".join(part.text for part in group), channel, recipient))
    return found


FUNCTION, MENTION = ("functions.f", "{}"), "the tags <|start|>, <|channel|> and <|message|>"
CASES: list[tuple[str, list[tuple[str, str, str]]]] = [  # a text, and the messages in it: channel, recipient, text
    (
        f"{THOUGHT}{NEXT}<|channel|>final<|message|>It rains.<|return|>",
        [("analysis", "", "Hm <|end|> é.\n"), ("final", "", "It rains.")],
    ),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", [("commentary", *FUNCTION)]),
    (" to=functions.f<|channel|>commentary json<|message|>{}", [("commentary", "functions.f", "{}")]),
    (" to=functions.f-2.x<|channel|>analysis code<|message|>{", [("analysis", "functions.f-2.x", "{")]),
    ("<|channel|>analysis<|message|><|end|><|channel|>final<|message|>x", [("final", "", "x")]),
    ("<|message|>No channel.", [("", "", "No channel.")]),
    ("No header, but text.", [("", "", "No header, but text.")]),
    ("\nNo header", [("", "", "\nNo header")]),
    (" No header", [("", "", " No header")]),
    (f"<|channel|>{'x' * 400}<|message|>y", [("", "", f"<|channel|>{'x' * 400}<|message|>y")]),
    (f"<|channel|>final<|message|>a{NEXT}<|channel|>fi", [("final", "", "a")]),  # cut in a header
    ("<|channel|>final<|message|>a<|end|><|start|>assis", [("final", "", "a")]),
    ("<|channel|>final<|message|>a<|en", [("final", "", "a<|en")]),
    (f"<|channel|>final<|message|>{MENTION}<|return|>", [("final", "", MENTION)]),
    ("", []),
    (" to=func", []),
    ("<|chan", []),
]  # fmt: skip


def test_scanner_finds_the_messages_however_the_text_is_split() -> None:
    for text, expected in CASES:
        whole = scan([text])
        assert [(channel, to, body) for kind, body, channel, to in whole if kind == "body"] == expected, text
        assert "".join(part[1] for part in whole) == text
        assert scan(list(text)) == whole, text
        for cut in range(1, len(text)):
            assert scan([text[:cut], text[cut:]]) == whole, (text, cut)


def test_scanner_every_cut_of_an_answer_has_the_beginnings_of_its_messages() -> None:
    text, _ = CASES[0]
    messages = [part for part in scan([text]) if part[0] == "body"]
    for cut in range(len(text)):
        found = [part for part in scan([text[:cut]]) if part[0] == "body"]
        assert len(found) <= len(messages)
        for (_, body, *to), (_, whole, *expected) in zip(found, messages, strict=False):
            assert to == expected and body.startswith(whole) | whole.startswith(body), cut


def test_scanner_goes_on_with_the_message_that_the_prompt_has_begun() -> None:
    for prompt, begun, text, expected in (
        (f"<|start|>user<|message|>Hi<|end|>{BEGIN}", BEGIN, "<|channel|>final<|message|>x", "final"),
        (f"{BEGIN}<|channel|>final<|message|>He", f"{BEGIN}<|channel|>final<|message|>He", "llo", "final"),
        (f"{BEGIN}<|channel|>", f"{BEGIN}<|channel|>", "analysis<|message|>x", "analysis"),
        ("<|start|>user<|message|>Hi<|end|>", "", f"{BEGIN}<|channel|>final<|message|>x", "final"),
        ("no tag", "", "x", ""),
    ):
        assert begun_message(prompt) == begun
        for pieces in ([text], list(text)):
            parts = scan(pieces, begun)
            assert parts[-1][0] == "body" and parts[-1][2] == expected and "".join(part[1] for part in parts) == text


def test_tokens_of_the_reasoning_are_counted_in_all_its_messages() -> None:
    begin, end = (1, 2), 9
    for token_ids, expected in (
        ([], 0),
        ([1, 2, 5, 9, 7], 4),
        ([1, 3, 5, 9, 7], 0),
        ([1, 2, 9, 1, 4, 5, 9, 1, 2, 5], 6),
        ([7, 1, 2], 2),
        ([1], 0),
    ):
        assert num_analysis_tokens(token_ids, begin, end) == expected, token_ids


@pytest.mark.slow
def test_scanner_time_is_linear_in_the_length_of_the_text() -> None:
    for unit in ("<|start|>a<|message|>b<|end|>", "<|end|>", "<", "<|start|>", " a", "<|message|>", "<|end|><|star"):
        scanner = HarmonyScanner(BEGIN)
        scanner.feed(unit * 20_000)
        assert len(scanner._held) < 2000, unit


# -- stop strings ------------------------------------------------------------------------------------------------------


def test_stop_strings_count_only_in_messages_to_the_user_and_calls(tokenizer: Any) -> None:
    """ "assistant" is in every header, and "Hm" in the reasoning."""
    final = "<|channel|>final<|message|>"
    preamble = "<|channel|>commentary<|message|>To sto"
    answer = f"<|channel|>analysis<|message|>Hm, stop{NEXT}{preamble}{NEXT}{final}p. Hm assistant"
    for stop, expected in (
        ("Hm", answer.rpartition("Hm")[0]),
        ("assistant", answer.rpartition("assistant")[0]),
        ("analysis", answer),
        ("<|end|>", answer),
        ("stop", answer),  # not from one message to the next
        ("To s", answer.partition("To s")[0]),
    ):
        for num_tokens in (1, 7, 1000):
            decoder = TokenDecoder(tokenizer, skip_special_tokens=False)
            detokenizer = Detokenizer(decoder, StopStrings([stop]), reasoning=HarmonyTags())
            token_ids = tokenizer.encode(answer, add_special_tokens=False)
            for start in range(0, len(token_ids), num_tokens):
                detokenizer.update(token_ids[start : start + num_tokens], start + num_tokens >= len(token_ids))
            assert detokenizer.text == expected, (stop, num_tokens)
            assert detokenizer.stopped == (expected != answer)


# -- grammars ----------------------------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [("weather", CITY), ("weather2", {"type": "object"})]
CALL = ' to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Bern <|end|>"}'
FORM = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, with tags in JSON spelled in letters."""
    head, spelled, rest = text.partition('<|end|>"}')
    more = [*spelled.encode(), *encoded(tokenizer, rest)] if spelled else []
    return [*tokenizer.encode(head, add_special_tokens=False), *more]


def admits(
    compiler: GrammarCompiler, tokenizer: Any, outputs: StructuredOutputs, text: str, begun: str = BEGIN
) -> bool:
    matcher = TokenMatcher(compiler.compile(outputs, HarmonyTags(begun)), False)
    return all(matcher.accept(token_id) for token_id in [*encoded(tokenizer, text), ENDS[-1]])


def cases() -> Iterator[tuple[StructuredOutputs, list[str], list[str]]]:
    """Yield constraints with what they admit and what not, in any case after reasoning."""
    second = '<|channel|>commentary to=functions.weather2 json<|message|>{"x": 1}'
    final, preamble = "<|channel|>final<|message|>", f"<|channel|>commentary<|message|>I look.{NEXT}"

    def calls(**options: bool) -> Any:
        return HARMONY.constraint(TOOLS, **options)

    yield (
        StructuredOutputs(tagged_json=calls(is_required=True, is_single=True)),
        [CALL, second, CALL.replace("<|constrain|>", ""), CALL.replace(" <|constrain|>", "<|constrain|>")],
        [
            f"{final}x",
            preamble + CALL,
            CALL + NEXT + second,
            CALL.replace("Bern", '", "x": "'),
            "x",
            second.replace("2", "3", 1),
            second.replace("1}", "1" * 129 + "}"),
            "",
        ],
    )
    yield (
        StructuredOutputs(tagged_json=calls(is_required=True, is_single=False)),
        [CALL, CALL + NEXT + second, f"{CALL}{NEXT}<|channel|>analysis<|message|>More.{NEXT}{second}"],
        [f"{final}x", CALL + NEXT + final, CALL + second],
    )
    yield (
        StructuredOutputs(tagged_json=calls(is_required=False, is_single=True)),
        [CALL, preamble + CALL, f"{final}Any text.", f"{preamble}{final}x", final],
        [CALL + NEXT + second, preamble, preamble.removesuffix(NEXT), f"{final}x{NEXT}{CALL}"],
    )
    yield (
        StructuredOutputs(**FORM),
        [f'{final}{{"a": 1}}'],
        [f"{final}x", '{"a": 1}', CALL, f'{preamble}{final}{{"a": 1}}'],
    )
    yield StructuredOutputs(choice=("yes", "no")), [f"{final}yes"], [f"{final}maybe", "yes"]
    yield (
        StructuredOutputs(tagged_json=calls(is_required=False, is_single=True), **FORM),
        [CALL, f'{final}{{"a": 1}}'],
        [f"{final}x", f"{preamble}{CALL}", f'{final}{{"a": "{"9" * 5}"}}', f'{final}{{"a": {"9" * 129}}}'],
    )


def test_grammar_of_calls_and_of_the_final_message(compiler: GrammarCompiler, tokenizer: Any) -> None:
    thoughts = (
        "",
        f"<|channel|>analysis<|message|>{NEXT}",
        f'<|channel|>analysis<|message|>{{"1e999": {"9" * 200}{NEXT}' * 2,
    )
    for outputs, good, bad in cases():
        for thought in thoughts:
            for text in good:
                assert admits(compiler, tokenizer, outputs, thought + text), (outputs, thought, text)
            for text in bad:
                assert not admits(compiler, tokenizer, outputs, thought + text), (outputs, thought, text)
        assert admits(compiler, tokenizer, outputs, BEGIN + good[0], begun="")


def test_stop_strings_need_the_tags(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="skip_special_tokens=True must be False"):
        SamplingParams(stop="x", reasoning_tags=HarmonyTags())
    SamplingParams(stop="x", reasoning_tags=HarmonyTags(), skip_special_tokens=False)


def test_grammar_needs_a_known_prompt_known_tokens_and_names_without_space(
    compiler: GrammarCompiler, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="needs a prompt that ends before a message"):
        compiler.compile(StructuredOutputs(**FORM), HarmonyTags(f"{BEGIN}<|channel|>final<|message|>x"))
    save_tokenizer(tmp_path)
    other = GrammarCompiler(AutoTokenizer.from_pretrained(tmp_path), 258, ENDS)
    with pytest.raises(RequestError, match="is not a token"):
        other.compile(StructuredOutputs(**FORM), HarmonyTags())
    with pytest.raises(RequestError, match="cannot write this name"):
        HARMONY.constraint([("a b", {})], is_required=True, is_single=True)


def test_drawn_answers_are_scanned_to_what_the_grammar_says(compiler: GrammarCompiler) -> None:
    """Answers that the masks admit, drawn at random: every one is reasoning and then one call of a tool."""
    texts = {token_id: token for token, token_id in TOKENS.items()}
    outputs = StructuredOutputs(tagged_json=HARMONY.constraint(TOOLS, is_required=True, is_single=True))
    num_ended = 0
    for seed in range(12):
        rng, matcher = random.Random(seed), TokenMatcher(compiler.compile(outputs, HarmonyTags()), False)
        answer = b""
        for step in range(400):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            choices = np.flatnonzero(bits).tolist()
            if {*ENDS} & {*choices}:
                num_ended += 1
                parts = scan([answer.decode()])
                bodies = [part for part in parts if part[0] == "body"]
                assert all(channel == "analysis" for _, _, channel, _ in bodies[:-1])
                assert bodies[-1][3].removeprefix("functions.") in dict(TOOLS)
                json.loads(bodies[-1][1])
                break
            tags = [each for each in choices if each in texts]
            token_id = rng.choice(
                tags if tags and (step > 40 or rng.random() < 0.3) else [c for c in choices if 32 <= c < 127] or choices
            )
            answer += texts[token_id].encode() if token_id in texts else bytes([token_id])
            assert matcher.accept(token_id)
    assert num_ended >= 6
