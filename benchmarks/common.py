"""Code that the benchmarks share: the machine's measured ceilings, a model's least work, and timing."""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.reporting import Samples
from nanovllm import LLM, SamplingParams
from nanovllm.capacity import costs
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.read_config import load_config
from nanovllm.plan.outputs import RequestOutput

NUM_RUNS = 5
QUESTION_TOKENS = 64


@dataclass(frozen=True)
class Ceilings:
    """The rates that bound an engine on this machine, measured in this run."""

    name: str
    matmul_flop_per_s: float  # bf16, 8192 x 8192 x 8192
    memory_byte_per_s: float  # a large copy on the device, bytes read plus bytes written
    link_byte_per_s: float  # pinned host memory to device, 8 MiB copies


def median_seconds(work: Callable[[], object]) -> float:
    """Median time of 10 runs of `work` on the current stream, measured with events, after a warm-up."""
    work()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Measure the ceilings. The matrices are random, because matrix products run faster on zeros."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_s = median_seconds(lambda: a @ b)
    source, target = (torch.empty(2**32, device="cuda", dtype=torch.uint8) for _ in range(2))
    copy_s = median_seconds(lambda: target.copy_(source))
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)

    def load() -> None:
        for start in range(0, 2**28, 2**23):
            target[start : start + 2**23].copy_(host[start : start + 2**23], non_blocking=True)

    link_s = median_seconds(load)
    return Ceilings(torch.cuda.get_device_name(), 2 * 8192**3 / matmul_s, 2 * 2**32 / copy_s, 2**28 / link_s)


class Work:
    """The least work of one GPU of an engine, computed from the model's shapes (nanovllm/capacity/costs.py)."""

    def __init__(self, llm: LLM) -> None:
        self._config, self._model = llm.config, llm.model_config
        self._kv_bytes_per_token = llm.runner.spec.block_bytes // llm.runner.spec.block_size

    def prefill_flop(self, num_tokens: int) -> float:
        return costs.prefill_flop(self._config, self._model, num_tokens)

    def prefill_bound(self, ceilings: Ceilings, num_tokens: int) -> float:
        """Tokens per second of one prompt if only its arithmetic took time."""
        return num_tokens * ceilings.matmul_flop_per_s / self.prefill_flop(num_tokens)

    def decode_bytes(self, context_lens: list[int]) -> float:
        """Bytes read in one decode step of sequences with these numbers of keys."""
        return costs.decode_bytes(
            self._config, self._model, len(context_lens), sum(context_lens), self._kv_bytes_per_token
        )


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def model_of_length(model: str, max_model_len: int) -> str:
    """Return `model`, or for a preset a directory with its config, which transformers and vLLM can also read.

    The config allows `max_model_len` tokens; a preset's weights are random anyway. A preset's name followed by -fp8 is
    the model in the format of Qwen's checkpoints in fp8, whose activations are quantized as well.
    """
    is_fp8 = model not in presets() and model.removesuffix("-fp8") in presets() and not Path(model).exists()
    preset = model.removesuffix("-fp8") if is_fp8 else model
    config, directory = load_config(preset)
    if directory is not None:
        return model
    data = json.loads(presets()[preset].read_text())
    if is_fp8:
        data["quantization_config"] = FP8_CONFIG
    if config.max_model_len_limit < max_model_len:
        data.get("text_config", data)["max_position_embeddings"] = max_model_len
    copy = Path(tempfile.mkdtemp(prefix=f"{model}-"))
    (copy / "config.json").write_text(json.dumps(data))
    return str(copy)


