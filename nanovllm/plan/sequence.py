"""Request: a prompt and the parameters of its answers. Sequence: one answer to a prompt, from arrival to end."""

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from nanovllm.outputs import ErrorCause
from nanovllm.plan.logit_edits import NO_EDITS, NO_RULES, AnswerRules, Editor, TokenConstraint
from nanovllm.plan.step_plan import SamplingRow
from nanovllm.sampling_params import SamplingParams

TokenIds: TypeAlias = "array[int]"  # int64, so that hashes and model inputs can use the bytes of a slice directly


@dataclass(frozen=True)
class Request:
    """A request that has been checked. TextFrontend.make_request makes a Request from the user's arguments.

    After that, the token ids are neither checked again nor changed. A Sequence copies the token ids before it appends
    to them.
    """

    token_ids: TokenIds  # the prompt, at least one token
    params: SamplingParams  # for `n` answers
    rules: AnswerRules = NO_RULES
    cache_salt: str | None = None  # only requests with equal salts share KV
    text: str | None = None  # of the prompt, for the output


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and its answer so far. A Sequence holds all state of the answer, as integers.

    Until the first token of the answer arrives, `token_ids` is the array of the Request. So all answers to one prompt
    share one array while they wait, and the copy, made after prefill, takes little time compared with prefill.

    num_computed_tokens never exceeds num_tokens. `num_pending_tokens` counts tokens that planned steps are still
    sampling. A pending token has a position but no id yet, so num_tokens includes the token and token_ids does not.

    `seq_id` is the same number as the `request_id` that users of the engine see.
    """

    def __init__(
        self, seq_id: int, token_ids: Iterable[int], params: SamplingParams, seed: int, hash_salt: int = 0
    ) -> None:
        self.seq_id = seq_id
        self.token_ids: TokenIds = token_ids if isinstance(token_ids, array) else array("q", token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        assert params.max_tokens is not None, f"sequence {seq_id} has no limit; the engine resolves max_tokens=None"
        self.max_tokens = params.max_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.sampling = SamplingRow.make(params, seed)
        self.editor: Editor = NO_EDITS
        self.num_scored_tokens = 1  # prompt tokens scored by planned steps, and the first token, which has no score
        self.status = SequenceStatus.WAITING
        self.prompt: str | None = None  # its text, for the output
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: int | str | None = None  # the stop token or the stop string of the request at the end
        self.error: str | None = None  # what happened, if finish_reason is "error"
        self.error_cause: ErrorCause = "engine"
        self.has_end_token = False  # True if the last token ended the answer and is not part of the text

        self.num_pending_tokens = 0
        self.pending_row = -1  # row of the newest pending token among the sampled tokens of its step
        self.num_pending_guesses = 0  # draft tokens that a planned step verifies, and may reject
        self.num_computed_tokens = 0  # tokens whose K/V are in the cache once all planned steps have run
        self.num_hit_tokens: int | None = None  # prompt tokens found in the prefix cache, or None before admission

        self.num_queued_tokens = self.num_prompt_tokens  # uncomputed tokens when the sequence last began to wait

        # Owned by the KV cache manager.
        self.block_table: list[int] = []
        self.hash_salt = hash_salt  # sequences with different salts never share blocks
        self.grain_hashes: list[int] = []
        self.num_registered_tokens = 0
        self.disk_keys: list[bytes] = []  # keys of prefixes of 0, 1, 2, ... extents (capabilities/disk/disk_moves.py)
        self.num_submitted_tokens = 0  # tokens that were submitted to be written to disk
        self.num_disk_tokens = 0  # tokens whose K and V were in memory or on disk, without gaps, before the disk load

        self.arrival_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def is_preempted(self) -> bool:
        """Return True if the sequence was preempted and waits to run again."""
        return self.status is SequenceStatus.WAITING and self.num_hit_tokens is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def constraint(self) -> TokenConstraint | None:
        """The constraint that the answer must match."""
        return self.editor.constraint

    @property
    def waits_for_token(self) -> bool:
        """Return True if the next token can be planned only after the pending token has arrived."""
        return self.num_pending_tokens > 0 and self.editor.needs_all_tokens

    @property
    def waits_for_mask(self) -> bool:
        """Return True if the sequence's constraint is still computing the mask of the tokens that may follow."""
        return self.constraint is not None and not self.constraint.is_ready

    @property
    def can_use_prefix_cache(self) -> bool:
        """Return True if cached prompt tokens may be skipped.

        Prompt log-probabilities need the logits of every prompt token, so a prompt with prompt_logprobs skips none.
        """
        return self.params.prompt_logprobs is None

    @property
    def max_kv_tokens(self) -> int:
        """Return the most tokens whose K/V this request can need. The last sampled token needs no K/V: it is never a
        model input.
        """
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def append_pending(self, token_id: int, position: int) -> None:
        """Append the id of the oldest pending token, which has arrived from the GPU."""
        assert self.num_pending_tokens > 0, f"sequence {self.seq_id} has no pending token"
        assert position == len(self.token_ids), f"sequence {self.seq_id} got token {position} out of order"
        if position == self.num_prompt_tokens:
            self.token_ids = self.token_ids[:]  # do not append to the request's array
        self.token_ids.append(token_id)
        self.num_pending_tokens -= 1
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
