"""Drafts that read the shadow: they change no token, whatever is in it, and they read every key once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import OFFLOAD, CheckedLLM, Reference, cache_options
from cpu_splits import splitting
from offload_workload import BLOCK, prompts_of, serve_everything
from simulated_streams import Mode, SimulatedStreams
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams, StructuredOutputs
from nanovllm.capabilities.shadow import memory as shadow
from nanovllm.capabilities.shadow.drafts import MAX_TIMED_CPU_PAGES
from nanovllm.capabilities.shadow.pages import DraftKeys, ShadowFills
from nanovllm.capacity.division import NO_SHADOW, ShadowSize, auto_shadows, divide_memory
from nanovllm.config import Config
from nanovllm.engine.setup import Internals
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.errors import ConfigError
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.plan.shadow_spec import SHADOW_BITS, ShadowSpec
from nanovllm.plan.step_plan import find_payload

PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)
ALWAYS = Internals(always_guesses=True)
SHADOW: dict[str, Any] = {"speculation": "shadow"}


@pytest.fixture
def exact_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow that loses nothing, so that every draft is right if it reads all keys of its sequence once."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def quantize(k_PKD: torch.Tensor, v_PKD: torch.Tensor, spec: ShadowSpec) -> torch.Tensor:
        kept.append((k_PKD.clone(), v_PKD.clone()))
        return torch.full((k_PKD.shape[1], spec.head_words), len(kept) - 1, dtype=torch.int32)

    monkeypatch.setattr(shadow, "quantize_page", quantize)
    monkeypatch.setattr(shadow, "dequantize_page", lambda page_KW, spec: kept[int(page_KW[0, 0])])


@pytest.mark.parametrize(("num_gpu_blocks", "works_ahead"), [(None, True), (2, True), (3, False), (8, True)])
def test_drafts_read_every_key(
    reference: Reference, exact_pages: None, num_gpu_blocks: int | None, works_ahead: bool
) -> None:
    options = cache_options(num_gpu_blocks) | SHADOW | {"num_speculative_tokens": 20}
    internals = Internals(always_guesses=True, works_ahead=works_ahead)
    with CheckedLLM(reference, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=24)
        stats = llm.stats()
        assert stats["guess_acceptance"] == 1 and stats["num_guesses"] > 50
        assert stats["num_used_shadow_pages"] == 6  # full blocks, those of answers too
        llm.assert_nothing_left()


def test_a_prefix_hit_finds_its_pages_or_fills_them(reference: Reference, exact_pages: None) -> None:
    """The second prompt finds those of the first. A third one takes all pages but one. So when the first comes again,
    its blocks fill pages as they are streamed by, and the CPU attends to none of them.
    """
    num_bytes = ShadowSpec(bits=3, page_size=BLOCK, num_layers=2, num_kv_heads=2, head_dim=16).num_bytes(6)
    options = OFFLOAD | SHADOW | {"num_gpu_blocks": 3, "cpu_attention": "on", "shadow_bits": 3}
    internals = splitting(100, always_guesses=True)
    first, other = prompts_of(6 * BLOCK - 5, 6 * BLOCK)
    fills = []
    with CheckedLLM(reference, internals=internals, shadow_memory_gb=num_bytes / 2**30, **options) as llm:
        assert llm.stats()["num_shadow_pages"] == 6
        for prompt in (first, first[:-3], other, first):
            before = len(llm.plans)
            llm.answer_and_check([prompt], max_tokens=12)
            moves = [plan.moves for plan in llm.plans[before:]]
            assert not any(any(move.cpu_spans) for move in moves if move.acts_by_layer)
            filled = [find_payload(move.payloads, ShadowFills) or ShadowFills((), ()) for move in moves]
            fills.append((sum(len(each.resident) for each in filled), sum(len(each.streamed) for each in filled)))
        assert llm.stats()["guess_acceptance"] == 1
        assert any(any(plan.moves.cpu_spans) for plan in llm.plans)
        llm.assert_nothing_left()
    assert sum(fills[0]) == 5 and sum(fills[1]) == 0 and sum(fills[2]) == 6 and fills[3][1] >= 3


@pytest.mark.parametrize("bits", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_drafts_of_a_model_that_pays_attention_are_right(tmp_path: Path, bits: int) -> None:
    """It copies a text from far back."""
    passkey = "q7m2x9kd4tzb0wy6"
    options: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 2, "num_cpu_blocks": 20, "device": "cpu"}
    model = build_retrieval_model(tmp_path / "model")
    with LLM(
        model, max_model_len=1600, kvcache_block_size=256, shadow_bits=bits, **options, **SHADOW, internals=ALWAYS
    ) as llm:
        (output,) = llm.generate([build_haystack(1500, 0.4, passkey)], SamplingParams(temperature=0, max_tokens=40))
        assert output["text"].startswith(passkey)
        assert llm.stats()["guess_acceptance"] > 0.9


class Garbage:
    """Pages of noise, infinity and NaN."""

    def __call__(self, k_PKD: torch.Tensor, v_PKD: torch.Tensor, spec: ShadowSpec) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (k_PKD.shape[1], spec.head_words), dtype=torch.int32)


@pytest.mark.parametrize("num_gpu_blocks", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_garbage_in_the_shadow_costs_time_and_no_token(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, num_gpu_blocks: int | None
) -> None:
    monkeypatch.setattr(shadow, "quantize_page", Garbage())
    with CheckedLLM(reference, internals=ALWAYS, **(cache_options(num_gpu_blocks) | SHADOW)) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=8)
        stats = llm.stats()
        assert stats["num_guesses"] > 30 and stats["guess_acceptance"] < 0.2
        llm.assert_nothing_left()


# None is greedy: the model copies, and where a text goes on in two ways, both are equally likely but for rounding
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.1, "seed": 0},
    {"temperature": 1.5, "seed": 1, "top_p": 0.9},
    {"temperature": 0.7, "seed": 2, "n": 3, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.6, "min_tokens": 8, "logit_bias": {7: 4.0}},
    {"temperature": 0.6, "seed": 5, "structured_outputs": StructuredOutputs(regex="[a-f0-9 ]{15,25}")},
    {"temperature": 0.8, "seed": 4, "stop": ["e", "th"]},
]


@pytest.mark.parametrize("num_gpu_blocks", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_any_request_gets_the_tokens_that_it_gets_without_guesses(tmp_path: Path, num_gpu_blocks: int | None) -> None:
    """With chunks of prompts, and more sequences than run at once."""
    model = build_retrieval_model(tmp_path / "model")
    prompts = [build_haystack(length, 0.4, "q7m2x9kd") for length in (600, 300, 450, 700, 350, 500)]
    params = [SamplingParams(max_tokens=28, **request) for request in REQUESTS]
    options = {"num_kvcache_blocks": 7} if num_gpu_blocks is None else OFFLOAD | {"num_cpu_blocks": 7}
    options |= {"kvcache_block_size": 256, "max_model_len": 800, "max_num_batched_tokens": 200, "max_num_seqs": 4}
    options |= {} if num_gpu_blocks is None else {"num_gpu_blocks": num_gpu_blocks, "cpu_attention": "on"}
    answers = []
    for speculation in ("off", "shadow"):
        options |= {"speculation": speculation}
        with LLM(model, device="cpu", dtype="float32", internals=ALWAYS, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([(output["text"], output["token_ids"], output["finish_reason"]) for output in outputs])
            stats = llm.stats()
    assert answers[0] == answers[1]
    assert stats["drafters"]["shadow"]["num_accepted_guesses"] > 50


@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("early", 1), ("random", 0)])
def test_everything_with_simulated_streams(reference: Reference, mode: Mode, seed: int) -> None:
    """Preemption, an abort, partial hits; copies late, early and at random times; the CPU attends to some keys."""
    streams = SimulatedStreams(mode, seed)
    options = OFFLOAD | SHADOW | {"num_gpu_blocks": 3, "cpu_attention": "on"}
    with CheckedLLM(reference, streams=streams, internals=splitting(100, always_guesses=True), **options) as llm:
        serve_everything(llm)
        assert any(step.payload(DraftKeys) for plan in llm.plans for step in plan.sequences)


def test_a_start_on_a_cpu_times_drafts_of_few_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a context of a million tokens, which the built-in model has, an engine took minutes to start."""
    unpacked = []

    def dequantize(page_KW: torch.Tensor, spec: ShadowSpec) -> tuple[torch.Tensor, torch.Tensor]:
        unpacked.append(page_KW)
        return torch.zeros(2, spec.page_size, spec.num_kv_heads, spec.head_dim).unbind()

    monkeypatch.setattr(shadow, "dequantize_page", dequantize)
    model = write_tiny_model(tmp_path, num_layers=1, max_position_embeddings=2**14)
    options: dict[str, Any] = {"num_kvcache_blocks": 64, "speculation": "shadow"}
    with LLM(str(model), device="cpu", dtype="float32", **options) as llm:
        assert llm.stats()["num_shadow_pages"] == 64
    assert len(unpacked) == MAX_TIMED_CPU_PAGES


