"""Structured output: answers that match a JSON schema, a regular expression or a choice.

    compiler = GrammarCompiler(tokenizer, vocab_size, end_token_ids)
    constraint = TokenMatcher(compiler.compile(params.structured_outputs), params.ignore_eos)

llguidance compiles the grammars and computes the masks. It is an extra, and imported when a request first asks for it.

A grammar that exceeds a limit (grammar.py) at the start of an answer is refused with a RequestError. One that exceeds
it later ends that request with an error.

Compilation and masks release the GIL; `accept` does not, and takes microseconds. Any thread may compile, but the
engine's never does. Grammars whose masks are slow have them computed by other threads, while the answer pauses. A
matcher belongs to one thread at a time.
"""

import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, TypeAlias

from nanovllm.core.logit_editor import TokenMask
from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.grammar import LIMITS, Grammar, Vocabulary, error_of, grammar_text, is_allowed, kind_of, reason_of

MAX_GRAMMARS = 16  # compiled ones that are kept
MAX_RENEWALS = 4  # renewals of the automaton in one answer; each reads the answer again

_Compile: TypeAlias = Callable[[str, str], Grammar]


class GrammarCompiler:
    """Compiles grammars for one tokenizer. The first compilation also reads its vocabulary, which takes a second."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...], limits: Mapping[str, Any] = LIMITS
    ) -> None:
        """`vocab_size` is the model's. It may be larger or smaller than the tokenizer's."""
        self._has_tokenizer = tokenizer is not None
        self._make_vocabulary = partial(Vocabulary, tokenizer, vocab_size, end_token_ids, limits)
        self._compile: _Compile | None = None
        self._refusal: str | None = None
        self._lock = threading.Lock()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Raises RequestError if llguidance is missing, or if it refuses the tokenizer or the grammar. Cached."""
        if not self._has_tokenizer:
            raise RequestError("structured_outputs needs a tokenizer, but this model has none; leave it out")
        with self._lock:
            if self._compile is None:
                self._compile = self._make_cache()
        return self._compile(kind_of(outputs), grammar_text(outputs))

    def _make_cache(self) -> _Compile:
        try:
            import llguidance.hf  # noqa: F401
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs llguidance, which is not installed; pip install 'nanovllm[structured]'"
            ) from error
        if self._refusal is None:
            try:
                return lru_cache(MAX_GRAMMARS)(partial(Grammar, self._make_vocabulary()))
            except ValueError as error:
                self._refusal = reason_of(str(error))  # reading the vocabulary again would take as long
        raise RequestError(f"structured_outputs cannot be used with this model's tokenizer: {self._refusal}")


class TokenMatcher:
    """The state of one answer (a TokenConstraint).

    The mask and the acceptance of a token took 24 to 40 us on one busy core, with 151,936 ids and an automaton that
    earlier answers had built (`make bench-micro`).
    """

    def __init__(self, grammar: Grammar, ignore_eos: bool) -> None:
        """With `ignore_eos` no end token is allowed, and the answer ends when nothing can follow."""
        self.error: str | None = None
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._may_use_end_tokens = bool(self._vocabulary.end_token_ids) and not ignore_eos
        self._matcher, self._generation = grammar.start()
        self._num_renewals = 0
        self._token_ids = array("q")  # all that were accepted, except an end token
        self._has_ended = False
        self._following: TokenMask | None = grammar.first_mask  # what may follow _token_ids; None until asked for
        self._computing: Future[None] | None = None  # sets _following; meanwhile nobody else uses the matcher

    @property
    def is_finished(self) -> bool:
        """See TokenConstraint. Where the answer may end, this computes the next mask, and keeps it. If masks are slow,
        it asks only whether the grammar could go on, whatever the tokens.
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
        if not self._vocabulary.is_text(token_id) or not self._advance(token_id):
            return False
        self._token_ids.append(token_id)
        self._following = None
        return True

    def mask(self) -> TokenMask:
        """The tokens that may come next."""
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
        """A mask for each guess that is allowed and does not end the answer. `mask` is that of the first guess."""
        rows = self._try_guesses(guesses, mask)
        if self._matcher.is_error():
            self._renew()
            rows = self._try_guesses(guesses, mask) if self.error is None else []
            if self._matcher.is_error():
                self._renew()  # a matcher never leaves an error, but this one is about a guess
        return rows

    def _try_guesses(self, guesses: list[int], mask: TokenMask) -> list[TokenMask]:
        """As `_masks_after`, but stops at an error, in which the matcher then remains."""
        rows: list[TokenMask] = []
        for token_id in guesses:
            is_text = self._vocabulary.is_text(token_id) and is_allowed(mask, token_id)
            if not is_text or not self._matcher.try_consume_tokens([token_id]):
                break
            following = self._grammar.continuations(self._matcher)
            if self._matcher.is_error():
                return rows
            mask = self._with_end_tokens(following)
            rows.append(mask)
        if rows and not self._matcher.is_error():
            is_back = self._matcher.rollback(len(rows))
            assert is_back, "llguidance cannot take tokens back"
        return rows

    def _continuations(self) -> TokenMask:
        """The tokens that may follow the answer, without end tokens. May set `error`."""
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
        if self._matcher.is_error():
            self._renew()
            following = self._grammar.continuations(self._matcher)
            self._check()
        if self.error is None and not following.any() and not self._matcher.is_accepting():
            self.error = "no token of the model's vocabulary continues the answer as structured_outputs demands"
        self._following = following

    def _advance(self, token_id: int) -> bool:
        """Advance the matcher by the token. Returns False, and changes nothing, if it does not allow the token."""
        is_allowed = bool(self._matcher.try_consume_tokens([token_id]))
        if self._matcher.is_error():
            self._renew()
            is_allowed = bool(self._matcher.try_consume_tokens([token_id]))
            self._check()
        return is_allowed

    def _with_end_tokens(self, following: TokenMask) -> TokenMask:
        """Add the end tokens if the answer may end here. If nothing can follow and end tokens are not used, allow
        everything, because the request ends before it counts.
        """
        if not self._matcher.is_accepting():
            return following
        if self._may_use_end_tokens:
            return following | self._vocabulary.end_tokens
        return following if following.any() else self._vocabulary.anything

    def _renew(self) -> None:
        """Leave an error: come to the same state with a new automaton. The error may be about the old one, which other
        answers have enlarged, or about a guess.
        """
        self._num_renewals += 1
        if self._num_renewals <= MAX_RENEWALS and self._grammar.renew(self._generation):
            self._matcher, self._generation = self._grammar.start()
            self._matcher.try_consume_tokens(self._token_ids.tolist())
        self._check()

    def _check(self) -> None:
        """Set `error` if the matcher has one."""
        if self.error is None and (reason := error_of(self._matcher)) is not None:
            self._grammar.renew(self._generation)  # for the answers after this one
            self.error = f"structured_outputs became too complex: {reason}"
