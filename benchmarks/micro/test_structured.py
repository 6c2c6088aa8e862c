"""Times the masks of structured output for a vocabulary as large as Qwen3's. `make bench-micro` runs this.

Each call answers one request: it computes the mask of every token, and accepts the token.
"""

import json
from collections import Counter
from typing import Any

import pytest
from test_host import DOCUMENTS, VOCAB_SIZE, note
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

END_TOKEN = "<|endoftext|>"
NUM_PADDING_IDS = 300
MAX_PIECE_CHARS = 16
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
    """The most frequent pieces of this repository's documents, from the start of a word on, as byte-level tokens."""
    pieces: Counter[str] = Counter()
    for document in DOCUMENTS:
        for line in document.read_text().splitlines(keepends=True):
            starts = [i for i in range(len(line)) if i == 0 or not (line[i].isalnum() and line[i - 1].isalnum())]
            pieces.update(line[i : i + n] for i in starts for n in range(2, MAX_PIECE_CHARS + 1) if i + n <= len(line))
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(alphabet)
    for piece, _ in pieces.most_common():
        tokens[to_symbols(piece)[0][0]] = None
        if len(tokens) == VOCAB_SIZE - NUM_PADDING_IDS - 1:
            break
    assert len(tokens) > 100_000, "the documents have too few pieces"
    rust = Tokenizer(models.BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END_TOKEN)


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (tokenizer.eos_token_id,))
    compiler.compile(StructuredOutputs(json_object=True))  # reads the vocabulary
    return compiler


def longest_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The tokens of a text, each as long as possible, as a trained tokenizer would have it."""
    vocab = tokenizer.get_vocab()
    symbols = "".join(part for part, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text))
    token_ids, at = [], 0
    while at < len(symbols):
        end = next(end for end in range(len(symbols), at, -1) if symbols[at:end] in vocab)
        token_ids.append(vocab[symbols[at:end]])
        at = end
    return token_ids


@pytest.mark.parametrize("num_guesses", [0, 4])
@pytest.mark.parametrize("name", CASES)
def test_masks_of_an_answer(
    benchmark: Any, tokenizer: Any, compiler: GrammarCompiler, name: str, num_guesses: int
) -> None:
    """With guesses, all of which are right, a call computes five masks at a time and then accepts five tokens."""
    outputs, text = CASES[name]
    token_ids = longest_tokens(tokenizer, text)
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


@pytest.mark.parametrize("name", CASES)
def test_first_mask_of_a_new_grammar(benchmark: Any, compiler: GrammarCompiler, name: str) -> None:
    """Compilation, which includes the first mask, of a grammar that is not in the cache."""
    outputs = StructuredOutputs(**CASES[name][0])

    def compile_anew() -> None:
        compile_cached: Any = compiler._compile
        compile_cached.cache_clear()
        compiler.compile(outputs)

    benchmark(compile_anew)
    note(benchmark, 1, "grammar")
