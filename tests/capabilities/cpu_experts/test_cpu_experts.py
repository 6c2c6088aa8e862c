"""Engines whose experts are in CPU memory: every logit is transformers', whatever else the engine does."""

import json
import os
import random
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import CheckedLLM, Reference, cache_options, greedy, small_staging
from cpu_splits import RandomSplit
from dense_model import load_model, random_prompt, run_logits
from disk_engines import DOCUMENT, HIT, wait_until_stored
from gguf_files import write_gguf
from mxfp4_files import write_mxfp4
from offload_workload import BLOCK, prompts_of, serve_everything
from quantized_models import FORMATS, write_quantized
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiers import RUNS_ALL
from tiny_models import EXPERTS, ROPES, greedy_reference, reference_model, write_tiny_model, write_tiny_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.cpu_attention import rates
from nanovllm.capabilities.cpu_attention.queue import CpuAttention
from nanovllm.capabilities.cpu_experts.job import ExpertJob
from nanovllm.capabilities.cpu_experts.layer import CpuExperts, RankExperts
from nanovllm.checkpoint.read_config import load_config
from nanovllm.config import Config
from nanovllm.device.cuda import UnsupportedDriverError
from nanovllm.device.tp_group import TPGroup
from nanovllm.engine import startup
from nanovllm.engine.setup import Internals
from nanovllm.errors import ConfigError, EngineError
from nanovllm.layers.moe import SparseMLP
from nanovllm.models.loader import build_model, load_weights
from nanovllm.runner import model_runner
from nanovllm.sampling_params import StructuredOutputs

SLOW = pytest.mark.slow

