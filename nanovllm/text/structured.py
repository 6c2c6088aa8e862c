"""Structured output: answers that match a JSON schema, a regular expression or a choice.

    compiler = GrammarCompiler(tokenizer, vocab_size, end_token_ids)
    constraint = TokenMatcher(compiler.compile(params.structured_outputs), params.ignore_eos)

llguidance compiles the grammars and computes the masks. It is an extra, imported when a request first asks for it.

Grammars may be made to harm, so LIMITS bound the time and memory of each compilation and each mask, and
`_GrammarWriter` checks what llguidance does not: the size of the text, and how deep references in a schema can nest. A
grammar that exceeds a limit at the start of an answer is refused with a RequestError. One that exceeds it later ends
that request with an error.

llguidance builds the automaton of a grammar as masks need it, and all matchers of one Grammar share it behind a lock of
llguidance. Once a mask exceeds a limit, the automaton is useless, and all answers that use it end with an error. The
next request with this grammar compiles it anew.

Compilation and masks release the GIL; `accept` does not, and takes microseconds. Any thread may compile, but the
engine's never does. If a grammar's masks are slow, other threads compute them while the answer pauses. A matcher
belongs to one thread at a time.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from nanovllm.errors import RequestError, install_command
from nanovllm.plan.logit_edits import TokenMask, token_mask
from nanovllm.sampling_params import ReasoningTags, StructuredOutputs, TaggedJson, TaggedValue
from nanovllm.text.json_schema import (
    Fault,
    find_faults,
    remove_faults,
    remove_neutral_keywords,
    remove_pattern_properties,
)
from nanovllm.text.number_limit import JsonPlaces, NumberMasks, NumberScan
from nanovllm.text.token_bytes import read_token_bytes
from nanovllm.utils.arithmetic import ceil_div

MAX_GRAMMARS = 16  # compiled grammars in the cache
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
MAX_CHARS = 200_000  # limit of a schema, a regex, or all choices together
# llguidance follows references by recursion. Each reference is followed at most once on the way down, through no more
# levels than the schema has, so the product of the two bounds the depth.
MAX_REFERENCE_DEPTH = 6000
STACK_BYTES = 128 << 20  # for so many levels; one was seen to take up to 4 kB
MAX_WHITESPACE = 64  # between two parts of JSON; without a limit, some models emit whitespace and never stop

# With forcing, a token that only one text can follow is replaced by the tokenizer's own split of that text. llguidance
# would write out the whole text first: gigabytes for ((a{1000}){1000}){1000}. Without, masks hold every allowed token.
_HEADER = '%llguidance {"no_forcing": true}\nstart: '
_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write tool calls
SLOW_MASK_S = 0.5e-3  # CPU time. Most masks take 0.03 ms, but the limits above admit some of 30 ms
NUM_SLOW_MASKS = 1000  # after a slow mask, so many of the same grammar are taken to be slow
NUM_MASK_THREADS = 2
MAX_REASON_CHARS = 300
NO_ANSWER = "no answer matches it"
NO_CONTINUATION = "no token of the model's vocabulary continues the answer as structured_outputs demands"
MAX_FAULTS = 5  # in a message
# In llguidance's messages about its limits
_IS_LIMIT = re.compile(r"too (many|large|complex|big|deep)|max is|limit|fuel", re.IGNORECASE)
MAX_RELAXED = 256  # relaxed schemas in the cache
MAX_PATTERNS_TRIED = 16  # of a schema that cannot be compiled, one by one

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


class Vocabulary:
    """The model's vocabulary as llguidance reads it, and masks over it."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...], limits: Mapping[str, Any] = LIMITS
    ) -> None:
        """`limits`: arguments of llguidance.LLParserLimits. Raises ValueError if the bytes of a token cannot be told.

        llguidance would read the bytes from the tokenizer's description, and misreads some. So it is given the bytes
        that the tokenizer decodes.
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
        """Return the tokens that may follow, without end tokens; none if `matcher` has stopped. Releases the GIL."""
        words = np.empty(self._num_all_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words[: self._num_words] & self._text_tokens


class _KnownTokens:
    """A vocabulary in the form in which llguidance takes one."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, num_ids: int, end_token_ids: tuple[int, ...]) -> None:
        token_bytes = read_token_bytes(tokenizer, num_ids)
        added = {*tokenizer.get_added_vocab().values()}
        # Tokens that no text matches. llguidance wants a name for each, and byte 255 marks the names
        self.special_token_ids = [i for i, each in enumerate(token_bytes) if i in added or each[:1] in (b"", b"\xff")]
        self.tokens = [
            f"<[{i}]>".encode() if each[:1] in (b"", b"\xff") else each for i, each in enumerate(token_bytes)
        ]
        self.eos_token_id = end_token_ids[0] if end_token_ids else tokenizer.eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Splitting texts into tokens is only needed with forcing."""
        return []


def is_allowed(mask: TokenMask, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)


class Grammar:
    """A compiled grammar, from which the matchers of all answers start."""

    def __init__(self, vocabulary: Vocabulary, kind: str, text: str, places: JsonPlaces | None) -> None:
        """`kind`: the field of StructuredOutputs that asks for it. `places`: of JSON in the answer; None without any.

        Raises RequestError if it cannot be used.
        """
        self.places = places
        self.vocabulary = vocabulary
        self._text = text
        self._lock = threading.Lock()
        self._is_useless = False  # a mask has exceeded a limit
        self._initial = _matcher(vocabulary, text)
        self._num_slow_masks = 0  # so many masks from now on are taken to be slow
        first = self._initial.deep_copy()
        self.first_mask = self.continuations(first)  # finds what compilation does not
        reason = _error_of(first) or (None if self.first_mask.any() else "only the empty answer matches it")
        if reason is not None:
            raise RequestError(f"structured_outputs.{kind} cannot be used: {reason}; correct or simplify it")

    def start(self) -> Any:
        """Return a matcher of llguidance at the start of an answer."""
        return self._initial.deep_copy()

    def note_limit(self) -> None:
        """Note that a mask has exceeded a limit of llguidance, so that this automaton is useless."""
        self._is_useless = True

    def renew(self) -> None:
        """Compile the grammar anew if the automaton is useless."""
        with self._lock:
            if self._is_useless:
                self._initial, self._is_useless = _matcher(self.vocabulary, self._text), False

    @property
    def is_slow(self) -> bool:
        """True if masks can take so long that the engine's thread should not compute them."""
        return self._num_slow_masks > 0

    def continuations(self, matcher: Any) -> TokenMask:
        """Call Vocabulary.continuations, and note how long it takes."""
        start_s = time.thread_time()
        mask = self.vocabulary.continuations(matcher)
        if time.thread_time() - start_s > SLOW_MASK_S:
            self._num_slow_masks = NUM_SLOW_MASKS
        elif self._num_slow_masks:
            self._num_slow_masks -= 1
        return mask


