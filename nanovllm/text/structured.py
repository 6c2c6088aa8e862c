"""Structured output: answers that match a JSON schema, a regular expression or a choice.

    compiler = GrammarCompiler(tokenizer, vocab_size, end_token_ids)
    constraint = TokenMatcher(compiler.compile(params.structured_outputs), params.ignore_eos)

llguidance compiles the grammars and computes the masks. llguidance is an extra that the first request with
structured_outputs imports.

Grammars may be hostile, so LIMITS bound the time and memory of each compilation and each mask, and `GrammarWriter`
bounds what llguidance does not: the size of the text, and the depth of nested references in a schema. A grammar that
exceeds a limit at the start of an answer is refused with a RequestError. If a grammar exceeds a limit later, the
request ends with an error.

llguidance extends the automaton of a grammar when a mask needs more of it, and all matchers of one Grammar share the
automaton under a lock of llguidance. Once a mask exceeds a limit of the automaton (fuel, states), the automaton is
unusable, and all answers that use the automaton end with an error. The next request with the same grammar compiles the
grammar again. The limits of items hold for each answer alone. A draft token that exceeds a limit of items does not end
the answer, unless the model chooses the token.

Compilation and masks release the GIL; `accept` holds the GIL for microseconds. Any thread except the engine's may
compile. If a grammar's masks are slow, other threads compute the masks while the answer pauses. Only one thread at a
time may use a matcher.
"""

import json
import logging
import re
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from nanovllm.errors import RequestError, install_command
from nanovllm.plan.logit_edits import TokenMask, token_mask
from nanovllm.sampling_params import AnswerTags, StructuredOutputs
from nanovllm.text.answer_scan import JsonPlaces, NumberMasks, NumberScan
from nanovllm.text.detokenizer import read_token_bytes
from nanovllm.text.grammar_writer import HEADER, MAX_FAULTS, GrammarWriter, refuse, shortened
from nanovllm.text.json_schema import (
    Fault,
    find_faults,
    remove_faults,
    remove_neutral_keywords,
    remove_pattern_properties,
)
from nanovllm.utils.arithmetic import ceil_div

MAX_GRAMMARS = 16  # compiled grammars in the cache
# llguidance's defaults would allow compilations and masks of seconds (tests/text/test_hostile_grammars.py).
LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 20_000,  # symbols; compilation is quadratic in the optional properties of an object
    "initial_lexer_fuel": 1_000_000,  # for a compilation
    "step_lexer_fuel": 50_000,  # for a mask
    "step_max_items": 5_000,  # for a mask
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # of a grammar, 1 to 2 kB each
    "verbose_errors": False,
}
STACK_BYTES = 128 << 20  # for MAX_REFERENCE_DEPTH levels; the largest observed level took 4 kB
SLOW_MASK_S = 0.5e-3  # CPU time. Most masks take 0.03 ms, but within LIMITS a mask may take 30 ms
NUM_SLOW_MASKS = 1000  # after a slow mask, this many masks of the same grammar count as slow
NUM_MASK_THREADS = 2
NO_ANSWER = "no answer matches it"
NO_CONTINUATION = "no token of the model's vocabulary continues the answer as structured_outputs demands"
# Parts of llguidance's messages about its limits
_IS_LIMIT = re.compile(r"too (many|large|complex|big|deep)|max is|limit|fuel", re.IGNORECASE)
MAX_RELAXED = 256  # relaxed schemas in the cache
MAX_PATTERNS_TRIED = 16  # patterns of a schema that are compiled one by one to find a fault

logger = logging.getLogger(__name__)