def random_prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def serve(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> tuple[list[RequestOutput], list[float]]:
    """Run the prompts together. Returns their outputs, and the end times of steps in which all prompts decoded."""
    each_params = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, its_params in zip(prompts, each_params, strict=True):
        llm.add_request(prompt, its_params)
    outputs: list[RequestOutput] = []
    ends: list[float] = []
    while not llm.is_finished():
        output = llm.step()
        outputs += output.finished.values()
        if output.num_decode_tokens == len(prompts) and not output.num_prefill_tokens:
            ends.append(time.perf_counter())
    return outputs, ends


def first_token_s(output: RequestOutput) -> float:
    assert output["ttft_s"] is not None
    return output["ttft_s"]


def time_decode(
    llm: LLM, context_len: int, num_tokens: int, seed: int, batch: int = 1, num_runs: int = NUM_RUNS
) -> Samples:
    """Tokens per second of `batch` sequences decoding together, starting at `context_len` keys. Every prompt is new.

    The time runs from the first to the last step in which all sequences decode, so that no prefill is included.
    """
    rng = random.Random(seed)
    rates = []
    for _ in range(num_runs + 1):
        prompts = [random_prompt(rng, context_len, llm.model_config.vocab_size) for _ in range(batch)]
        outputs, ends = serve(llm, prompts, greedy(num_tokens))
        assert all(output["num_cached_tokens"] == 0 for output in outputs)
        rates.append(batch * (len(ends) - 1) / (ends[-1] - ends[0]))
    return Samples(tuple(rates[1:]))


class PromptTimes(NamedTuple):
    """The result of `time_prompts`."""

    prefill: Samples  # prompt tokens per second until the first output token
    decode: Samples  # tokens per second from the first to the last decode step; empty if no steps decode
    second_question: Samples  # time to first token of a second question about the prompt, relative to the first


def time_prompts(llm: LLM, lengths: list[int], num_decoded: int, seed: int) -> PromptTimes:
    """Run, for each length, a new prompt with `num_decoded` output tokens, then a second question about it.

    The second question is the same prompt with different last tokens. The first length warms up and is not counted.
    """
    rng, vocab_size = random.Random(seed), llm.model_config.vocab_size
    prefill, decode, second_question = [], [], []
    for num_tokens in lengths:
        prompt = random_prompt(rng, num_tokens, vocab_size)
        (first,), ends = serve(llm, [prompt], greedy(num_decoded))
        assert first["num_cached_tokens"] == 0
        question = random_prompt(rng, QUESTION_TOKENS, vocab_size)
        (second,), _ = serve(llm, [prompt[:-QUESTION_TOKENS] + question], greedy(1))
        prefill.append(num_tokens / first_token_s(first))
        if len(ends) > 1:
            decode.append((len(ends) - 1) / (ends[-1] - ends[0]))
        second_question.append(first_token_s(second) / first_token_s(first))
    return PromptTimes(*(Samples(tuple(values[1:])) for values in (prefill, decode, second_question)))


def lengths_after_short_warm_up(num_tokens: int, num_runs: int, num_slots: int, block_size: int) -> list[int]:
    """Lengths for `time_prompts` with slow prompts: the first, for the warm-up, is just long enough to be streamed."""
    return [min(num_tokens, (num_slots + 4) * block_size)] + [num_tokens] * num_runs


def weight_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options for the formats and places of the weights."""
    place = {"true": True, "false": False}.get(args.embedding_on_cpu, "auto")
    experts = {name: getattr(args, name) for name in ("enable_expert_offload", "num_gpu_expert_layers")}
    return {
        "quantization": args.quantization,
        "quantize_head": args.quantize_head,
        "embedding_on_cpu": place,
        **experts,
    }


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-0.6b", help="preset, one followed by -fp8, directory or hub name")
    parser.add_argument("--quantization", help="quantize linear layers while they are loaded, such as int4")
    parser.add_argument("--quantize-head", help="quantize the output head while it is loaded: int8")
    parser.add_argument("--embedding-on-cpu", choices=("true", "false", "auto"), default="auto")
    parser.add_argument("--enable-expert-offload", action="store_true", help="keep experts in CPU memory")
    parser.add_argument("--num-gpu-expert-layers", type=int, help="layers whose experts stay on the GPU")
    parser.add_argument("--load-format", default="dummy", help="dummy: random weights; auto: the model's own")
    parser.add_argument("--max-model-len", type=int, default=40960, help="tokens of the long workload")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
