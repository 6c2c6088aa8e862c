"""The steps that need the most memory of all that the options allow. Start-up runs them once to measure that memory.

Together with `short_steps` they launch every kernel that prompts, chunks and sampling need, so that start-up can
compile them all and no request has to wait.
"""

from collections.abc import Sequence

import numpy as np

from nanovllm.core.logit_edits import Biases, LogitEdits, Penalties, RowEdits
from nanovllm.core.step_plan import KVMoves, PromptScores, SamplingRow, SequenceStep, StepPlan, StreamedGroup
from nanovllm.core.support import MAX_DECODE_QUERIES
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.utils.arithmetic import ceil_div

# More history or more groups would not need more memory. From the fourth part on there is a running result in fp32
# (attention/merge.py), and further parts reuse its temporaries. Scattered keys are attended to 16 MiB at a time. The
# history is not a multiple of 4096 tokens: the cudnn backend leaves a part of it to the paged backend.
HISTORY_TOKENS = 51199  # tokens before the chunk of a sequence
NUM_GROUPS = 4  # streamed groups that the chunk attends to
SCORED_TOKENS = 512  # enough for the chunks of logits that are scored at once
_SAMPLING = SamplingRow(temperature=1.0, top_k=20, top_p=0.95, min_p=0.05, seed=0, position=1)
_TOKENS = np.zeros(1, np.int32)
_EDITS = LogitEdits(Penalties(1.1, 0.1, 0.1, None, _TOKENS, _TOKENS), 0, (RowEdits(Biases.of([0], 1.0)),))


def largest_steps(
    *, num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, group_blocks: int
) -> list[StepPlan]:
    """Steps of `num_tokens` new tokens: one in as few sequences as can hold them, and one in `max_num_seqs` sequences,
    most of which have a single new token. A third one is a chunk of which some tokens are scored. All of them edit the
    logits that they sample from, and report as many log-probabilities as a request can ask for.

    Every entry of every block table is block 0, so that a cache of one block is enough. The tokens overwrite each
    other's K and V, whose values do not matter. A sequence has HISTORY_TOKENS before its chunk if max_model_len allows.
    With `group_blocks` > 0, all sequences also attend to NUM_GROUPS streamed groups of that many CPU blocks, again all
    block 0.
    """
    fewest = min(max_num_seqs, ceil_div(num_tokens, max_model_len))
    most = min(max_num_seqs, num_tokens)
    batches = [
        _sequences(_lengths(num_tokens, num_seqs, max_model_len), max_model_len, block_size)
        for num_seqs in sorted({fewest, most})
    ]
    (chunk,) = _sequences((min(num_tokens, max_model_len),), max_model_len, block_size)
    scores = PromptScores(0, np.zeros(min(SCORED_TOKENS, chunk.num_tokens), np.int64), MAX_LOGPROBS)
    steps = []
    for sequences in (*batches, (chunk._replace(scores=scores),)):
        group = StreamedGroup((0,) * group_blocks, (tuple(range(group_blocks)),) * len(sequences))
        steps.append(StepPlan(sequences, KVMoves(streamed=(group,) * NUM_GROUPS if group_blocks else ())))
    return steps


def short_steps(*, max_num_seqs: int, max_model_len: int, block_size: int, group_blocks: int) -> list[StepPlan]:
    """Steps that need little memory and launch the kernels that largest_steps leaves out: for short prompts mixed with
    running sequences, and for a few tokens of a sequence, where each power of two may have a kernel of its own. Without
    history, a few tokens have another one than with it.

    With `group_blocks` > 0 the few tokens also attend to a streamed group.
    """
    mixed = (1, min(300, max_model_len))[-max_num_seqs:]
    few = [n for n in (2, 4, 8, MAX_DECODE_QUERIES) if n <= max_model_len]
    steps = [StepPlan(_sequences(mixed, max_model_len, block_size), KVMoves())]
    group = StreamedGroup((0,) * group_blocks, (tuple(range(group_blocks)),))
    moves = KVMoves(streamed=(group,) if group_blocks else ())
    steps += [StepPlan(_sequences((n,), max_model_len, block_size), moves) for n in few]
    return steps + [StepPlan(_sequences((n,), n + 1, block_size), KVMoves()) for n in few]


def _sequences(lengths: Sequence[int], max_model_len: int, block_size: int) -> tuple[SequenceStep, ...]:
    return tuple(_sequence(i, length, max_model_len, block_size) for i, length in enumerate(lengths))


def _lengths(num_tokens: int, num_seqs: int, max_length: int) -> list[int]:
    """New tokens of each sequence: single tokens first, as the scheduler orders them, then the longest chunks."""
    lengths = [1] * num_seqs
    for i in reversed(range(num_seqs)):
        lengths[i] += min(max_length - 1, num_tokens - sum(lengths))
    return lengths


def _sequence(seq_id: int, length: int, max_model_len: int, block_size: int) -> SequenceStep:
    start = min(max(0, max_model_len - length - 1), HISTORY_TOKENS)
    return SequenceStep(
        seq_id=seq_id,
        token_ids=np.zeros(length, dtype=np.int64),
        position=start,
        num_prompt_tokens=start + length,
        block_table=(0,) * ceil_div(start + length, block_size),
        num_paged_keys=start + length,
        sampling=_SAMPLING,
        edits=_EDITS,
        num_logprobs=MAX_LOGPROBS,
    )
