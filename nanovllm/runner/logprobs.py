"""Computes log-probabilities from logits, in chunks whose memory does not grow with the number of tokens."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.core.logprobs import PositionLogprobs
from nanovllm.core.step_plan import StepPlan
from nanovllm.runner.inputs import copy_to_device

_CHUNK_BYTES = 32 << 20  # fp32 logits that are read at once


class LogprobTensors(NamedTuple):
    """PositionLogprobs as tensors, on the device or in pinned memory."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def numpy(self) -> PositionLogprobs:
        return PositionLogprobs(*(tensor.numpy() for tensor in self))


def sampled_logprobs(plan: StepPlan, logits: torch.Tensor, tokens: torch.Tensor) -> LogprobTensors | None:
    """Those of the sampled tokens, int64 [S], by the logits [S, vocab_size]; None if no sequence asks for them."""
    asking = [step.num_logprobs for step in plan.sequences if step.sampling is not None]
    if all(num_logprobs is None for num_logprobs in asking):
        return None
    num_rows = [step.num_sampled for step in plan.sequences if step.sampling is not None]
    rows = np.flatnonzero(np.repeat([num_logprobs is not None for num_logprobs in asking], num_rows))
    num_top = max(num_logprobs or 0 for num_logprobs in asking)
    (on_device,) = copy_to_device([rows], logits.device)
    chunks = (_compute(logits[chunk], tokens[chunk], num_top) for chunk in on_device.split(_num_rows(logits.shape[1])))
    return _joined(chunks)


def prompt_logprobs(
    plan: StepPlan, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> LogprobTensors | None:
    """Those of the prompt tokens that the step scores, by its hidden states [T, hidden_size]; None if there are none.

    Every rank must call it, because computing logits is a collective.
    """
    scores = [(step, step.scores) for step in plan.sequences if step.scores is not None]
    if not scores:
        return None
    first_tokens = np.cumsum([0, *(step.num_tokens for step in plan.sequences)])
    starts = [first for first, step in zip(first_tokens, plan.sequences, strict=False) if step.scores is not None]
    rows = [
        first + score.start + np.arange(len(score.target_ids)) for first, (_, score) in zip(starts, scores, strict=True)
    ]
    targets = np.concatenate([score.target_ids for _, score in scores])
    num_top = max(score.num_logprobs for _, score in scores)
    row_ids, target_ids = copy_to_device([np.concatenate(rows), targets], hidden.device)
    size = _num_rows(vocab_size)
    chunks = zip(row_ids.split(size), target_ids.split(size), strict=True)
    return _joined(_compute(compute_logits(hidden[chunk]), ids, num_top) for chunk, ids in chunks)


def _num_rows(vocab_size: int) -> int:
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


def _compute(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """logits [N, vocab_size] of any float type, token_ids int64 [N]. Waits for nothing."""
    values = logits.float()
    log_total = values.logsumexp(dim=-1, keepdim=True)
    # An invalid token's request is about to end. While kernels are only compiled, tokens can be anything.
    own = values.gather(1, token_ids.clamp(0, values.shape[1] - 1)[:, None])
    ranks = (values > own).sum(dim=-1) + 1
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    return LogprobTensors(token_ids, (own - log_total)[:, 0], ranks, top.indices, top.values - log_total)


def _joined(chunks: Iterator[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
