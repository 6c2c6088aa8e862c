"""The steps and launches with which start-up measures memory and compiles kernels. The largest steps take the most
memory that requests can need. Together with `short_steps` they launch every kernel that prompts, chunks and sampling
need, so that start-up can compile them all and no request has to wait.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.device.devices import (
    current_device,
)
from nanovllm.layers.moe import Router
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.logit_edits import Biases, LogitEdits, Penalties, RowEdits
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES
from nanovllm.plan.step_plan import KVMoves, PromptScores, SamplingRow, SequenceStep, StepPlan, StreamedGroup
from nanovllm.runner.inputs import sampling_arrays, to_device
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.utils.arithmetic import ceil_div

# More history or more groups would not need more memory. From the fourth part on there is a running result in fp32
# (attention/base.py), and later parts reuse its temporaries. Scattered keys are gathered 16 MiB at a time. The history
# is not a multiple of 4096 tokens, so that the cudnn backend leaves a part of it to the paged backend.
HISTORY_TOKENS = 51199  # tokens before the chunk of a sequence
NUM_GROUPS = 4  # streamed groups that the chunk attends to
SCORED_TOKENS = 512  # enough for the chunks of logits that are scored at once
_SAMPLING = SamplingRow(temperature=1.0, top_k=20, top_p=0.95, min_p=0.05)
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
    running sequences, and for a few tokens of a sequence, where each power of two may have a separate kernel. Draft
    heads, which are in no graph, also run for a single token. A few tokens use different kernels with and without
    history.

    With `group_blocks` > 0 the few tokens also attend to a streamed group.
    """
    mixed = (1, min(300, max_model_len))[-max_num_seqs:]
    few = [n for n in (1, 2, 4, 8, MAX_DECODE_QUERIES) if n <= max_model_len]
    steps = [StepPlan(_sequences(mixed, max_model_len, block_size), KVMoves())]
    group = StreamedGroup((0,) * group_blocks, (tuple(range(group_blocks)),))
    moves = KVMoves(streamed=(group,) if group_blocks else ())
    steps += [StepPlan(_sequences((n,), max_model_len, block_size), moves) for n in few]
    return steps + [StepPlan(_sequences((n,), n + 1, block_size), KVMoves()) for n in few]


def chunk_steps(max_num_tokens: int, max_model_len: int, block_size: int) -> list[StepPlan]:
    """Return a step of chunks, as few as possible, for each power of two of tokens from 32 on."""
    steps = []
    for num_tokens in (1 << i for i in range(5, max_num_tokens.bit_length())):
        lengths = _lengths(num_tokens, ceil_div(num_tokens, max_model_len), max_model_len)
        steps.append(StepPlan(_sequences(lengths, max_model_len, block_size), KVMoves()))
    return steps


def prompt_step(num_tokens: int, block_size: int) -> StepPlan:
    """Return a step that computes a whole prompt."""
    return StepPlan(_sequences((num_tokens,), num_tokens + 1, block_size), KVMoves())


def _sequences(lengths: Sequence[int], max_model_len: int, block_size: int) -> tuple[SequenceStep, ...]:
    return tuple(_sequence(i, length, max_model_len, block_size) for i, length in enumerate(lengths))


def _lengths(num_tokens: int, num_seqs: int, max_length: int) -> list[int]:
    """New tokens of each sequence: single tokens first, in the scheduler's order, then the longest chunks."""
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


def launch_sampler(model: CausalLM) -> None:
    """Sample from a row of logits of the model's dtype, and from a row of edited logits, which are fp32. The values are
    arbitrary.
    """
    head = model.lm_head
    params = to_device(sampling_arrays([SamplingRow()], np.ones(1, np.int64), np.ones(1, np.int64)), head.weight.device)
    sample(head.weight.new_zeros(1, head.padded_vocab_size)[:, : head.vocab_size], params)
    sample(head.weight.new_zeros(1, head.vocab_size, dtype=torch.float32), params)


@contextmanager
def warm_up_products(model: CausalLM, num_tokens: int) -> Iterator[None]:
    """In another thread, multiply up to `num_tokens` rows by a weight of each shape, until the block ends.

    cuBLAS chooses a kernel by the number of rows, and loads the kernel at its first use, which takes 15 to 140 ms.
    """
    head = model.lm_head.weight
    layers = (model.model.layers, model.mtp)
    modules = [module for part in layers if part is not None for module in part.modules()]
    given = [getattr(module, "weight", None) for module in modules if not isinstance(module, Router)]
    of_shape = {tuple(weight.shape): weight for weight in given if weight is not None and len(weight.shape) == 2}
    # Routers have sums in fp32. All routers have the same shape
    routers = [module for module in modules if isinstance(module, Router)][:1]
    multiplied = [*of_shape.values(), *routers]
    has_ended = threading.Event()

    @torch.inference_mode()
    def multiply() -> None:
        with current_device(head.device), suppress(torch.OutOfMemoryError):
            for num_rows, each in itertools.product(product_rows(num_tokens), multiplied):
                if has_ended.is_set():
                    return
                if isinstance(each, Router):
                    each.product_of_many(head.new_zeros(num_rows, each.weight.shape[1]))
                elif isinstance(each, PackedWeight):
                    if num_rows > each.max_packed_rows:  # fewer rows never reach cuBLAS
                        each.warm_up(head.new_zeros(num_rows, each.shape[1]))
                else:
                    F.linear(each.new_zeros(num_rows, each.shape[1]), each)

    thread = threading.Thread(target=multiply, name="warm-up")
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def product_rows(num_tokens: int) -> list[int]:
    """From `num_tokens` down to a few, four for each power of two."""
    rows = {num_tokens * part // (8 << halvings) for halvings in range(num_tokens.bit_length()) for part in range(5, 9)}
    return sorted((n for n in rows if n > 1), reverse=True)
