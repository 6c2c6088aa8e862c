"""Automaton of Aho and Corasick: follows a text symbol by symbol, and finds the sequences that its end could begin.

A state is a number and stands for the longest beginning of a sequence that the text ends with; 0 is the empty one. A
step takes constant time on average over a text, regardless of the number and lengths of the sequences.
"""

from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


class Automaton(Generic[Symbol]):
    """sequences: none of them empty."""

    def __init__(self, sequences: Iterable[Iterable[Symbol]]) -> None:
        self.children: list[dict[Symbol, int]] = [{}]
        self.depths = [0]  # state -> number of symbols
        self.paths = [self._add(sequence) for sequence in sequences]  # states of the beginnings, the empty one first
        self.shorter = [0] * len(self.children)  # state -> the next shorter beginning with the same end
        self.states = [0]  # by depth
        for state in self.states:
            for symbol, following in self.children[state].items():
                self.shorter[following] = self.step(self.shorter[state], symbol) if state else 0
                self.states.append(following)

    def _add(self, sequence: Iterable[Symbol]) -> list[int]:
        path = [0]
        for symbol in sequence:
            state = self.children[path[-1]].setdefault(symbol, len(self.children))
            if state == len(self.children):
                self.children.append({})
                self.depths.append(len(path))
            path.append(state)
        return path

    def links(self, marked: Container[int]) -> list[int]:
        """Return a link for each state, to its longest proper end in `marked`, or 0 if there is none.

        Following the links from a state visits all its marked ends.
        """
        links = [0] * len(self.states)
        for state in self.states[1:]:
            shorter = self.shorter[state]
            links[state] = shorter if shorter in marked else links[shorter]
        return links

    def step(self, state: int, symbol: Symbol) -> int:
        """Return the state after one more symbol."""
        while state and symbol not in self.children[state]:
            state = self.shorter[state]
        return self.children[state].get(symbol, 0)
