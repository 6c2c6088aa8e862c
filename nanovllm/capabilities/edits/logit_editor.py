"""LogitEditor: makes the edits of one request's logits, step by step (see plan/logit_edits.py), and BadWords.

Bad words are strings that must not occur in the decoded text. Strings are matched against the bytes of the text. An
Automaton reads the bytes. A token is forbidden in a state of the Automaton if reading the token's bytes from that state
completes a string:

- tokens that contain a whole string are forbidden in every state;
- after the first part of a string, tokens that begin with the rest of the string are forbidden.

UTF-8 is self-synchronizing, so a string is in the decoded text exactly where its bytes are in the bytes of the tokens.
"""

import copy
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nanovllm.plan.logit_edits import (
    NO_EDITS,
    NO_PENALTIES,
    NO_RULES,
    AnswerRules,
    Biases,
    Editor,
    LogitEdits,
    Penalties,
    RowEdits,
    TokenMask,
    packed_mask,
    token_mask,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.automaton import Automaton

_FORBID = float("-inf")


class LogitEditor:
    """Holds the biases, the bad words, the counts of the answer's tokens and the constraint of one request."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Seq[int],
        end_token_ids: Iterable[int],
        vocab_size: int,
        rules: AnswerRules = NO_RULES,
    ) -> None:
        """end_token_ids: the tokens that end the answer. They are forbidden until the answer has min_tokens tokens."""
        self._make_constraint = rules.make_constraint
        self.constraint = rules.make_constraint and rules.make_constraint()
        self._num_prompt_tokens = len(prompt)
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        bias = params.logit_bias or {}
        ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
        self._biases = Biases.of(list(bias), list(bias.values()))
        self._first_biases = Biases.joined([self._biases, Biases.of(ends, _FORBID)])
        assert isinstance(rules.bad_words, BadWords | None), f"{rules.bad_words} is not a BadWords"
        self._bad_words = rules.bad_words
        self._bad_words_state = 0
        self._num_followed = 0  # tokens of the answer that led to self._bad_words_state
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._prompt_mask = token_mask(prompt, vocab_size) if params.repetition_penalty != 1 else None
        self._counts = _TokenCounts() if self._penalties != NO_PENALTIES[:3] else None

    @classmethod
    def make(
        cls, params: SamplingParams, prompt: Seq[int], end_token_ids: Iterable[int], vocab_size: int, rules: AnswerRules
    ) -> Editor:
        """Make the editor of a request, which is NO_EDITS if the request edits nothing."""
        edits = params.min_tokens or params.logit_bias or rules != NO_RULES
        penalizes = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        return cls(params, prompt, end_token_ids, vocab_size, rules) if edits or penalizes else NO_EDITS

    def for_another_answer(self) -> "LogitEditor":
        """See Editor. The two editors share all large objects."""
        assert self._num_followed == 0, "an answer has begun"
        other = copy.copy(self)
        other.constraint = self._make_constraint and self._make_constraint()
        other._counts = self._counts and _TokenCounts()
        return other

    @property
    def needs_all_tokens(self) -> bool:
        """See Editor."""
        return self._bad_words is not None or self.constraint is not None

    def edits(self, token_ids: Seq[int], *, has_pending: bool, guesses: Seq[int]) -> LogitEdits | None:
        """See Editor. Hot: once per sequence and step."""
        num_known = len(token_ids) - self._num_prompt_tokens  # tokens of the answer
        penalties = NO_PENALTIES
        if self._counts is not None:
            self._counts.add(token_ids[self._num_prompt_tokens + self._counts.num_tokens :])
            penalties = Penalties(*self._penalties, self._prompt_mask, *self._counts.arrays())
        masks = self._masks(token_ids, has_pending, guesses)
        rows = tuple(
            RowEdits(
                self._first_biases if num_known + has_pending + i < self._min_tokens else self._biases,
                masks[i] if i < len(masks) else None,
            )
            for i in range(1 + len(guesses))
        )
        is_empty = self._counts is None and not any(row.changes_logits for row in rows)
        return None if is_empty else LogitEdits(penalties, int(has_pending), rows)

    def _masks(self, token_ids: Seq[int], has_pending: bool, guesses: Seq[int]) -> list[TokenMask]:
        """Return each row's mask of the tokens that the constraint and the bad words allow, or [] without both."""
        masks = [] if self.constraint is None else self.constraint.masks_for(list(guesses))
        if self._bad_words is None:
            return masks
        assert not has_pending, "bad words depend on a token that is not known yet"
        for token_id in token_ids[self._num_prompt_tokens + self._num_followed :]:
            self._bad_words_state = self._bad_words.follow(self._bad_words_state, token_id)
        self._num_followed = len(token_ids) - self._num_prompt_tokens
        states = [self._bad_words_state]
        for token_id in guesses:
            states.append(self._bad_words.follow(states[-1], token_id))
        allowed = [self._bad_words.mask(state) for state in states]
        return [mask & other for mask, other in zip(masks, allowed, strict=True)] if masks else allowed

    def forbids_all(self, token_ids: Seq[int]) -> bool:
        """See Editor."""
        edits = self.edits(token_ids, has_pending=False, guesses=())
        row = RowEdits() if edits is None else edits.rows[0]
        is_allowed = np.ones(self._vocab_size, np.bool_)
        if row.allowed is not None:
            is_allowed = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")[: self._vocab_size] != 0
        is_allowed[row.biases.token_ids[row.biases.values == _FORBID]] = False
        return not is_allowed.any()


class _TokenCounts:
    """Counts of the tokens of an answer. Adding a token takes O(1)."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._token_ids, self._counts = np.zeros((2, 64), np.int32)
        self._places: dict[int, int] = {}

    def add(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._counts):  # double the size of the arrays
                self._token_ids, self._counts = (
                    np.concatenate([array, np.zeros_like(array)]) for array in (self._token_ids, self._counts)
                )
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self.num_tokens += len(token_ids)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and their counts. The counts are copied, because a plan must not change later."""
        return self._token_ids[: len(self._places)], self._counts[: len(self._places)].copy()


# -- bad words ---------------------------------------------------------------------------------------------------------


MAX_KEPT_MASKS = 256  # most cached masks for each list of bad words


class TokenTable:
    """The bytes of all tokens, sorted, so that tokens with a common prefix are next to each other."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        order = sorted(range(len(token_bytes)), key=token_bytes.__getitem__)
        self._sorted = [token_bytes[token_id] for token_id in order]
        self._order = np.array(order, np.int64)
        lens = np.array([len(each) for each in token_bytes], np.int64)
        self.max_len = int(lens.max(initial=0))
        self._joined = b"".join(token_bytes)
        self._by_len = np.argsort(-lens, kind="stable")  # token ids, the longest first
        self._starts = (np.cumsum(lens) - lens)[self._by_len]
        self._num_longer = [int(np.count_nonzero(lens > position)) for position in range(self.max_len)]

    def beginning_with(self, prefix: bytes) -> tuple[int, int]:
        """Return the range of the sorted tokens that begin with `prefix`, a non-empty part of UTF-8 text."""
        start = bisect_left(self._sorted, prefix)
        end = bisect_left(self._sorted, prefix[:-1] + bytes([prefix[-1] + 1]), start)  # UTF-8 has no byte 255
        return start, end

    def within(self, ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the token ids of ranges [N, 2] of the sorted tokens."""
        lens = ranges[:, 1] - ranges[:, 0]
        first = np.cumsum(lens) - lens
        return self._order[np.repeat(ranges[:, 0] - first, lens) + np.arange(lens.sum())]

    def reaching(
        self, following: npt.NDArray[np.int32], is_end: npt.NDArray[np.bool_], symbols: bytes
    ) -> npt.NDArray[np.bool_]:
        """Return, for each token, True if its bytes lead from state 0 through a state of which `is_end` is True.

        following: the next state, int32 [states, symbols]. symbols: the symbol of each byte.
        """
        text = np.frombuffer(self._joined.translate(symbols), np.uint8)
        states = np.zeros(len(self._by_len), np.int32)
        found = np.zeros(len(self._by_len), np.bool_)
        for position, count in enumerate(self._num_longer):
            states[:count] = following[states[:count], text[self._starts[:count] + position]]
            found[:count] |= is_end[states[:count]]
        by_token = np.empty_like(found)
        by_token[self._by_len] = found
        return by_token


class BadWords:
    """The bad words of a request. Answers with the same strings share one object. Only the engine's thread uses it.

    Following a token takes time proportional to the token's bytes, regardless of the number of strings.
    """

    def __init__(
        self, words: Sequence[bytes], table: TokenTable, vocab_size: int, silent: Collection[int] = ()
    ) -> None:
        """words: the strings in UTF-8, none of them empty. vocab_size: of the model; `table` may have more or fewer
        tokens. silent: tokens that add nothing to the text, such as skipped special tokens. A silent token is forbidden
        only if its whole text is one of the strings.
        """
        self._table, self._silent = table, frozenset(silent)
        self._vocab_size = vocab_size
        used = sorted({*b"".join(words)})
        self._symbols = bytes(used.index(byte) + 1 if byte in used else 0 for byte in range(256))
        self._build(words, 1 + len(used))
        self._always = np.zeros(max(vocab_size, len(table.token_bytes)), np.bool_)
        self._always[: len(table.token_bytes)] = table.reaching(self._following, self._is_end, self._symbols)
        listed = [token_id for token_id in self._silent if token_id < len(table.token_bytes)]
        self._speaks = np.ones_like(self._always)
        self._speaks[listed] = False
        self._named = [token_id for token_id in listed if table.token_bytes[token_id] in words]
        self._masks: OrderedDict[int, TokenMask] = OrderedDict()  # by state, least recently used first
        self._first = self._find_mask(np.zeros(0, np.int64))

    def _build(self, words: Sequence[bytes], num_symbols: int) -> None:
        """Make the automaton, and the table of its transitions."""
        automaton = Automaton(word.translate(self._symbols) for word in words)
        whole = {path[-1] for path in automaton.paths}
        self._is_end = np.array(automaton.links(whole)) > 0
        self._is_end[list(whole)] = True
        self._following = np.zeros((len(automaton.states), num_symbols), np.int32)
        for state in automaton.states:
            row = self._following[state]
            row[:] = self._following[automaton.shorter[state]]
            for symbol, following in automaton.children[state].items():
                row[symbol] = following
        self._ends = self._find_ends(dict(zip(words, automaton.paths, strict=True)))
        self._links = automaton.links(self._ends)

    def _find_ends(self, paths: dict[bytes, list[int]]) -> dict[int, npt.NDArray[np.int64]]:
        """Return the tokens that begin with the rest of a word, int64 [ranges, 2], by the state of its first part."""
        of_rest = lru_cache(maxsize=None)(self._table.beginning_with)
        found: dict[int, set[tuple[int, int]]] = {}
        for word, path in paths.items():
            if self._is_end[path[1:-1]].any():
                continue  # the word contains another word, which is found first
            for i in range(max(1, len(word) - self._table.max_len), len(word)):
                start, end = of_rest(word[i:])
                if start < end:
                    found.setdefault(path[i], set()).add((start, end))
        return {state: np.array([*ranges], np.int64) for state, ranges in found.items()}

    def follow(self, state: int, token_id: int) -> int:
        """Return the state after one more token of the answer. An answer begins in state 0. Hot."""
        if token_id in self._silent or token_id >= len(self._table.token_bytes):
            return state
        for symbol in self._table.token_bytes[token_id].translate(self._symbols):
            state = int(self._following[state, symbol])
        return state

    def mask(self, state: int) -> TokenMask:
        """Return the mask of the tokens that complete no string in the state. Hot: once per row. Masks are cached."""
        if state not in self._masks:
            if len(self._masks) == MAX_KEPT_MASKS:
                self._masks.popitem(last=False)
            end, parts = state if state in self._ends else self._links[state], list[npt.NDArray[np.int64]]()
            while end:
                parts.append(self._ends[end])
                end = self._links[end]
            self._masks[state] = self._find_mask(self._table.within(np.concatenate(parts))) if parts else self._first
        self._masks.move_to_end(state)
        return self._masks[state]

    def _find_mask(self, ends: npt.NDArray[np.int64]) -> TokenMask:
        """Return the mask that forbids the tokens of `ends` and the tokens that are always forbidden."""
        is_forbidden = self._always.copy()
        is_forbidden[ends] = True
        is_forbidden &= self._speaks
        is_forbidden[self._named] = True
        return packed_mask(~is_forbidden[: self._vocab_size])

    @property
    def forbids_all(self) -> bool:
        """Return True if every token is forbidden as the first token of an answer."""
        return not self._first.any()
