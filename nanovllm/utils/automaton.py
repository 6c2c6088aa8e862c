"""Aho-Corasick automaton: reads a text symbol by symbol, and finds which sequences the end of the text could begin.

A state is a number and stands for the longest prefix of a sequence that is a suffix of the text. State 0 is the empty
prefix. A step takes constant time on average over a text, regardless of the number and lengths of the sequences.
"""

from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


class Automaton(Generic[Symbol]):
    """The automaton of some sequences, none of which may be empty."""

    def __init__(self, sequences: Iterable[Iterable[Symbol]]) -> None:
        self.children: list[dict[Symbol, int]] = [{}]
        self.depths = [0]  # state -> number of symbols
        self.paths = [self._add(sequence) for sequence in sequences]  # states of the prefixes, from the empty prefix on
        self.shorter = [0] * len(self.children)  # state -> the longest proper suffix that is a state (failure link)
        self.states = [0]  # by increasing depth
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
        """Return a link for each state to its longest proper suffix in `marked`, or 0 if no proper suffix is marked.

        Following the links from a state visits all its marked suffixes.
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
