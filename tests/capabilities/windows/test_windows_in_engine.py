"""A model with windows through the whole engine: the logits of transformers, whatever happens to rings.

tests/capabilities/recurrent and tests/capabilities/disk run their slow tests of states with this model, too.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from checked_engine import ALL_GPU, WORKS_AHEAD, CheckedLLM, Reference, cache_options, speculating
from cpu_splits import splitting
from odd_drafters import drafter_of
from offload_workload import BLOCK, prompts_of, serve_everything
from simulated_streams import SimulatedStreams
from tiny_models import write_tiny_model

from nanovllm.plan.kv_spec import StagingSizes

PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3)
MODES = (("off", 2), ("shadow", 2), ("resident", 3), ("prompt_lookup", 3))


def test_everything_at_once_with_two_slots(windowed: Reference) -> None:
    """Hits, preemption, an abort; chunks below and above the length of a ring."""
    with CheckedLLM(windowed, streams=SimulatedStreams("random", 0), **cache_options(3)) as llm:
        serve_everything(llm)
        assert llm.stats()["num_state_loads"] > 0
        llm.assert_nothing_left()


def test_draft_tokens_across_the_edges_of_windows_and_pages(windowed: Reference) -> None:
    with CheckedLLM(windowed, **ALL_GPU) as llm:
        answers = [output["token_ids"] for output in llm.answer_and_check(PROMPTS, max_tokens=40)]
    drafter = drafter_of("wrong at the last", PROMPTS, answers)
    internals = replace(speculating(drafter, WORKS_AHEAD), staging=StagingSizes(window_page_tokens=16))
    options = ALL_GPU | {"speculation": "auto", "num_speculative_tokens": 7, "max_num_batched_tokens": 90}
    with CheckedLLM(windowed, internals=internals, **options) as llm:
        outputs = llm.answer_and_check(PROMPTS, max_tokens=40)
        assert [output["token_ids"] for output in outputs] == answers
        assert llm.stats()["num_guesses"] > llm.stats()["num_accepted_guesses"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma4", "gemma4_moe"])
def test_models_with_windows_in_all_modes(tmp_path: Path, architecture: str) -> None:
    """Sinks, experts and heads of several sizes: on the GPU alone, with two slots, and with every kind of drafts."""
    reference = Reference(write_tiny_model(tmp_path, architecture, num_layers=4, max_position_embeddings=4096))
    with CheckedLLM(reference, **ALL_GPU) as llm:
        serve_everything(llm)
    for speculation, num_gpu_blocks in MODES:
        options = cache_options(num_gpu_blocks) | {"speculation": speculation, "cpu_attention": "on"}
        internals = replace(splitting(100), always_guesses=True)
        with CheckedLLM(reference, internals=internals, streams=SimulatedStreams("random", 1), **options) as llm:
            llm.answer_and_check([PROMPTS[0] + PROMPTS[0][:300], *PROMPTS[1:]], max_tokens=30)
            llm.assert_nothing_left()
