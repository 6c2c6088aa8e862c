"""The times that an output reports."""

import pytest

from nanovllm.core.outputs import request_output
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def test_times_of_an_answer() -> None:
    """Between N tokens there are N - 1 times per token."""
    seq = Sequence(0, [1, 2], SamplingParams(max_tokens=8), seed=0)
    seq.arrival_s, seq.finish_reason = 10.0, "length"
    for num_tokens, (ttft_s, tpot_s) in enumerate([(None, None), (0.5, None), (0.5, 0.25), (0.5, 0.25)]):
        if num_tokens:
            seq.num_pending_tokens = 1
            seq.append_pending(7, position=1 + num_tokens)
            seq.first_token_s, seq.last_token_s = 10.5, 10.25 + 0.25 * num_tokens
        output = request_output(seq, None)
        assert (output["ttft_s"], output["tpot_s"]) == (pytest.approx(ttft_s), pytest.approx(tpot_s)), num_tokens