def test_a_shadow_without_room_for_a_block_is_refused(reference: Reference) -> None:
    with pytest.raises(
        ConfigError, match=r"no room for the shadow: a block takes .* in 4 bits; .*raise shadow_memory_gb"
    ):
        CheckedLLM(reference, shadow_bits=4, shadow_memory_gb=1e-6, **(cache_options(3) | SHADOW))


def test_memory_is_divided_between_blocks_and_pages() -> None:
    spec = KVCacheSpec(num_layers=2, block_size=256, num_kv_heads=2, head_dim=128, itemsize=2)
    specs, sink = {bits: ShadowSpec.of(spec, bits) for bits in SHADOW_BITS}, 64 / 256  # of a block
    assert [specs[bits].page_bytes / spec.block_bytes for bits in SHADOW_BITS] == [4.5 / 16, 3.75 / 16]
    # 8,192 tokens, which are 32 blocks, have a sink
    assert specs[4].num_bytes(100) == (100 * 4.5 / 16 + 4 * sink) * spec.block_bytes
    offload, block = {"enable_cpu_offload": True}, spec.block_bytes

    def divided(room: float, given: int, useful: int = 1000, **options: Any) -> tuple[int, int, int]:
        config = Config(model="m", speculation="shadow", **options)
        sizes = divide_memory(config, spec, int(room), given=given, useful=useful, num_cpu_blocks=100)
        assert sizes.num_gpu_blocks * block + specs[sizes.shadow_bits].num_bytes(sizes.num_pages) <= room
        return sizes.num_gpu_blocks, sizes.num_pages, sizes.shadow_bits

    assert divided(40 * block, given=8, **offload) == (8, 100, 4)  # which take 29.125 blocks
    assert divided(35 * block, given=8, **offload) == (8, 100, 3)  # 24.44 blocks
    assert divided(28 * block, given=8, **offload) == (8, 82, 3)  # 19.97 blocks
    assert divided(18 * block, given=8, **offload) == (8, 40, 3)
    assert divided(18 * block, given=8, shadow_bits=4, **offload) == (8, 33, 4)
    assert divided(40 * block, given=8, shadow_memory_gb=20 * block / 2**30, **offload) == (8, 82, 3)
    assert divided(40 * block, given=8, useful=30, **offload) == (8, 30, 4)  # no more can run at once
    assert divided(60 * block, given=0, **offload) == (30, 100, 4)  # half is enough for 4 bits
    assert divided(54 * block, given=0, **offload) == (29, 100, 3)
    assert divided(129.125 * block, given=0) == (100, 100, 4)  # a page for each block
    assert divided(1000 * block, given=0, useful=50) == (50, 50, 4)
    assert divided(64 * block, given=50) == (50, 50, 3)
    assert divided(50.75 * block, given=50) == (50, 2, 3)
    assert divided(100 * block, given=50, useful=20) == (50, 20, 4)