class Vocabulary:
    """The model's vocabulary as llguidance reads it, and masks over it."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...], limits: Mapping[str, Any] = LIMITS
    ) -> None:
        """limits: arguments of llguidance.LLParserLimits. Raises ValueError if the bytes of a token cannot be found.

        llguidance would read the bytes from the tokenizer's description, and misread some. So llguidance is given the
        bytes that the tokenizer decodes.
        """
        import llguidance
        from llguidance._tokenizer import TokenizerWrapper

        num_ids = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        end_token_ids = tuple(token_id for token_id in end_token_ids if token_id < vocab_size)
        known = _KnownTokens(tokenizer, num_ids, end_token_ids)
        self.tokens = llguidance.LLTokenizer(TokenizerWrapper(known), eos_token=list(end_token_ids) or None)
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
        self.numbers = NumberMasks(map(self.text_of, range(vocab_size)), vocab_size)

    def text_of(self, token_id: int) -> bytes:
        """Return the text of a token as bytes."""
        text: bytes = self.tokens.decode_bytes([token_id]) if token_id < self.tokens.vocab_size else b""
        return text

    def is_text(self, token_id: int) -> bool:
        """Return True for a token of the model that is not an end token."""
        return 0 <= token_id < self.vocab_size and is_allowed(self._text_tokens, token_id)

    def continuations(self, matcher: Any) -> TokenMask:
        """Return the mask of tokens that may follow, without end tokens. Releases the GIL.

        The mask is empty if `matcher` has stopped.
        """
        words = np.empty(self._num_all_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words[: self._num_words] & self._text_tokens


class _KnownTokens:
    """A tokenizer's vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, num_ids: int, end_token_ids: tuple[int, ...]) -> None:
        token_bytes = read_token_bytes(tokenizer, num_ids)
        added = {*tokenizer.get_added_vocab().values()}
        # Tokens that match no text. llguidance needs a name for each, and reads byte 255 as the mark of a name
        self.special_token_ids = [i for i, each in enumerate(token_bytes) if i in added or each[:1] in (b"", b"\xff")]
        self.tokens = [
            f"<[{i}]>".encode() if each[:1] in (b"", b"\xff") else each for i, each in enumerate(token_bytes)
        ]
        self.eos_token_id = end_token_ids[0] if end_token_ids else tokenizer.eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Return no tokens, because llguidance needs the tokens of a text only with forcing."""
        return []


def is_allowed(mask: TokenMask, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)


class Grammar:
    """A compiled grammar, from which the matchers of all answers start."""

    def __init__(self, vocabulary: Vocabulary, kind: str, text: str, places: JsonPlaces | None) -> None:
        """kind: the field of StructuredOutputs with the grammar. places: the places of JSON in the answer, or None.

        Raises RequestError if the grammar cannot be used.
        """
        self.places = places
        self.vocabulary = vocabulary
        self._text = text
        self._lock = threading.Lock()
        self._is_useless = False  # a mask has exceeded a limit
        self._initial = _matcher(vocabulary, text)
        self._num_slow_masks = 0  # number of coming masks that count as slow
        first = self._initial.deep_copy()
        self.first_mask = self.continuations(first)  # finds what compilation does not
        reason = _error_of(first) or (None if self.first_mask.any() else "only the empty answer matches it")
        if reason is not None:
            raise RequestError(f"structured_outputs.{kind} cannot be used: {reason}; correct or simplify it")

    def start(self) -> Any:
        """Return a matcher of llguidance at the start of an answer."""
        return self._initial.deep_copy()

    def note_limit(self) -> None:
        """Record that a mask has exceeded a limit of llguidance, which makes the automaton unusable."""
        self._is_useless = True

    def renew(self) -> None:
        """Compile the grammar again if the automaton is unusable."""
        with self._lock:
            if self._is_useless:
                self._initial, self._is_useless = _matcher(self.vocabulary, self._text), False

    @property
    def is_slow(self) -> bool:
        """Return True if masks are too slow for the engine's thread."""
        return self._num_slow_masks > 0

    def continuations(self, matcher: Any) -> TokenMask:
        """Call Vocabulary.continuations, and record whether the call is slow."""
        start_s = time.thread_time()
        mask = self.vocabulary.continuations(matcher)
        if time.thread_time() - start_s > SLOW_MASK_S:
            self._num_slow_masks = NUM_SLOW_MASKS
        elif self._num_slow_masks:
            self._num_slow_masks -= 1
        return mask


_stack_size_lock = threading.Lock()


def _matcher(vocabulary: Vocabulary, text: str) -> Any:
    """Compile a grammar to a matcher of llguidance. The matcher has an error if the grammar cannot be compiled.

    llguidance follows references by recursion, and a stack overflow would kill the process, so a thread with a stack of
    STACK_BYTES compiles. The size of stacks is a setting of the process: other threads that start at the same moment
    get a stack of this size, too, which costs only address space.
    """
    from llguidance import LLMatcher

    with ThreadPoolExecutor(1, "grammar") as pool, _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            compiled = pool.submit(LLMatcher, vocabulary.tokens, text, log_level=0, limits=vocabulary.limits)
        finally:
            threading.stack_size(before)
    return compiled.result()