def _matcher(vocabulary: Vocabulary, text: str) -> Any:
    """Compile a grammar to a matcher of llguidance. The matcher has an error if the grammar cannot be compiled."""
    from llguidance import LLMatcher

    return with_deep_stack(partial(LLMatcher, vocabulary.tokens, text, log_level=0, limits=vocabulary.limits))


def _error_of(matcher: Any) -> str | None:
    """Return what llguidance complains about; None if the matcher is in order."""
    return _reason_of(matcher.get_error()) if matcher.is_error() else None


def _reason_of(message: str) -> str:
    """Return the line of a message that says what is wrong. The others quote the grammar, or are a stack trace."""
    if message.startswith("NoExtension"):
        return NO_ANSWER
    lines = message.splitlines() or ["unknown error"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    line = re.sub(r"^(error: )?(at \d+\(\d+\): )?", "", line)
    for prefix in ("failed to compile JSON schema: ", "panic: "):
        line = line.removeprefix(prefix)
    return _shortened(line)


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."


_stack_size_lock = threading.Lock()


def with_deep_stack(call: Callable[[], _Result]) -> _Result:
    """Call it in a thread with a stack of STACK_BYTES, and return the result.

    llguidance follows references by recursion, and a stack overflow would kill the process. The size of stacks is a
    setting of the process, so other threads that start at this moment get a deep one, too, which costs only address
    space.
    """
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _stack_size_lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                future = pool.submit(call)
            finally:
                threading.stack_size(before)
        return future.result()


class GrammarCompiler:
    """Compiles grammars for one tokenizer. The first compilation also reads its vocabulary, which takes a second."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...], limits: Mapping[str, Any] = LIMITS
    ) -> None:
        """`vocab_size` is the model's. It may be larger or smaller than the tokenizer's."""
        self._make_vocabulary = partial(Vocabulary, tokenizer, vocab_size, end_token_ids, limits)
        self._lock = threading.Lock()
        added = {} if tokenizer is None else tokenizer.get_added_vocab()
        special = {*end_token_ids, *(added and tokenizer.all_special_ids)}
        self._added_tokens = {token: token_id for token, token_id in added.items() if token_id not in special}
        self._pattern_check: Callable[[], Callable[[str], str | None]] | None = None
        self._compile: Callable[[str, str, JsonPlaces | None], Grammar] | None = None
        self._relaxed: Callable[[str, str], str] | None = None
        self._refusal: str | None = None  # why this tokenizer cannot be used
        if tokenizer is None:
            self._refusal = "structured_outputs needs a tokenizer, but this model has none; leave it out"

    def compile(self, outputs: StructuredOutputs, reasoning: ReasoningTags | None = None) -> Grammar:
        """Compile the grammar of an answer, before which there may be reasoning. Cached.

        Raises RequestError if llguidance is missing, or if it refuses the tokenizer or the grammar.
        """
        with self._lock:
            if self._compile is None and self._refusal is None:
                self._read_vocabulary()
        if self._compile is None:
            raise RequestError(self._refusal)
        assert self._relaxed is not None and self._pattern_check is not None, "made together"
        writer = _GrammarWriter(self._added_tokens, self._relaxed)
        grammar = writer.write(outputs, reasoning)
        try:
            compiled = self._compile(*grammar)
            compiled.renew()
            return compiled
        except RequestError:
            for schema in writer.schemas:
                _refuse(find_faults(schema, self._pattern_check()))
            raise

    def _read_vocabulary(self) -> None:
        try:
            vocabulary = self._make_vocabulary()
            self._relaxed = lru_cache(MAX_RELAXED)(partial(_relax, vocabulary))
            self._pattern_check = partial(_pattern_check, vocabulary)
            self._compile = lru_cache(MAX_GRAMMARS)(partial(Grammar, vocabulary))
        except ImportError as error:
            raise RequestError(
                f"structured_outputs needs llguidance, which is not installed; run: {install_command('structured')}"
            ) from error
        except ValueError as error:
            self._refusal = f"structured_outputs cannot be used with this model's tokenizer: {_reason_of(str(error))}"


def _relax(vocabulary: Vocabulary, place: str, text: str) -> str:
    """Return the rule of a schema, as JSON text, without what a grammar cannot express. Log what that is.

    A schema that is wrong stays as it is, so that its rule cannot be compiled.
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
    if what := [*map(str, left_out), *warnings]:
        shown = "; ".join(map(_shortened, what[:MAX_FAULTS]))
        logger.warning("nanovllm: answers need not match all of the schema of %s: %s", place or "the answer", shown)
    return rule


def _pattern_check(vocabulary: Vocabulary) -> Callable[[str], str | None]:
    """Return a function that returns why a regular expression cannot be used. It tries only the first few."""
    num_left = MAX_PATTERNS_TRIED

    def check(pattern: str) -> str | None:
        nonlocal num_left
        num_left -= 1
        schema = {"type": "string", "pattern": pattern}
        return _error_of(_try(vocabulary, f"%json {json.dumps(schema)}")) if num_left >= 0 else None

    return check


def _try(vocabulary: Vocabulary, rule: str) -> Any:
    """Return a matcher of llguidance for a rule. It has an error if the rule cannot be compiled."""
    return _matcher(vocabulary, f"{_HEADER}{rule}")


class TokenMatcher:
    """The state of one answer (a TokenConstraint).

    The mask and the acceptance of a token took 24 to 40 us on one busy core, with 151,936 ids and an automaton that
    earlier answers had built (`make bench-micro`).
    """

    def __init__(self, grammar: Grammar, ignore_eos: bool) -> None:
        """`ignore_eos`: allow no end token, so that the answer ends when nothing can follow."""
        self.error: str | None = None
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._may_use_end_tokens = bool(self._vocabulary.end_token_ids) and not ignore_eos
        self._matcher = grammar.start()
        self._numbers = None if grammar.places is None else NumberScan(grammar.places)
        self._has_ended = False
        self._following: TokenMask | None = grammar.first_mask  # tokens that may come next; None until asked for
        self._computing: Future[None] | None = None  # sets _following; meanwhile nobody else uses the matcher

    @property
    def is_finished(self) -> bool:
        """See TokenConstraint. Where the answer may end, this computes the next mask and keeps it.

        If masks are slow, it asks only if the grammar could go on, with whatever tokens.
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
        """See TokenConstraint."""
        return self._grammar.is_slow and self.error is None and not self._has_ended

    def accept(self, token_id: int) -> bool:
        """See TokenConstraint. Hot: once per sequence and token."""
        if self._has_ended or self.error is not None:
            return False
        if token_id in self._vocabulary.end_token_ids:
            self._has_ended = self._may_use_end_tokens and self._matcher.is_accepting()
            return self._has_ended
        if not self._vocabulary.is_text(token_id) or self._is_too_long(token_id) or not self._advance(token_id):
            return False
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
        """Return a mask for each draft token that is allowed and does not end the answer. May set `error`.

        mask: the tokens that may come next.
        """
        rows: list[TokenMask] = []
        numbers = None if self._numbers is None else self._numbers.copy()
        for token_id in guesses:
            is_text = self._vocabulary.is_text(token_id) and is_allowed(mask, token_id)
            if not is_text or not self._matcher.try_consume_tokens([token_id]):
                break
            following = self._grammar.continuations(self._matcher)
            self._check()
            if self.error is not None:
                return []
            if numbers is not None:
                numbers.follow(self._vocabulary.text_of(token_id))
            mask = self._with_end_tokens(self._limited(following, numbers))
            rows.append(mask)
        if rows:
            is_back = self._matcher.rollback(len(rows))
            assert is_back, "llguidance cannot take tokens back"
        return rows

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
        """Set `_following`, and `error` if it cannot be found, or if the answer can neither end nor go on."""
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
        """Let the matcher take the token. Returns False if the token is not allowed."""
        is_taken = bool(self._matcher.try_consume_tokens([token_id]))
        if not is_taken:
            self._grammar.continuations(self._matcher)  # only a mask tells that the automaton is useless
            self._check()
        return is_taken

    def _with_end_tokens(self, following: TokenMask) -> TokenMask:
        """Add the end tokens if the answer may end here.

        If nothing can follow and end tokens are not used, allow everything: the request ends before it counts.
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


# -- what llguidance compiles ----------------------------------------------------------------------------------------


class _GrammarWriter:
    """Writes the grammar of one request in the Lark language.

    added_tokens: tokens that are part of a text. A tag that is one of them is matched as that token, because an added
    token never matches a text, and the model would write it as a token. relaxed: see GrammarCompiler.
    """

    def __init__(self, added_tokens: Mapping[str, int], relaxed: Callable[[str, str], str]) -> None:
        self._added_tokens, self._relaxed = added_tokens, relaxed
        self._rules = {"TEXT": r"/(.|\n)*/"}  # by name
        self.schemas: list[Any] = []  # schemas that the answer must match to the letter

    def write(self, outputs: StructuredOutputs, reasoning: ReasoningTags | None) -> tuple[str, str, JsonPlaces | None]:
        """Return the name of the field that is given, the grammar, and where the answer has JSON or None without any.

        Raises RequestError for what can be refused without compiling it.
        """
        kind, form = self._form(outputs)
        tagged = outputs.tagged_json
        has_free_text = False
        if tagged is not None:
            kind = "tagged_json"
            has_free_text = not (tagged.is_required or form) and bool(tagged.trigger)
            form = self._tagged(tagged, form, reasoning)
        before = "" if reasoning is None else self._reasoning(reasoning, has_free_text)
        rules = [f"{name}: {rule}" for name, rule in self._rules.items()]
        grammar = "\n".join([f"{_HEADER}{f'{before}({form})' if before else form}", *rules])
        if tagged is not None:
            _check_size("tagged_json", len(grammar))
        return kind, grammar, _json_places(outputs, reasoning)

    def _form(self, outputs: StructuredOutputs) -> tuple[str, str]:
        """Return the name of the field other than tagged_json that is given, and its rule; "" for none."""
        if outputs.json_object:
            return "json_object", self._json({"type": "object"}, whitespace_pattern=_WHITESPACE)
        if outputs.json is not None:
            return "json", self._json(outputs.json, whitespace_pattern=_WHITESPACE)
        if outputs.regex is not None:
            _check_size("regex", len(outputs.regex))
            return "regex", _regex(outputs.regex)
        if outputs.choice is not None:
            _check_size("choice", sum(map(len, outputs.choice)))
            self._rules["CHOICE"] = " | ".join(map(json.dumps, outputs.choice))
            return "choice", "CHOICE"
        return "", ""

    def _reasoning(self, tags: ReasoningTags, has_free_text: bool) -> str:
        """Return a rule for the reasoning and the white space after it.

        has_free_text: what follows begins with any text. Tags that are no tokens belong to that text.
        """
        if has_free_text and not {tags.begin, tags.end} <= self._added_tokens.keys():
            return ""
        self._rules["THOUGHT"] = _terminal(text_without([tags.end]))
        thoughts = self._any_text("THOUGHT", (tags.end,))
        if tags.end in self._added_tokens:
            thoughts += f" THOUGHT {self._literal(tags.end)}"
        else:
            self._rules["thought[lazy]"] = f"THOUGHT {json.dumps(tags.end)}"
            thoughts += " thought "
        if not has_free_text:
            self._rules["SPACE"] = f"/[ \\t\\r\\n]{{0,{MAX_WHITESPACE}}}/"
            thoughts += "SPACE "
        if tags.has_begun:
            return thoughts
        self._rules["LEADING_SPACE"] = f"/[ \\t\\r\\n]{{0,{MAX_WHITESPACE}}}/"
        return f"(LEADING_SPACE {self._literal(tags.begin)}{thoughts})? "

    def _any_text(self, text: str, without: tuple[str, ...]) -> str:
        """Return a rule for texts between added tokens, such as </think>, up to the next text."""
        others = [str(token_id) for token, token_id in self._added_tokens.items() if token not in without]
        return f"({text} <[{','.join(others)}]>)*" if others else '""'

    def _tagged(self, tagged: TaggedJson, form: str, reasoning: ReasoningTags | None) -> str:
        """Return the rule of an answer with tags, with one rule for each tag. `form`: of an answer without tags.

        The lexer takes the shortest text that ends in the trigger, so free text has none. Should the model spell the
        trigger in letters, a tag must follow, too.
        """
        is_alternative = tagged.is_required or bool(form)
        start = "" if is_alternative else tagged.trigger
        names = tagged.names or [""] * len(tagged.tags)
        for i, ((begin, schema, end), name) in enumerate(zip(tagged.tags, names, strict=True)):
            values = schema if isinstance(schema, tuple) else [TaggedValue("", schema, "", True)]
            body = "".join(self._value(value, f"{i}_{j}", name, tagged.value_pattern) for j, value in enumerate(values))
            self._rules[f"tag_{i}"] = f"{self._literal(begin.removeprefix(start))}{body}{self._literal(end)}"
        self._rules["tag"] = " | ".join(f"tag_{i}" for i in range(len(tagged.tags)))
        tags = "tag" if tagged.is_single else f"tag ({self._literal(tagged.separator)}tag)*"
        if is_alternative:
            return f"{tags} | {form}" if form else tags
        if not tagged.trigger:
            self._rules["FREE"] = _terminal(tagged.text_pattern or r"([ \t\r\n]*[^ \t\r\n{](.|\n)*)?")
            return f"FREE | {tags}"
        self._rules["FREE"] = _terminal(tagged.text_pattern)
        self._rules["SPELLED"] = f"FREE {json.dumps(tagged.trigger)}"
        self._rules["spelled[lazy]"] = "SPELLED"
        is_token = tagged.trigger in self._added_tokens
        self._rules["free"] = self._any_text("FREE", (tagged.trigger, *([reasoning.begin] if reasoning else [])))
        self._rules["trigger"] = f"free (spelled{f' | FREE {self._literal(tagged.trigger)}' if is_token else ''})"
        return "free FREE | trigger tag" if tagged.is_single else "(trigger tag)* free FREE"

    def _value(self, value: TaggedValue, number: str, name: str, value_pattern: str) -> str:
        if value.choices:
            choices = " | ".join(self._literal(choice) or '""' for choice in value.choices)
            rule = f"{self._literal(value.begin)}({choices}) {self._literal(value.end)}"
        elif value.schema is None:
            # The text may have no added tokens, so its end is in letters, too
            self._rules["VALUE"] = _terminal(value_pattern)
            self._rules[f"VALUE_{number}"] = f"VALUE {json.dumps(value.end)}"
            self._rules[f"value_{number}[lazy]"] = f"VALUE_{number}"
            rule = f"{self._literal(value.begin)}value_{number} "
        else:
            place = f"{name} {value.begin.strip()}".strip()
            rule = f"{self._literal(value.begin)}{self._json(value.schema, place, **_ONE_LINE)} "
            rule += self._literal(value.end)
        return rule if value.is_required else f"({rule})? "

    def _literal(self, text: str) -> str:
        """Return strings of a grammar, each with a space after it: added tokens as tokens, the others as texts."""
        tokens = [token for token in sorted(self._added_tokens, key=len, reverse=True) if token in text]
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return "".join(
            f"<[{self._added_tokens[each]}]> " if each in tokens else f"{json.dumps(each)} " for each in pieces if each
        )

    def _json(self, schema: Any, place: str = "", **defaults: Any) -> str:
        """Return the rule of a JSON schema. `place`: for the log. `defaults`: options of llguidance.

        The options in the schema itself, under "x-guidance", take precedence. With "lenient" among them, the schema is
        relaxed where a grammar cannot express it. Otherwise this raises RequestError.
        """
        schema = _parse_schema(schema)
        if isinstance(schema, dict):
            options = schema.get("x-guidance", {})
            if isinstance(options, dict):
                schema["x-guidance"] = defaults | options
                if options.get("lenient") is True:
                    return self._relaxed(place, json.dumps(schema))
            remove_neutral_keywords(schema)
            _refuse(find_faults(schema))
            self.schemas.append(schema)
        return f"%json {json.dumps(schema)}"


def _json_places(outputs: StructuredOutputs, reasoning: ReasoningTags | None) -> JsonPlaces | None:
    """Return where an answer has JSON, or None if it has none. The rest of it must not be mistaken for JSON."""
    at_start = outputs.json is not None or outputs.json_object
    begins, ends = [], []
    tags = outputs.tagged_json.tags if outputs.tagged_json is not None else ()
    for begin, schema, end in tags:
        values = schema if isinstance(schema, tuple) else [TaggedValue(begin, schema, end, True)]
        begins += [value.begin for value in values if value.schema is not None]
        ends += [value.end for value in values if value.schema is not None]
    if not at_start and not begins:
        return None

    def encoded(texts: list[str]) -> tuple[bytes, ...]:
        return tuple({text.encode(errors="replace"): None for text in texts if text.strip()})

    return JsonPlaces(at_start, reasoning, encoded(begins), encoded([end for end in ends if len(end) > 1]))


def _refuse(faults: list[Fault]) -> None:
    """Raise RequestError for parts of a schema that a grammar cannot express."""
    if faults:
        raise RequestError(f"structured_outputs.json cannot be used: {_shown(faults)}; correct or simplify it")


def _shown(faults: list[Fault]) -> str:
    """Return what is wrong with a schema, for a message."""
    first = "; ".join(_shortened(str(fault)) for fault in faults[:MAX_FAULTS])
    return f"{first}; and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else first


def _terminal(pattern: str) -> str:
    """Return a terminal that matches a regular expression, or any text if it is empty."""
    return f"/{pattern.replace('/', chr(92) + '/')}/" if pattern else "TEXT"


def text_without(
    texts: Iterable[str], start: str = "[^<]*", continuations: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a regular expression, in Rust's syntax, of texts that do not contain any of `texts`.

    Each of these begins with "<" and has no other. start: matches what comes before the first "<". continuations: text
    -> what must follow it up to the next "<". Spelled out letter by letter, because the complement of a regular
    expression takes llguidance a hundred times longer.
    """
    words = dict.fromkeys((text[1:] for text in texts), "") | {text[1:]: then for text, then in continuations.items()}

    def rest(begun: str) -> str:
        """Return what can follow after "<" and `begun`."""
        if begun in words:
            return words[begun]
        following = {word[len(begun)]: None for word in words if word.startswith(begun) and word != begun}
        chars = "".join(re.escape(char) for char in following)
        branches = [re.escape(char) + after for char in following if (after := rest(begun + char))]
        return f"(?:{'|'.join(['', f'[^<{chars}][^<]*', *branches])})"

    return f"{start}(?:<{rest('')})*" if words else r"(?:.|\n)*"


def _check_size(kind: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise RequestError(
            f"structured_outputs.{kind} has {num_chars} characters, at most {MAX_CHARS}; make it smaller"
        )


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # regex_to_lark would drop it
        raise RequestError("structured_outputs.regex cannot be used: incomplete escape at its end; correct it")
    try:
        return f"/{regex_to_lark(regex, 'd')}/"  # \d is 0 to 9 only, and not any digit of Unicode
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.regex is not valid Unicode text; remove {error.object[error.start]!r}"
        ) from error


def _parse_schema(schema: Any) -> Any:
    """Return a copy of the schema, given as text or as a dict, as plain JSON values."""
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
    """Return the number of levels of a schema, and its number of references."""
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
