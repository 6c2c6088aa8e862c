"""Outputs of ended requests."""

import pytest

from nanovllm.plan.outputs import request_output
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def test_times_of_an_output_are_from_arrival_to_the_first_token_and_between_tokens() -> None:
    for num_tokens, tpot_s in ((1, None), (2, 6.0), (5, 1.5)):
        seq = Sequence(0, [1, 2, 3], SamplingParams(), seed=0)
        seq.token_ids.extend([7] * num_tokens)
        seq.arrival_s, seq.first_token_s, seq.last_token_s, seq.finish_reason = 10.0, 12.5, 18.5, "length"
        output = request_output(seq, None)
        assert (output["ttft_s"], output["tpot_s"]) == (2.5, pytest.approx(tpot_s))