NONE = {"enable_expert_offload": True, "num_gpu_expert_layers": 0}  # all experts are in CPU memory
HALF = {"enable_expert_offload": True, "num_gpu_expert_layers": 2}
SIZES: dict[str, Any] = {"num_layers": 4, "max_position_embeddings": 4096}
PROMPTS = prompts_of(1, 65, BLOCK + 1)
MTP = {"speculation": "mtp", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    experts = EXPERTS | {"norm_topk_prob": False}
    return Reference(write_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", experts=experts, **SIZES))


@pytest.fixture(scope="module")
def hybrid_mixture(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """With recurrent layers, a shared expert and a draft head."""
    directory = tmp_path_factory.mktemp("hybrid_mixture")
    return Reference(write_tiny_model(directory, "qwen3_5_moe", with_mtp=True, **SIZES))


def rank_experts(llm: CheckedLLM) -> RankExperts:
    rank = llm.runner.model.cpu_experts
    assert isinstance(rank, RankExperts)
    return rank


def count_rows(llm: CheckedLLM) -> list[int]:
    """Return a list that gets the number of rows of each layer that is computed on the CPU from now on."""
    rank, num_rows = rank_experts(llm), list[int]()
    compute = rank._compute

    def counting(layer: int, x: torch.Tensor, *routes: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(x))
        return compute(layer, x, *routes)

    rank._compute = counting  # type: ignore[method-assign]
    return num_rows


@pytest.mark.parametrize("placement", [NONE, HALF], ids=["none", "half"])
@pytest.mark.parametrize("kind", ["mixture", "hybrid_mixture"])
def test_logits_are_those_of_transformers(request: pytest.FixtureRequest, kind: str, placement: dict[str, Any]) -> None:
    """Chunks of prompts are longer than the jobs of the CPU, and end anywhere in them."""
    reference = request.getfixturevalue(kind)
    with CheckedLLM(reference, speculation="off", **placement, **cache_options(None)) as llm:
        mlps = [layer.mlp for layer in llm.runner.model.model.layers]
        assert all(isinstance(mlp, SparseMLP) for mlp in mlps)
        num_on_cpu = sum(isinstance(mlp.experts, CpuExperts) for mlp in mlps)
        assert num_on_cpu == llm.stats()["num_cpu_expert_layers"] == 4 - placement["num_gpu_expert_layers"]
        num_rows = count_rows(llm)
        outputs = llm.answer_and_check(PROMPTS)
        assert len({tuple(output["token_ids"]) for output in outputs}) > 1, "this model cannot tell prompts apart"
        num_at_once = llm.stats()["max_cpu_expert_rows"]
        assert max(num_rows) > 2 * num_at_once and min(num_rows) == 1
        assert llm.stats()["num_cpu_computed_layers"] == sum(-(-n // num_at_once) for n in num_rows)
        llm.answer_and_check([PROMPTS[2] + [5, 6, 7]])  # a prefix hit
        llm.assert_nothing_left()


def test_drafts_of_a_head_with_experts_in_cpu_memory_are_the_same(hybrid_mixture: Reference) -> None:
    """The head has random weights: none of its drafts is accepted, but each has logits."""
    found = []
    for placement in ({}, NONE):
        options = cache_options(None) | MTP | placement
        with CheckedLLM(hybrid_mixture, internals=Internals(always_guesses=True), **options) as llm:
            drafts = list[torch.Tensor]()
            compute = llm.runner.model.compute_logits

            def recording(hidden: torch.Tensor, *args: Any, llm=llm, drafts=drafts, compute=compute) -> torch.Tensor:  # type: ignore[no-untyped-def]
                logits: torch.Tensor = compute(hidden, *args)
                drafts += [*logits.clone()] if llm.is_drafting else []
                return logits

            llm.runner.model.compute_logits = recording
            llm.answer_and_check(PROMPTS[1:], max_tokens=5)
            found.append(torch.stack(drafts))
            if placement:
                assert rank_experts(llm).names[-1] == "mtp.layers.0.mlp"
                assert isinstance(llm.runner.model.mtp.layers[0].mlp.experts, CpuExperts)
    assert len(found[0]) > 10 and found[0].std() > 0.1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


# -- everything together -----------------------------------------------------------------------------------------------


def random_options(rng: random.Random, kind: str, path: Path) -> dict[str, Any]:
    """Draw where experts and KV are, who attends, what drafts, how steps are cut, and whether prefixes go to disk."""
    num_slots = rng.choice([None, 2, 2, 3])
    options: dict[str, Any] = cache_options(num_slots) | rng.choice([NONE, NONE, HALF])
    options |= {"max_num_batched_tokens": rng.choice([70, 300, 1000]), "num_speculative_tokens": rng.choice([2, 4, 7])}
    drafters = ["off", "prompt_lookup", "shadow", "auto"] + (["resident"] if num_slots else [])
    options["speculation"] = rng.choice(drafters if kind == "mixture" else ["off", "prompt_lookup", "mtp", "mtp"])
    seed = rng.randrange(1000)
    internals = Internals(
        always_guesses=True, works_ahead=rng.random() < 0.5, cpu_split=RandomSplit(generator=random.Random(seed))
    )
    if num_slots:
        options["cpu_attention"] = rng.choice(["off", "on"])
        internals = replace(internals, staging=small_staging(rng.choice([1, 2]) * BLOCK, 2).staging)
    if options.get("cpu_attention", "off") == "off":
        internals = replace(internals, cpu_split=None)
    if rng.random() < 0.3 and options["speculation"] != "mtp":
        options["kv_disk_path"] = str(path)
    return options | {"internals": internals}


@pytest.mark.parametrize("seed", range(20 if RUNS_ALL else 1))
def test_everything_together(request: pytest.FixtureRequest, patient_disk: None, tmp_path: Path, seed: int) -> None:
    """Long and short prompts, hits, preemption, an abort."""
    rng = random.Random(seed)
    kind = rng.choice(["mixture", "hybrid_mixture"])
    options = random_options(rng, kind, tmp_path)
    reference = request.getfixturevalue(kind)
    with CheckedLLM(reference, **options) as llm:
        serve_everything(llm)


def test_kv_on_disk_is_found_by_the_same_experts_alone(mixture: Reference, patient_disk: None, tmp_path: Path) -> None:
    """Regression: experts in CPU memory were not part of the identity of the weights, so that a checkpoint that differs
    in its experts alone was answered with the K and V of another one.
    """
    other = shutil.copytree(mixture.directory, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.neg_()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    options = cache_options(None) | NONE | {"kv_disk_path": str(tmp_path / "disk")}
    for reference, num_cached in ((mixture, 0), (Reference(other), 0), (mixture, HIT)):
        with CheckedLLM(reference, **options) as llm:
            assert llm.answer_and_check([DOCUMENT])[0]["num_cached_tokens"] == num_cached
            wait_until_stored(llm)


@SLOW
@pytest.mark.parametrize("num_gpu_blocks", [None, 2])
def test_states_and_kv_of_a_hybrid_mixture_come_back_from_disk(
    hybrid_mixture: Reference, patient_disk: None, tmp_path: Path, num_gpu_blocks: int | None
) -> None:
    options = cache_options(num_gpu_blocks) | NONE | {"kv_disk_path": str(tmp_path), "speculation": "off"}
    found = []
    for question in (0, 1, 2):
        with CheckedLLM(hybrid_mixture, **options) as llm:
            prompt = [*DOCUMENT, *random_prompt(300, seed=question)]
            found.append(llm.answer_and_check([prompt])[0]["num_cached_tokens"])
            wait_until_stored(llm)
    assert found == [0, 0, HIT]


# -- formats -----------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "vocab_size": 320}
WIDE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of two layers whose matrices consist of whole blocks of every type."""
    directory = tmp_path_factory.mktemp("wide")
    return write_tiny_model(directory, "qwen3_moe", experts=WIDE_EXPERTS, max_position_embeddings=1024, **WIDE)


@pytest.mark.parametrize(
    "name",
    ["Q4_K Q6_K", "awq", *(pytest.param(name, marks=SLOW) for name in ("gptq", "packed 4", "fp8 blocks", "Q8_0 F16"))],
)
def test_quantized_checkpoints_have_the_logits_of_their_values(wide: Path, tmp_path: Path, name: str) -> None:
    if name in FORMATS:
        path, values = write_quantized(wide, tmp_path, name)
    else:
        values = tmp_path / "values"
        path = write_gguf(tmp_path / "x.gguf", wide, types=name.split(), same_values=values)
    reference = Reference(values)
    for num_layers in (0, 1):
        reference.directory = path
        with CheckedLLM(reference, **cache_options(None), **NONE | {"num_gpu_expert_layers": num_layers}) as llm:
            llm.answer_and_check(PROMPTS)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_quantized_at_loading_gives_the_tokens_of_the_same_codes(wide: Path, quantization: str, dtype: str) -> None:
    """In 16 bits the CPU rounds as a GPU does, which plain torch does not, so that logits differ a little."""
    found = []
    for placement in ({}, NONE):
        options = {"quantization": quantization, "dtype": dtype} | cache_options(None) | placement
        with CheckedLLM(Reference(wide), **options) as llm:
            ids = [llm.add_request(prompt, greedy()) for prompt in PROMPTS]
            finished = llm.finish_all()
            found.append(([finished[i]["token_ids"] for i in ids], torch.stack([llm.logits[i][0] for i in ids])))
    (tokens, logits), (cpu_tokens, cpu_logits) = found
    error = (logits - cpu_logits).abs().max() / logits.std()
    if dtype == "float32":
        assert tokens == cpu_tokens and error < 1e-4
    else:
        assert error < 0.1


# -- text --------------------------------------------------------------------------------------------------------------


def test_stop_strings_and_structured_output(mixture: Reference, tmp_path: Path) -> None:
    """With the tokens of an engine whose experts are where they usually are."""
    directory = write_tiny_tokenizer(shutil.copytree(mixture.directory, tmp_path / "text"))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    params = [
        SamplingParams(temperature=1, seed=1, max_tokens=200, structured_outputs=StructuredOutputs(json=schema)),
        SamplingParams(temperature=1, seed=2, max_tokens=30, structured_outputs=StructuredOutputs(regex="[ab]{40}")),
        SamplingParams(temperature=1, seed=3, max_tokens=30, ignore_eos=True, logprobs=2),
    ]
    prompts, found = ["a", "b" * 70, "cd"], []
    for placement in ({}, NONE):
        options = {"device": "cpu", "dtype": "float32"} | cache_options(None) | placement
        with LLM(str(directory), **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            stop = outputs[2]["text"][4:6]
            stopped = llm.generate(prompts[2:], replace(params[2], stop=[stop]), use_tqdm=False)[0]
            assert stopped["finish_reason"] == "stop" and stopped["text"] == outputs[2]["text"].partition(stop)[0]
            found.append([output["token_ids"] for output in (*outputs, stopped)])
    assert found[0] == found[1]
    assert json.loads(outputs[0]["text"])["a"] in (1, 22, 333) and re.fullmatch("[ab]{30}", outputs[1]["text"])


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A mixture whose experts two ranks can share."""
    experts, directory = EXPERTS | {"moe_intermediate_size": 64}, tmp_path_factory.mktemp("divisible")
    return Reference(write_tiny_model(directory, "qwen3_5_moe", experts=experts, with_mtp=True, **SIZES))


def logits_of_ranks(directory: Path, prompt: list[int], num_ranks: int) -> list[torch.Tensor]:
    """The logits that each rank computes with all experts in CPU memory."""
    config = Config(model=str(directory), device="cpu", tensor_parallel_size=num_ranks, **NONE)
    stored, path = load_config(config.model)
    assert stored.experts is not None

    def logits(tp: TPGroup) -> torch.Tensor:
        model = build_model(
            replace(stored, experts=stored.experts.on_gpu(0)),  # type: ignore[union-attr]
            tp,
            max_model_len=128,
            dtype=torch.float32,
            device="cpu",
            directory=path,
            make_cpu_experts=RankExperts,
        )
        load_weights(model, path)
        assert model.cpu_experts is not None
        model.cpu_experts.start(config)
        try:
            return run_logits(model, prompt)
        finally:
            model.cpu_experts.close()

    return run_ranks(num_ranks, logits)


def test_biases_and_clamped_gates_have_the_logits_of_experts_that_are_not_in_cpu_memory(tmp_path: Path) -> None:
    """Packed in MXFP4, and the values; two ranks, one of which has the biases of down."""
    plain = write_tiny_model(tmp_path / "plain", "gpt_oss", rope="yarn", intermediate_size=64)
    prompt = random_prompt(70)
    quantized, values = write_mxfp4(tmp_path / "quantized", plain, tmp_path / "values"), tmp_path / "values"
    expected = run_logits(load_model(values), prompt)
    for directory, num_ranks in ((values, 1), (quantized, 1), (quantized, 2)):
        for logits in logits_of_ranks(directory, prompt, num_ranks):
            assert (logits - expected).abs().max() < 2e-5


@SLOW
def test_engine_with_biased_experts_in_mxfp4_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """gpt-oss in safetensors and GGUF, with the experts of no layer, of some layers and of all in CPU memory."""
    sizes: dict[str, Any] = {"num_layers": 4, "intermediate_size": 64, "max_position_embeddings": 512}
    rope = {**ROPES["yarn"], "truncate": False}  # GGUF files do not say it
    plain, values = write_tiny_model(tmp_path / "plain", "gpt_oss", rope=rope, **sizes), tmp_path / "values"
    quantized, of_gguf = write_mxfp4(tmp_path / "quantized", plain, values), tmp_path / "of_gguf"
    gguf = write_gguf(tmp_path / "x.gguf", values, types=["MXFP4", "F32"], same_values=of_gguf)
    prompts = [random_prompt(length, seed=length) for length in (60, 5, 100)]
    for path, same, options in (
        (quantized, values, {}),
        (quantized, values, NONE),
        (quantized, values, NONE | {"num_gpu_expert_layers": 2, "tensor_parallel_size": 2}),
        (gguf, of_gguf, NONE | {"num_gpu_expert_layers": 1}),
    ):
        expected = [greedy_reference(same, prompt, 12) for prompt in prompts]
        given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 64, **options}
        with LLM(str(path), skip_tokenizer_init=True, **given) as llm:
            outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy(12))
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected, (path.name, options)


def test_ranks_share_each_expert(divisible: Reference) -> None:
    prompt = random_prompt(100)
    for of_rank in logits_of_ranks(divisible.directory, prompt, 2):
        assert (of_rank - divisible.logits(prompt, len(prompt))).abs().max() < 1e-4


def test_experts_of_gemma_are_added_to_a_dense_mlp(tmp_path: Path) -> None:
    """The CPU computes experts, gated with GELU, while the GPU computes the dense MLP."""
    write_tiny_model(tmp_path, "gemma4_moe", gemma={"moe_intermediate_size": 64})
    prompt = random_prompt(30)
    with torch.no_grad():
        expected = reference_model(tmp_path)(torch.tensor([prompt])).logits[0]
    for of_rank in logits_of_ranks(tmp_path, prompt, 2):
        assert (of_rank - expected).abs().max() < 1e-4


@SLOW
@pytest.mark.parametrize("num_gpu_blocks", [None, 2])
def test_two_ranks(divisible: Reference, num_gpu_blocks: int | None) -> None:
    options = cache_options(num_gpu_blocks) | NONE | {"tensor_parallel_size": 2} | MTP
    with CheckedLLM(divisible, internals=Internals(always_guesses=True), **options) as llm:
        serve_everything(llm)
        assert llm.stats()["num_guesses"] > 0


def test_experts_that_ranks_cannot_share_are_refused_at_once(mixture: Reference) -> None:
    with pytest.raises(ConfigError, match=r"16 rows.* must be a multiple of 32 in CPU memory; keep all experts on the"):
        LLM(str(mixture.directory), device="cpu", tensor_parallel_size=2, **NONE)


# -- threads and memory ------------------------------------------------------------------------------------------------

TWO_THREADS = {"device": "cpu", "dtype": "float32", "cpu_attention_threads": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "all GPU": cache_options(None),
    "offload, CPU attends": cache_options(2) | {"cpu_attention": "on"},
}


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


def threads() -> set[str]:
    """Return the ids of all threads of this process, also of those that are not Python's."""
    return set(os.listdir("/proc/self/task"))


def owners(llm: LLM) -> list[Any]:
    """Return weak references to the experts, their memory and their threads."""
    rank = llm.runner.model.cpu_experts
    return [weakref.ref(each) for each in (rank, rank.store, rank.store.memory.untyped_storage(), rank.kernel)]


@pytest.fixture
def open_llm(mixture: Reference) -> Callable[..., LLM]:
    """Opens an engine after another one has started all threads that stay, such as torch's."""

    def open_one(**options: Any) -> LLM:
        return LLM(str(mixture.directory), **TWO_THREADS, **NONE, **options)

    open_one(**ENGINES["all GPU"]).close()
    return open_one


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        *(("dropped", "offload, CPU attends"), ("failed", "all GPU")),
        *(pytest.param(ends, "all GPU", marks=SLOW) for ends in ("closed", "dropped")),
        *(pytest.param(ends, "offload, CPU attends", marks=SLOW) for ends in ("closed", "failed")),
    ],
)
def test_no_thread_and_no_memory_is_left(open_llm: Callable[..., LLM], name: str, ends: str) -> None:
    before = threads()
    llm = open_llm(**ENGINES[name])
    assert threads() - before
    llm.runner.freeze_objects()  # for good, see test_dropped_engine.py
    llm.generate([list(range(200)) * 3], greedy(), use_tqdm=False)
    held = owners(llm)
    if ends == "failed":
        llm.runner.model.cpu_experts._compute = broken
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3]], greedy(), use_tqdm=False)
        with pytest.raises(EngineError, match="a step failed with ZeroDivisionError"):
            llm.generate([[1, 2, 3]], greedy(), use_tqdm=False)
    if ends != "dropped":
        llm.close()
        llm.close()
        assert not threads() - before
    del llm
    assert [each() for each in held] == [None] * len(held)
    assert not threads() - before