def _error_of(matcher: Any) -> str | None:
    """Return llguidance's error, or None if the matcher has no error."""
    return _reason_of(matcher.get_error()) if matcher.is_error() else None


def _reason_of(message: str) -> str:
    """Return the line of a message with the reason. All other lines quote the grammar or are a stack trace."""
    if message.startswith("NoExtension"):
        return NO_ANSWER
    lines = message.splitlines() or ["unknown error"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    line = re.sub(r"^(error: )?(at \d+\(\d+\): )?", "", line)
    for prefix in ("failed to compile JSON schema: ", "panic: "):
        line = line.removeprefix(prefix)
    return shortened(line)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. The first compilation also reads the vocabulary, which takes a second."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...], limits: Mapping[str, Any] = LIMITS
    ) -> None:
        """vocab_size: the size of the model's vocabulary, which may differ from the size of the tokenizer's."""
        self._make_vocabulary = partial(Vocabulary, tokenizer, vocab_size, end_token_ids, limits)
        self._lock = threading.Lock()
        added = {} if tokenizer is None else tokenizer.get_added_vocab()
        self._added_tokens = {token: token_id for token, token_id in added.items() if token_id not in end_token_ids}
        self._special_ids = frozenset(added and tokenizer.all_special_ids)
        self._make_grammar = lru_cache(MAX_GRAMMARS)(Grammar)
        self._relax = lru_cache(MAX_RELAXED)(_relax)
        self._report = lru_cache(MAX_RELAXED)(_report)
        self._vocabulary: Vocabulary | None = None
        self._refusal: str | None = None  # the reason why this tokenizer cannot be used
        if tokenizer is None:
            self._refusal = "structured_outputs needs a tokenizer, but this model has none; leave it out"

    def compile(self, outputs: StructuredOutputs, reasoning: AnswerTags | None = None) -> Grammar:
        """Compile the grammar of an answer. Cached. reasoning: the tags of reasoning before the answer, or None.

        Raises RequestError if llguidance is missing, or refuses the tokenizer or the grammar.
        """
        vocabulary = self._read_vocabulary()
        writer = GrammarWriter(self._added_tokens, self._special_ids, partial(self._relax, vocabulary), self._report)
        kind, text, places = writer.write(outputs, reasoning)
        try:
            grammar = self._make_grammar(vocabulary, kind, text, places)
        except RequestError:
            for schema in writer.schemas:
                refuse(find_faults(schema, _pattern_check(vocabulary)))
            raise
        grammar.renew()
        return grammar

    def _read_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None and self._refusal is None:
                try:
                    self._vocabulary = self._make_vocabulary()
                except ImportError as error:
                    raise RequestError(
                        "structured_outputs needs llguidance, which is not installed; run: "
                        f"{install_command('structured')}"
                    ) from error
                except ValueError as error:
                    reason = _reason_of(str(error))
                    self._refusal = f"structured_outputs cannot be used with this model's tokenizer: {reason}"
        if self._vocabulary is None:
            raise RequestError(self._refusal)
        return self._vocabulary


def _relax(vocabulary: Vocabulary, place: str, text: str) -> str:
    """Return the rule of a schema, given as JSON text. Remove and log the parts that a grammar cannot express.

    An invalid schema is not changed, so that its rule fails to compile.
    """
    schema = json.loads(text)
    options = schema.pop("x-guidance")
    remove_neutral_keywords(schema)
    left_out: list[Fault] = []
    rule, warnings = "", []
    for remove in (
        lambda: remove_faults(schema, lambda pattern: None),
        lambda: remove_faults(schema, _pattern_check(vocabulary)),
        lambda: remove_pattern_properties(schema),
    ):
        left_out += remove()
        rule = f"%json {json.dumps(schema | {'x-guidance': options})}"
        matcher = _try(vocabulary, rule)
        if not matcher.is_error():
            warnings = matcher.get_grammar_warnings()
            break
    if what := (*map(str, left_out), *warnings):
        _report(place, what)
    return rule


def _report(place: str, left_out: tuple[str, ...]) -> None:
    """Log the parts that were left out of a schema."""
    shown = "; ".join(map(shortened, left_out[:MAX_FAULTS]))
    logger.warning("nanovllm: answers need not match all of the schema of %s: %s", place or "the answer", shown)


