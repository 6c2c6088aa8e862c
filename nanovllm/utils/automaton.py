"""Automaton of Aho and Corasick: follows a text symbol by symbol, and finds the sequences that its end could begin.

A state is a number and stands for the longest beginning of a sequence that the text ends with; 0 is the empty one. A
step takes constant time on average over a text, regardless of the number and lengths of the sequences.
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
        """Make the automaton ready. Returns a link for each state, to its longest proper end in `marked`, or -1.

        Following the links from a state visits all its marked ends.
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
        """Return the state after one more symbol."""
        while state and symbol not in self._children[state]:
            state = self._shorter[state]
        return self._children[state].get(symbol, 0)
