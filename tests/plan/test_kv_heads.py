"""The KV heads of ranks."""

from dataclasses import replace
from typing import Any

import pytest

from nanovllm.capacity.machine import Machine
from nanovllm.capacity.make_plan import make_plan
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import kv_heads_of_rank


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_query_heads_are_on_the_rank_of_their_kv_head(num_kv_heads: int, num_ranks: int) -> None:
    num_heads = 16
    for head in range(num_heads):
        rank = head // (num_heads // num_ranks)
        assert head // (num_heads // num_kv_heads) in kv_heads_of_rank(num_kv_heads, num_ranks, rank)
    assert len(kv_heads_of_rank(num_kv_heads, num_ranks)) == max(1, num_kv_heads // num_ranks)


def test_heads_that_ranks_cannot_share_are_refused_with_both_numbers() -> None:
    """Gemma 4 31B has 32 query heads, 16 KV heads in layers with a window, and 4 in the others."""
    machine, model = Machine(name="a GPU", host_bytes=10**12, gpu_bytes=10**12), config_without_weights("gemma-4-31b")
    spec: Any = make_plan(Config(model="gemma-4-31b", tensor_parallel_size=8), model, machine).spec
    assert (spec.num_kv_heads, spec.states.num_kv_heads) == (1, 2)
    with pytest.raises(ConfigError, match="num_attention_heads=32 is not divisible by tensor_parallel_size=3"):
        make_plan(Config(model="gemma-4-31b", tensor_parallel_size=3), model, machine)
    for changed in ({"num_kv_heads": 6}, {"window": replace(model.window, num_kv_heads=6)}):
        with pytest.raises(ConfigError, match="num_key_value_heads=6 cannot be shared by tensor_parallel_size=4 ranks"):
            make_plan(Config(model="gemma-4-31b", tensor_parallel_size=4), replace(model, **changed), machine)
