"""Times the masks of structured output for a vocabulary as large as Qwen3's. `make bench-micro` runs this.

Each call answers one request: it computes the mask of every token, and accepts the token.
"""

import json
from typing import Any

import pytest
from test_host import DOCUMENTS, VOCAB_SIZE, note
from transformers import PreTrainedTokenizerFast

from benchmarks.server_process import END_TOKEN, NUM_TRAINED_TOKENS, make_tokenizer
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

NUM_PADDING_IDS = 300
VALUE = {
    "name": "Ada Lovelace",
    "age": 36,
    "tags": ["mathematics", "engines"],
    "address": {"city": "London", "zip": "01234"},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json": SCHEMA}, json.dumps(VALUE)),
    "any object": ({"json_object": True}, json.dumps(VALUE)),
    "regex": ({"regex": r"[a-z0-9.]{1,20}@[a-z0-9]{1,20}\.(com|org)"}, "ada.lovelace@example.org"),
    "choice": ({"choice": [f"category {i}" for i in range(1000)]}, "category 987"),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Trained on this repository's documents; made-up words fill the vocabulary."""
    rust = make_tokenizer(VOCAB_SIZE - NUM_PADDING_IDS, NUM_TRAINED_TOKENS, sorted(map(str, DOCUMENTS)))
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END_TOKEN)


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (tokenizer.eos_token_id,))
    compiler.compile(StructuredOutputs(json_object=True))  # reads the vocabulary
    return compiler


@pytest.mark.parametrize("num_guesses", [0, 4])
@pytest.mark.parametrize("name", CASES)
def test_masks_of_an_answer(
    benchmark: Any, tokenizer: Any, compiler: GrammarCompiler, name: str, num_guesses: int
) -> None:
    """All draft tokens are accepted: a call computes five masks at a time and then accepts five tokens."""
    outputs, text = CASES[name]
    token_ids = tokenizer.encode(text)
    grammar = compiler.compile(StructuredOutputs(**outputs))

    def answer() -> TokenMatcher:
        matcher = TokenMatcher(grammar, ignore_eos=False)
        for at in range(0, len(token_ids), num_guesses + 1):
            newest = token_ids[at : at + num_guesses + 1]
            matcher.masks_for(newest[:num_guesses])
            for token_id in newest:
                assert matcher.accept(token_id)
        return matcher

    assert benchmark(answer).is_finished
    note(benchmark, len(token_ids), "token")
