"""Automaton: follows a text symbol by symbol, and knows which of many sequences its end could be the beginning of.

This is the automaton of Aho and Corasick. Each state is a number and stands for a beginning of one or more sequences:
the longest one that the text ends with. State 0 stands for the empty beginning. A step takes constant time on average
over a text, whatever the number of sequences and their lengths.
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


class Automaton(Generic[Symbol]):
    """Sequences are added first, then `link` is called once, then any number of texts may be followed."""

    def __init__(self) -> None:
        self._children: list[dict[Symbol, int]] = [{}]
        self._shorter: list[int] = []  # state -> that of the next shorter beginning with the same end
        self.depths = [0]  # state -> number of symbols

    def add(self, sequence: Iterable[Symbol]) -> int:
        """Add a sequence and all its beginnings. Returns its state."""
        state = 0
        for symbol in sequence:
            following = self._children[state].setdefault(symbol, len(self._children))
            if following == len(self._children):
                self._children.append({})
                self.depths.append(self.depths[state] + 1)
            state = following
        return state

    def link(self, marked: Container[int]) -> Sequence[int]:
        """Make the automaton ready. Returns, for each state, that of the longest shorter end which is in `marked`, or
        -1 if there is none. Followed from link to link they are all the marked ends of a state.
        """
        self._shorter = [0] * len(self._children)
        links = [-1] * len(self._children)
        level = [0]
        while level:
            for state in level:
                for symbol, following in self._children[state].items():
                    shorter = self.step(self._shorter[state], symbol) if state else 0
                    self._shorter[following] = shorter
                    links[following] = shorter if shorter in marked else links[shorter]
            level = [following for state in level for following in self._children[state].values()]
        return links

    def step(self, state: int, symbol: Symbol) -> int:
        """The state after one more symbol."""
        while state and symbol not in self._children[state]:
            state = self._shorter[state]
        return self._children[state].get(symbol, 0)