def test_memory_is_divided_as_the_planner_has_chosen() -> None:
    spec = KVCacheSpec(num_layers=2, block_size=256, num_kv_heads=2, head_dim=128, itemsize=2)
    config, block = Config(model="m", enable_cpu_offload=True), spec.block_bytes

    def divided(room: float, given: int, shadow: ShadowSize) -> tuple[int, int, int]:
        room_bytes = int(room * block)
        sizes = divide_memory(config, spec, room_bytes, given=given, useful=1000, num_cpu_blocks=100, shadow=shadow)
        return sizes.num_gpu_blocks, sizes.num_pages, sizes.shadow_bits

    assert divided(40, 8, ShadowSize(64, 4)) == (8, 64, 4)
    assert divided(8 + 18.5, 8, ShadowSize(65, 4)) == (8, 64, 4)  # start-up has measured a little less room
    assert divided(60, 0, ShadowSize(64, 4)) == (41, 64, 4)
    assert divided(40, 0, NO_SHADOW) == (40, 0, 0)


def test_a_shadow_takes_no_slot_that_the_engine_needs() -> None:
    """Regressions: if start-up measured less room than the planner had estimated, the shadow took what the slots
    needed, and the engine did not start. With max_num_seqs=1, the planner left room for one slot, but two are needed.
    """
    spec = KVCacheSpec(num_layers=2, block_size=256, num_kv_heads=2, head_dim=128, itemsize=2)

    def divided(room: float, shadow: ShadowSize, **options: Any) -> tuple[int, int]:
        config, room_bytes = Config(model="m", enable_cpu_offload=True, **options), int(room * spec.block_bytes)
        sizes = divide_memory(config, spec, room_bytes, given=0, useful=1000, num_cpu_blocks=100, shadow=shadow)
        return sizes.num_gpu_blocks, sizes.num_pages

    chosen = ShadowSize(64, 4)  # 18.5 blocks
    assert [divided(room, chosen) for room in (51, 41.25, 32, 20)] == [(32, 64), (32, 32), (32, 0), (20, 0)]
    assert [divided(room, chosen, max_num_seqs=1) for room in (21, 11.25, 2)] == [(2, 64), (2, 32), (2, 0)]
    config, room_bytes = Config(model="m", enable_cpu_offload=True, max_num_seqs=1), 19 * spec.block_bytes
    shadows = auto_shadows(config, spec, room_bytes, given=0, num_cpu_blocks=64, max_model_len=64 * 256)
    assert next(shadows).bits == 3  # 17 blocks, which is too little for 4 bits


def test_drafts_are_the_default_with_offload_and_change_no_token(reference: Reference) -> None:
    """Pages are filled only while the running sequences need more blocks than there are slots."""
    options = OFFLOAD | {"num_gpu_blocks": 6, "speculation": None}
    with CheckedLLM(reference, internals=ALWAYS, **options) as llm:
        llm.answer_and_check(PROMPTS[:2], max_tokens=24)
        stats = llm.stats()
        assert stats["num_shadow_pages"] > 0 and stats["num_used_shadow_pages"] == 0
        assert "shadow" not in stats["drafters"]
        llm.answer_and_check(PROMPTS, max_tokens=24)
        stats = llm.stats()
        assert stats["num_used_shadow_pages"] > 0 and stats["drafters"]["shadow"]["num_guesses"] > 0
        llm.assert_nothing_left()
