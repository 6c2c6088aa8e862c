"""Grammar: one compiled by llguidance for a model's vocabulary, from what an answer must match.

Grammars come from people who may mean harm, so LIMITS bound the time and memory of each compilation and each mask.
`grammar_text` writes them in the Lark language, and checks what llguidance does not: the size of the text, and the
depth to which references in a schema can nest.

llguidance builds the automaton of a grammar as masks need it. All matchers that start from one Grammar share it, behind
a lock of llguidance. Once a mask exceeds a limit, the automaton is useless for all of them, and `renew` replaces it by
a spare one. Spares are compiled in threads of their own, because the engine's thread must not wait for one.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nanovllm.core.logit_editor import TokenMask, token_mask
from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.utils.arithmetic import ceil_div

# llguidance's defaults would allow compilations and masks of seconds (tests/text/test_hostile_grammars.py).
LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 20_000,  # symbols; compilation is quadratic in the optional properties of an object
    "initial_lexer_fuel": 1_000_000,  # for a compilation
    "step_lexer_fuel": 50_000,  # for a mask
    "step_max_items": 5_000,  # for a mask
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # in a grammar, 1 to 2 kB each
    "verbose_errors": False,
}
MAX_CHARS = 200_000  # in a schema, a regex, or all choices together
# llguidance follows references by recursion. Each reference is followed at most once on the way down, through no more
# levels than the schema has, so the product of the two bounds the depth.
MAX_REFERENCE_DEPTH = 6000
STACK_BYTES = 128 << 20  # for so many levels; one was seen to take up to 4 kB
MAX_WHITESPACE = 64  # between two parts of JSON; without a limit, some models emit whitespace and never stop

# With forcing, a token that only one text can follow is replaced by the tokenizer's own split of that text. llguidance
# would write out the whole text first: gigabytes for ((a{1000}){1000}){1000}. Without, masks hold every allowed token.
_HEADER = '%llguidance {"no_forcing": true}\nstart: '
_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
NUM_SPARES = 2  # an answer that exceeds a limit uses up the automaton in use and the one that it tries again with
SLOW_MASK_S = 0.5e-3  # CPU time of a slow mask. Most take 0.03 ms, but the limits above admit some of 30 ms
NUM_SLOW_MASKS = 1000  # after a slow mask, a grammar's next masks taken to be slow as well
NUM_MASK_THREADS = 2
MAX_REASON_CHARS = 300

_Result = TypeVar("_Result")


class Vocabulary:
    """The model's vocabulary as llguidance reads it, and its masks."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...], limits: Mapping[str, Any] = LIMITS
    ) -> None:
        """`limits` are those of llguidance.LLParserLimits. Raises ValueError for a tokenizer that does not say which
        bytes its tokens stand for.
        """
        import llguidance.hf

        num_ids = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        end_token_ids = tuple(token_id for token_id in end_token_ids if token_id < vocab_size)
        self.tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_ids, eos_token=list(end_token_ids) or None)
        self.limits = llguidance.LLParserLimits(**limits)
        self.vocab_size = vocab_size
        self.end_token_ids = frozenset(end_token_ids)
        self.mask_threads = ThreadPoolExecutor(NUM_MASK_THREADS, "mask")  # has no threads until there is a slow mask
        self._num_words = ceil_div(vocab_size, 32)
        self._num_all_words = ceil_div(num_ids, 32)
        self.anything = token_mask(range(vocab_size), vocab_size)
        self.end_tokens = token_mask(end_token_ids, vocab_size)
        text_tokens = {*range(vocab_size)} - {*end_token_ids, *self.tokens.eos_tokens}
        self._text_tokens = token_mask(list(text_tokens), vocab_size)

    def is_text(self, token_id: int) -> bool:
        """Return True if it is a token of the model other than an end token."""
        return 0 <= token_id < self.vocab_size and is_allowed(self._text_tokens, token_id)

    def continuations(self, matcher: Any) -> TokenMask:
        """The tokens that may follow, without end tokens. None may if `matcher` has stopped. Releases the GIL."""
        words = np.empty(self._num_all_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words[: self._num_words] & self._text_tokens


def is_allowed(mask: TokenMask, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)


class Grammar:
    """A compiled grammar, from which the matchers of all answers start."""

    def __init__(self, vocabulary: Vocabulary, kind: str, text: str) -> None:
        """`kind` is the field of StructuredOutputs that asks for it. Raises RequestError if it cannot be used."""
        self.vocabulary = vocabulary
        self._text = text
        self._lock = threading.Lock()
        self._generation = 0  # automata used up so far
        self._spares: list[Future[Any]] = []  # matchers of automata that nobody uses yet, the oldest first
        self._initial = self._compile().result()
        self._num_slow_masks = 0  # masks left that are taken to be slow
        first = self._initial.deep_copy()
        self.first_mask = self.continuations(first)  # finds what compilation does not
        reason = error_of(first) or (None if self.first_mask.any() else "only the empty answer matches it")
        if reason is not None:
            raise RequestError(f"structured_outputs.{kind} cannot be used: {reason}; correct or simplify it")

    def _compile(self) -> Future[Any]:
        from llguidance import LLMatcher

        make = partial(LLMatcher, self.vocabulary.tokens, self._text, log_level=0, limits=self.vocabulary.limits)
        return with_deep_stack(make)

    def start(self) -> tuple[Any, int]:
        """A matcher of llguidance at the start of an answer, and the generation of its automaton."""
        with self._lock:
            self._add_spares()
            return self._initial.deep_copy(), self._generation

    def renew(self, generation: int) -> bool:
        """Let the next start have another automaton than that of this generation, of which a mask has exceeded a limit.
        Returns False if none is ready. Does not wait.
        """
        with self._lock:
            if generation == self._generation:
                if not (self._spares and self._spares[0].done()):
                    return False
                self._initial = self._spares.pop(0).result()
                self._generation += 1
                self._add_spares()
        return True

    @property
    def is_slow(self) -> bool:
        """True if masks can take so long that the engine's thread should not compute them."""
        return self._num_slow_masks > 0

    def continuations(self, matcher: Any) -> TokenMask:
        """As Vocabulary.continuations. Notes how long it takes."""
        start_s = time.thread_time()
        mask = self.vocabulary.continuations(matcher)
        if time.thread_time() - start_s > SLOW_MASK_S:
            self._num_slow_masks = NUM_SLOW_MASKS
        elif self._num_slow_masks:
            self._num_slow_masks -= 1
        return mask

    def _add_spares(self) -> None:
        while len(self._spares) < NUM_SPARES:
            self._spares.append(self._compile())


def error_of(matcher: Any) -> str | None:
    """Return llguidance's complaint; None if the matcher is in order."""
    return reason_of(matcher.get_error()) if matcher.is_error() else None


def reason_of(message: str) -> str:
    """The line of a message that says what is wrong. The others quote the grammar, or are a stack trace."""
    if message.startswith("NoExtension"):
        return "no answer matches it"
    lines = message.splitlines() or ["unknown error"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    for prefix in ("error: ", "at 2(8): ", "failed to compile JSON schema: ", "panic: "):
        line = line.removeprefix(prefix)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."


_stack_size_lock = threading.Lock()


def with_deep_stack(call: Callable[[], _Result]) -> Future[_Result]:
    """Call it in a thread of its own with a stack of STACK_BYTES. Does not wait.

    llguidance follows references by recursion, and an overflow of the stack would kill the process. The size of stacks
    is a setting of the process, so a thread that another one starts at this moment gets a deep one, too. That costs
    only address space.
    """
    pool = ThreadPoolExecutor(1, "grammar")
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            future = pool.submit(call)
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    return future


# -- what llguidance compiles ----------------------------------------------------------------------------------------


def kind_of(outputs: StructuredOutputs) -> str:
    """The name of the field that is given."""
    return next(
        name for name in ("json", "json_object", "regex", "choice") if getattr(outputs, name) not in (None, False)
    )


def grammar_text(outputs: StructuredOutputs) -> str:
    """The Lark grammar. Raises RequestError for what can be refused without compiling it."""
    if outputs.json_object:
        return _schema_grammar({"type": "object"})
    if outputs.json is not None:
        return _schema_grammar(_parse_schema(outputs.json))
    if outputs.regex is not None:
        _check_size("regex", len(outputs.regex))
        return _regex_grammar(outputs.regex)
    assert outputs.choice is not None, "StructuredOutputs has one of its fields"
    _check_size("choice", sum(map(len, outputs.choice)))
    return f"{_HEADER}CHOICE\nCHOICE: {' | '.join(map(json.dumps, outputs.choice))}"


def _check_size(kind: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise RequestError(
            f"structured_outputs.{kind} has {num_chars} characters, at most {MAX_CHARS}; make it smaller"
        )


def _regex_grammar(regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # regex_to_lark would drop it
        raise RequestError("structured_outputs.regex cannot be used: incomplete escape at its end; correct it")
    try:
        return f"{_HEADER}/{regex_to_lark(regex, 'd')}/"  # \d is 0 to 9 only, whatever the reader's Unicode
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.regex is not valid Unicode text; remove {error.object[error.start]!r}"
        ) from error


def _parse_schema(schema: Any) -> Any:
    """The schema as plain JSON values, whether it was given as text or as a dict."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        parsed = json.loads(text) if len(text) <= MAX_CHARS else None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not a JSON schema: {error}; correct it") from error
    _check_size("json", len(text))
    height, num_references = _measure(parsed)
    if (1 + num_references) * height > MAX_REFERENCE_DEPTH:
        raise RequestError(
            f"structured_outputs.json has {num_references} references in {height} levels, which can nest "
            f"{(1 + num_references) * height} deep, at most {MAX_REFERENCE_DEPTH}; make it smaller"
        )
    return parsed


def _measure(schema: Any) -> tuple[int, int]:
    """The number of levels of a schema, and its number of references."""
    height = num_references = 0
    pending = [(schema, 1)]
    while pending:
        value, level = pending.pop()
        height = max(height, level)
        if isinstance(value, dict):
            num_references += "$ref" in value
            value = value.values()
        elif not isinstance(value, list):
            continue
        pending.extend((child, level + 1) for child in value)
    return height, num_references


def _schema_grammar(schema: Any) -> str:
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict):
            schema = schema | {"x-guidance": {"whitespace_pattern": _WHITESPACE} | options}
    return f"{_HEADER}%json {json.dumps(schema)}"