FAULTS: dict[str, tuple[Any, str]] = {
    "starting the threads": (ExpertJob, "of_rows"),
    "reading the weights": (model_runner, "load_weights"),
    "later": (startup, "Scheduler"),
}


@pytest.mark.parametrize("where", [next(iter(FAULTS)), *(pytest.param(name, marks=SLOW) for name in list(FAULTS)[1:])])
def test_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, open_llm: Callable[..., LLM], where: str) -> None:
    """The caller keeps the exception."""
    before, ranks = threads(), list[Any]()
    make = RankExperts.__init__

    def noted(self: RankExperts, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        ranks.extend(weakref.ref(each) for each in (self, self.store, self.store.memory.untyped_storage()))

    monkeypatch.setattr(RankExperts, "__init__", noted)
    monkeypatch.setattr(*FAULTS[where], broken)
    with pytest.raises(ZeroDivisionError):
        open_llm(**ENGINES["offload, CPU attends"])
    assert [each() for each in ranks] == [None] * 3 and not threads() - before


def test_driver_without_waits_disables_attention_on_the_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, mixture: Reference
) -> None:
    """Regression: the threads that compute experts were closed."""

    class UnsupportedAttention(CpuAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise UnsupportedDriverError("no waits")

    monkeypatch.setattr(rates, "CpuAttention", UnsupportedAttention)
    with CheckedLLM(mixture, **NONE, **cache_options(2) | {"cpu_attention": "auto"}) as llm:
        llm.answer_and_check(PROMPTS)


def test_nan_of_one_sequence_stays_in_it(mixture: Reference) -> None:
    with CheckedLLM(mixture, enable_prefix_caching=False, **NONE, **cache_options(None)) as llm:
        prompts = [random_prompt(20, seed=seed) for seed in range(3)]
        used = {token for prompt in prompts for token in prompt + greedy_reference(mixture.directory, prompt, 6)}
        unused = next(token for token in range(320) if token not in used)
        llm.runner.model.model.embed_tokens.weight.data[unused] = torch.nan
        ids = [llm.add_request(prompt, greedy()) for prompt in (prompts[0], [4, unused, 6], *prompts[1:])]
        finished = llm.finish_all()
        assert finished[ids[1]]["finish_reason"] == "error"
        for request_id, prompt in zip((ids[0], *ids[2:]), prompts, strict=True):
            llm.check(request_id, prompt, finished[request_id])
