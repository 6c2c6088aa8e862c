"""SuffixAutomaton: a growing text that always knows its longest suffix that occurred earlier in it.

Each state stands for the substrings that end at the same positions. These are suffixes of each other, so a state needs
only the length of its longest substring. The state's link leads to the longest suffix of these that also ends somewhere
else. The state of the whole text ends only at the end of the text. Hence its link is the answer.

This is the online construction of Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
There are at most two states a token.
"""

from collections.abc import Iterable

_NO_STATE = -1  # the link of state 0, which stands for the empty text


class SuffixAutomaton:
    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # state -> token id -> the state of the text with that token appended
        self._link = [_NO_STATE]
        self._length = [0]
        self._first_end = [0]  # state -> the position after the first occurrence
        self._whole_text = 0  # a state
        for token_id in token_ids:
            self.append(token_id)

    def __len__(self) -> int:
        return len(self.token_ids)

    def longest_match(self) -> tuple[int, int]:
        """The number of tokens of the longest suffix that occurred earlier, and the position that follows its first
        occurrence. That occurrence may overlap the suffix. (0, 0) if there is none.
        """
        state = self._link[self._whole_text]
        return (self._length[state], self._first_end[state]) if state > 0 else (0, 0)

    def append(self, token_id: int) -> None:
        """Amortised O(1). Hot: once per token."""
        self.token_ids.append(token_id)
        transitions, link = self._next, self._link
        state, num_tokens = self._whole_text, len(self.token_ids)
        new = self._whole_text = self._add_state({}, 0, num_tokens, num_tokens)
        while state != _NO_STATE and token_id not in transitions[state]:
            transitions[state][token_id] = new
            state = link[state]
        if state != _NO_STATE:
            link[new] = self._split(state, token_id)

    def _split(self, state: int, token_id: int) -> int:
        """The state that has the longest substring of `state`, followed by the token, as its longest.

        The token may lead to a state that also has longer substrings. These end at fewer positions from now on, so
        that state keeps them, and the shorter ones move to a new state.
        """
        transitions, link = self._next, self._link
        target, num_tokens = transitions[state][token_id], self._length[state] + 1
        if self._length[target] == num_tokens:
            return target
        clone = self._add_state(transitions[target].copy(), link[target], num_tokens, self._first_end[target])
        link[target] = clone
        while state != _NO_STATE and transitions[state].get(token_id) == target:
            transitions[state][token_id] = clone
            state = link[state]
        return clone

    def _add_state(self, transitions: dict[int, int], link: int, length: int, first_end: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._first_end.append(first_end)
        return len(self._link) - 1