def _pattern_check(vocabulary: Vocabulary) -> Callable[[str], str | None]:
    """Return a function that returns the reason why a regular expression cannot be used, or None. The function compiles
    only the first MAX_PATTERNS_TRIED expressions.
    """
    num_left = MAX_PATTERNS_TRIED

    def check(pattern: str) -> str | None:
        nonlocal num_left
        num_left -= 1
        schema = {"type": "string", "pattern": pattern}
        return _error_of(_try(vocabulary, f"%json {json.dumps(schema)}")) if num_left >= 0 else None

    return check


def _try(vocabulary: Vocabulary, rule: str) -> Any:
    """Return a matcher of llguidance for a rule. The matcher has an error if the rule cannot be compiled."""
    return _matcher(vocabulary, f"{HEADER}{rule}")


class TokenMatcher:
    """The state of one answer (a TokenConstraint).

    The mask and the acceptance of a token took 24 to 40 us on one busy core, with 151,936 ids and an automaton that
    earlier answers had built (`make bench-micro`).
    """

    def __init__(self, grammar: Grammar, ignore_eos: bool) -> None:
        """ignore_eos: allow no end token, so that the answer ends when no token can follow."""
        self.error: str | None = None
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._may_use_end_tokens = bool(self._vocabulary.end_token_ids) and not ignore_eos
        self._matcher = grammar.start()
        self._token_ids = array("q")  # all that were accepted, without an end token
        self._failed_draft_end: int | None = None  # number of the answer's tokens with the draft token that failed
        self._numbers = None if grammar.places is None else NumberScan(grammar.places)
        self._has_ended = False
        self._following: TokenMask | None = grammar.first_mask  # tokens that may come next, or None if unknown
        self._computing: Future[None] | None = None  # sets _following; no other code uses the matcher until this ends

    @property
    def is_finished(self) -> bool:
        """See TokenConstraint. If the answer may end here, this property computes the next mask and stores it.

        If masks are slow, this property only checks whether the grammar could continue, regardless of the vocabulary.
        """
        if self._has_ended or self.error is not None:
            return self._has_ended
        if not self._matcher.is_accepting() or self._grammar.is_slow:
            return bool(self._matcher.is_accepting() and self._matcher.is_stopped())
        return not self._continuations().any() and self.error is None

    @property
    def is_ready(self) -> bool:
        """See TokenConstraint. Slow masks are computed by other threads. Hot: once per sequence and step."""
        if self._following is None and self._computing is None and self.is_slow:
            self._computing = self._vocabulary.mask_threads.submit(self._find_following)
        return self._computing is None or self._computing.done()

    @property
    def is_slow(self) -> bool:
        """See TokenConstraint. Also True after an error that a draft token has caused."""
        is_slow = self._grammar.is_slow or self._failed_draft_end is not None
        return is_slow and self.error is None and not self._has_ended

    def accept(self, token_id: int) -> bool:
        """See TokenConstraint. Hot: once per sequence and token."""
        if len(self._token_ids) == self._failed_draft_end:
            self._continuations()  # the token was sampled without a mask, because the mask has an error
        if self._has_ended or self.error is not None:
            return False
        if token_id in self._vocabulary.end_token_ids:
            self._has_ended = self._may_use_end_tokens and self._matcher.is_accepting()
            return self._has_ended
        if not self._vocabulary.is_text(token_id) or self._is_too_long(token_id) or not self._advance(token_id):
            return False
        self._token_ids.append(token_id)
        if self._numbers is not None:
            self._numbers.follow(self._vocabulary.text_of(token_id))
        self._following = None
        return True

    def mask(self) -> TokenMask:
        """Return the tokens that may come next."""
        return self.masks_for([])[0]

    def masks_for(self, guesses: list[int]) -> list[TokenMask]:
        """See TokenConstraint. Hot: once per sequence and step."""
        rows: list[TokenMask] = []
        if not self._has_ended:
            following = self._continuations()
            if self.error is None:
                rows.append(self._with_end_tokens(following))
                rows += self._masks_after(guesses, rows[0])
        return rows + [self._vocabulary.anything] * (1 + len(guesses) - len(rows))

    def _masks_after(self, guesses: list[int], mask: TokenMask) -> list[TokenMask]:
        """Return a mask for each draft token that is allowed and does not end the answer, up to one whose mask cannot
        be computed. May set `error`.

        mask: the mask of the tokens that may come next.
        """
        rows: list[TokenMask] = []
        numbers = None if self._numbers is None else self._numbers.copy()
        for token_id in guesses:
            is_text = self._vocabulary.is_text(token_id) and is_allowed(mask, token_id)
            if not is_text or not self._matcher.try_consume_tokens([token_id]):
                break
            following = self._grammar.continuations(self._matcher)
            if self._matcher.is_error():
                break
            if numbers is not None:
                numbers.follow(self._vocabulary.text_of(token_id))
            mask = self._with_end_tokens(self._limited(following, numbers))
            rows.append(mask)
        if self._matcher.is_error():
            self._failed_draft_end = len(self._token_ids) + len(rows) + 1
            self._take_back_drafts()
        elif rows:
            is_back = self._matcher.rollback(len(rows))
            assert is_back, "llguidance cannot take tokens back"
        return rows if self.error is None else []

    def _take_back_drafts(self) -> None:
        """Return to the end of the answer after an error that a draft token has caused. May set `error`.

        A matcher keeps an error and then cannot take tokens back, so another one reads the answer again. That takes
        time, so the answer gets no more draft tokens. If the automaton has become useless, the answer ends, now or as
        soon as it needs another mask.
        """
        failed, self._matcher = self._matcher, self._grammar.start()
        if self._matcher.try_consume_tokens(self._token_ids.tolist()) < len(self._token_ids):
            self._matcher = failed
            self._check()
        elif _error_of(failed) != NO_ANSWER:
            self._grammar.note_limit()

    def _continuations(self) -> TokenMask:
        """Return the tokens that may follow the answer, without end tokens. May set `error`."""
        if self._computing is not None:
            self._computing.result()
            self._computing = None
        if self._following is None:
            self._find_following()
        assert self._following is not None
        return self._following

    def _find_following(self) -> None:
        """Set `_following`. Set `error` if the mask cannot be computed, or if the answer can neither end nor go on."""
        following = self._grammar.continuations(self._matcher)
        self._check()
        if self.error is None and not following.any() and not self._matcher.is_accepting():
            self.error = NO_CONTINUATION
        self._following = self._limited(following, self._numbers)

    def _limited(self, following: TokenMask, numbers: NumberScan | None) -> TokenMask:
        """Remove from `following` the tokens that make a number too long, unless the schema leaves no other token."""
        forbidden = None if numbers is None else numbers.forbidden(self._vocabulary.numbers)
        if forbidden is None:
            return following
        limited = following & ~forbidden
        return limited if limited.any() or self._matcher.is_accepting() else following

    def _is_too_long(self, token_id: int) -> bool:
        """Return True for a token that makes a number too long."""
        forbidden = None if self._numbers is None else self._numbers.forbidden(self._vocabulary.numbers)
        is_forbidden = forbidden is not None and is_allowed(forbidden, token_id)
        return is_forbidden and not is_allowed(self._continuations(), token_id)

    def _advance(self, token_id: int) -> bool:
        """Advance the matcher by the token. Return False if the token is not allowed."""
        is_taken = bool(self._matcher.try_consume_tokens([token_id]))
        if not is_taken:
            self._grammar.continuations(self._matcher)  # only a mask shows that the automaton is unusable
            self._check()
        return is_taken

    def _with_end_tokens(self, following: TokenMask) -> TokenMask:
        """Add the end tokens if the answer may end here.

        If no token can follow and end tokens are not used, allow all tokens: the request ends before the mask is used.
        """
        if not self._matcher.is_accepting():
            return following
        if self._may_use_end_tokens:
            return following | self._vocabulary.end_tokens
        return following if following.any() else self._vocabulary.anything

    def _check(self) -> None:
        """Set `error` if the matcher has one."""
        if self.error is None and (reason := _error_of(self._matcher)) is not None:
            self.error = NO_CONTINUATION if reason == NO_ANSWER else reason
            if reason != NO_ANSWER:
                self._grammar.note_limit()
            if _IS_LIMIT.search(reason):
                remedy = "simplify the grammar, or send the request again"
                self.error = f"structured_outputs became too complex: {reason}; {remedy}"
