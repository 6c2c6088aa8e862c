"""PromptLookup: guesses the next tokens of a request by looking up how the text went on when it was last like this.

The text is prompt and answer. Its longest suffix that occurred earlier is found in two parts. A SuffixArray finds what
lies in the prompt. A SuffixAutomaton finds what ends in the answer; its text starts with the last tokens of the prompt,
so that a match may begin there. Hence both together find every match of up to MAX_MATCH_TOKENS.

Indexing a long prompt takes a while, so it is done in a background thread, one prompt after another. Until the index is
there, only the automaton is searched.
"""

import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from queue import SimpleQueue
from threading import Thread

from nanovllm.core.sequence import TokenIds
from nanovllm.speculation.suffix_array import MAX_MATCH_TOKENS, SuffixArray
from nanovllm.speculation.suffix_automaton import SuffixAutomaton

MIN_MATCH_TOKENS = 2  # a single token says too little about the next one


class PromptLookup:
    """The guesses for one request. A guess is what followed the longest match, so no model is run for it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """Copies the prompt and returns at once. Fastest if it is an array."""
        self._prompt: TokenIds = array("q", prompt)
        self._recent_start = max(len(prompt) - MAX_MATCH_TOKENS, 0)
        self._recent = SuffixAutomaton(self._prompt[self._recent_start :])
        # The automaton has all of a short prompt.
        self._build = IndexBuild(self._prompt) if self._recent_start > 0 else None
        self._match: tuple[int, int] | None = None  # tokens and end of the longest match; None if not looked up yet

    def append(self, token_id: int) -> None:
        """Append a token of the answer. Hot: once per token."""
        self._recent.append(token_id)
        self._match = None

    @property
    def match_len(self) -> int:
        """Tokens of the longest match, up to MAX_MATCH_TOKENS; 0 if it has fewer than MIN_MATCH_TOKENS."""
        return self._longest_match()[0]

    def propose(self, max_tokens: int) -> list[int]:
        """What followed the longest match, [] if there is none. Where the text ends earlier, so does the proposal,
        unless the text ends with a pattern that repeats: then the proposal goes on repeating it.

        Raises RuntimeError if the prompt could not be indexed. Hot: once per token.
        """
        match_len, end = self._longest_match()
        if match_len == 0:
            return []
        start, stop = self._recent_start, end + max_tokens
        proposal = self._prompt[end : min(stop, start)].tolist()
        proposal += self._recent.token_ids[max(end - start, 0) : max(stop - start, 0)]
        period = start + len(self._recent) - end
        if match_len >= period:  # the text ends with the same `period` tokens twice
            proposal = (proposal * -(-max_tokens // period))[:max_tokens]
        return proposal

    def close(self) -> None:
        """Forget the prompt. If its index is not being built yet, it never will be. From now on only matches that end
        in the answer, or in the prompt's last tokens, are found.
        """
        self._prompt = array("q")
        self._build = self._match = None

    def _longest_match(self) -> tuple[int, int]:
        if self._match is None:
            self._match = self._look_up()
        return self._match

    def _look_up(self) -> tuple[int, int]:
        """Match and the position that follows it in the text. Of two equally long ones, take the more recent."""
        index = self._build.result() if self._build is not None else None
        match_len, end = self._recent.longest_match()
        match_len, end = min(match_len, MAX_MATCH_TOKENS), self._recent_start + end
        if index is not None and match_len < MAX_MATCH_TOKENS:
            len_in_prompt, end_in_prompt = index.longest_match(self._recent.token_ids)
            if len_in_prompt > match_len:
                match_len, end = len_in_prompt, end_in_prompt
        return (match_len, end) if match_len >= MIN_MATCH_TOKENS else (0, 0)


class IndexBuild:
    """The index of one prompt, now or later. A build that nobody refers to any more when its turn comes is skipped."""

    def __init__(self, prompt: TokenIds) -> None:
        self._prompt = prompt
        self._index: SuffixArray | None = None
        self._error: Exception | None = None
        _builder_queue().put(weakref.ref(self))

    def result(self) -> SuffixArray | None:
        """The index, or None if it is not ready."""
        if self._error is not None:
            raise RuntimeError(f"a prompt of {len(self._prompt)} tokens could not be indexed") from self._error
        return self._index

    def run(self) -> None:
        try:
            self._index = SuffixArray(self._prompt)
        except Exception as error:
            self._error = error


@cache
def _builder_queue() -> "SimpleQueue[weakref.ref[IndexBuild]]":
    """The queue of the process's one builder thread, which the first call starts.

    It is a daemon, so a process ends without waiting for it. A ThreadPoolExecutor would first work off its queue.
    """
    queue: SimpleQueue[weakref.ref[IndexBuild]] = SimpleQueue()
    Thread(target=_run_builds, args=(queue,), name="prompt-index", daemon=True).start()
    return queue


def _run_builds(queue: "SimpleQueue[weakref.ref[IndexBuild]]") -> None:
    while True:
        if (build := queue.get()()) is not None:
            build.run()
        del build  # the next one may be long in coming
