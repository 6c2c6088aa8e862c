"""The measurement behind the split, with an engine on the CPU in place of the GPU."""

from pathlib import Path

import pytest
from checked_engine import OFFLOAD
from cpu_splits import splitting
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.runner.cpu_rates import NUM_QUERIES, split_of_slowest_rank

LINK_BYTE_PER_S = 5e9


@pytest.mark.parametrize("is_forced", [False, True])
def test_measured_split_is_one_that_an_engine_can_use(tmp_path: Path, is_forced: bool) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=2048)
    options = OFFLOAD | {"cpu_attention": "on", "num_gpu_blocks": 2, "device": "cpu"}
    with LLM(str(tmp_path), internals=splitting(300), **options) as llm:
        runner = llm.runner
        assert runner.offload is not None and runner.memory.cpu is not None
        runner.offload.link_byte_per_s = LINK_BYTE_PER_S
        split = split_of_slowest_rank(runner.offload, runner.memory.cpu, runner.launch, runner.tp, is_forced=is_forced)
        assert split.link_byte_per_s and split.link_byte_per_s > 0 and split.idle_s > 0
        assert [rate.num_queries for rate in split.cpu_rates] == list(NUM_QUERIES)
        assert all(rate.byte_per_s > 0 for rate in split.cpu_rates)
        assert split.token_bytes == 2 * 2 * 16 * 4 and split.is_forced == is_forced
        prompt = list(range(3, 300)) * 4
        output = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        assert len(output["token_ids"]) == 4  # what was measured has left nothing behind
