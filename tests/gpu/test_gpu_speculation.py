"""Speculation inside CUDA graphs: no token changes, every kind of step is replayed, and bf16 is as good as before."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checked_engine import OFFLOAD, Reference, cache_options, greedy, speculating
from cpu_splits import ALL, splitting
from gpu_llm import GpuLLM
from odd_drafters import KINDS, OddDrafter, drafter_of
from offload_workload import BLOCK, prompts_of, serve_everything
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.plan.shadow_spec import SHADOW_BITS
from nanovllm.schedule.seams import load_of

pytestmark = pytest.mark.gpu

PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)
CACHES = pytest.mark.parametrize("num_gpu_blocks", [None, 24, 3], ids=["all-GPU", "resident", "streamed"])


@pytest.fixture(scope="module")
def answers(reference: Reference) -> list[list[int]]:
    options = cache_options(None) | {"device": "cuda", "dtype": "float32", "max_num_seqs": 4}
    with LLM(str(reference.directory), **options) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, greedy(40), use_tqdm=False)]


def knowing(kind: str, answers: list[list[int]], **others: object) -> Internals:
    """An engine that always guesses, with a drafter that knows the answers to PROMPTS."""
    return replace(speculating(drafter_of(kind, PROMPTS, answers)), **others)  # type: ignore[arg-type]


@CACHES
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_guess_in_graphs(
    reference: Reference, answers: list[list[int]], kind: str, num_gpu_blocks: int | None
) -> None:
    """One sequence, then four with different numbers of guesses and prompts mixed in."""
    options = cache_options(num_gpu_blocks) | {"speculation": "auto", "max_num_batched_tokens": 700}
    options |= {"num_speculative_tokens": 15}  # with 63, right guesses need hardly a pass
    with GpuLLM(reference, internals=knowing(kind, answers), **options) as llm:
        llm.answer_and_check(PROMPTS[:1], max_tokens=40)
        llm.answer_and_check(PROMPTS, max_tokens=40)
        name = "streamed verifying" if num_gpu_blocks == 3 else "resident verifying"
        assert llm.num_replays[name] > 3
        if kind in ("drafts", "mixed"):
            assert llm.num_replays["draft"] > 10
        assert llm.stats()["num_guesses"] > 20
        llm.assert_nothing_left()


@pytest.mark.parametrize("num_tokens", [1, BLOCK + 1, ALL])
@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_the_cpu_attends_beside_the_link(
    reference: Reference, answers: list[list[int]], kind: str, num_tokens: int
) -> None:
    internals = knowing(kind, answers, cpu_split=splitting(num_tokens).cpu_split)
    options = OFFLOAD | {"num_gpu_blocks": 3, "cpu_attention": "on", "speculation": "auto"}
    with GpuLLM(reference, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=40)
        assert any(plan.has_guesses and any(plan.moves.cpu_spans) for plan in llm.plans)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("speculation", ["prompt_lookup", "resident", "shadow", "auto"])
def test_drafters_with_everything(reference: Reference, speculation: str, enforce_eager: bool) -> None:
    """Preemption, an abort, partial hits. Then answers that repeat themselves."""
    internals = Internals(always_guesses=True)
    options = OFFLOAD | {"num_gpu_blocks": 3, "speculation": speculation, "enforce_eager": enforce_eager}
    with GpuLLM(reference, internals=internals, **options) as llm:
        serve_everything(llm)
        llm.answer_and_check([PROMPTS[0] + PROMPTS[0][:300], *PROMPTS[1:]], max_tokens=60)
        assert llm.stats()["num_accepted_guesses"] > 0


def test_measured_pace_is_exact_and_reported(reference: Reference) -> None:
    options = OFFLOAD | {"num_gpu_blocks": 3, "speculation": "auto", "cpu_attention": "auto"}
    with GpuLLM(reference, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=100)
        times = llm.scheduler.speculator.times
        assert times.draft_s(load_of(1, 1000)) > 0 and times._plain_s


@CACHES
@pytest.mark.parametrize("bits", SHADOW_BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_that_read_the_shadow_in_graphs(
    tmp_path: Path, num_gpu_blocks: int | None, bits: int, dtype: str
) -> None:
    """The model copies a text from far back, which drafts cannot do without the shadow."""
    model, passkey = build_retrieval_model(tmp_path / "model"), "q7m2x9kd4tzb0wy6"
    options = {"speculation": "shadow", "shadow_bits": bits, "dtype": dtype, "max_model_len": 6500}
    cache = {"num_kvcache_blocks": 60} if num_gpu_blocks is None else OFFLOAD | {"num_gpu_blocks": num_gpu_blocks}
    options = cache | options | {"kvcache_block_size": 256, "device": "cuda"}
    with LLM(str(model), internals=Internals(always_guesses=True), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for depth in (0.1, 0.6):
            (output,) = llm.generate([build_haystack(6000, depth, passkey)], params, use_tqdm=False)
            assert output["text"].startswith(passkey)
        stats = llm.stats()
        assert stats["num_used_shadow_pages"] >= 23
        assert stats["drafters"]["shadow"]["accepted_by_position"][8] > 0.8, stats["drafters"]


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_bf16_logits_are_as_good_as_plain_torch(tmp_path: Path, num_gpu_blocks: int | None) -> None:
    write_tiny_model(tmp_path, head_dim=64, hidden_size=128, max_position_embeddings=8192, dtype=torch.bfloat16)
    options = cache_options(num_gpu_blocks) | {"dtype": "bfloat16", "speculation": "auto"}
    drafter = OddDrafter("drafts" if num_gpu_blocks else "random", lambda seq, count: [1] * count, vocab_size=320)
    internals = Internals(drafters=(drafter,), always_guesses=True)
    with GpuLLM(Reference(tmp_path), internals=internals, **options) as llm:
        llm.assert_as_good_as_plain_torch(PROMPTS)


def test_bf16_distribution_is_unchanged(tmp_path: Path) -> None:
    """4,000 draws of the third token with and without speculation, whose drafts are drawn with the same noise."""
    write_tiny_model(tmp_path, head_dim=64, hidden_size=128, max_position_embeddings=8192, dtype=torch.bfloat16)
    counts = []
    for speculation in ("off", "resident"):
        options = OFFLOAD | {"num_gpu_blocks": 8, "num_cpu_blocks": 60, "max_num_seqs": 12, "dtype": "bfloat16"}
        options |= {"device": "cuda", "speculation": speculation}
        internals = Internals(always_guesses=True)
        with LLM(str(tmp_path), internals=internals, **options) as llm:
            params = [
                SamplingParams(temperature=0.7, top_k=8, max_tokens=4, ignore_eos=True, seed=i) for i in range(4000)
            ]
            outputs = llm.generate([PROMPTS[0]] * 4000, params, use_tqdm=False)
            assert speculation == "off" or llm.stats()["num_accepted_guesses"] > 400
            counts.append(Counter(output["token_ids"][2] for output in outputs))
    plain, speculated = counts
    distance = sum(abs(plain[token_id] - speculated[token_id]) for token_id in plain | speculated) / 4000
    assert distance < 0.1, f"total variation of {distance / 2:.3f}"
