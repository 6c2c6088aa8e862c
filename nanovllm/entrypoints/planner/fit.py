"""The models, formats of weights and contexts that run on one GPU, with the options and bounds of each.

Every entry is a plan of one sequence that `check_plan` accepts, with the fastest of the SETTINGS that work. All figures
of speed are projected: they are the plan's bounds, which no run exceeds.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.plan import CapacityPlan, make_plan
from nanovllm.capacity.plan_check import check_plan
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ARCHITECTURES, ModelConfig
from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.config import Config
from nanovllm.entrypoints.planner.report import first_token_s, rate_text, seconds_text
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import dtype_name
from nanovllm.utils.arithmetic import ceil_div, format_bytes

CONTEXTS = (32_768, 131_072, 262_144, 1_000_000)
COMMON: dict[str, Any] = {"gpu_memory_utilization": 0.95, "max_num_seqs": 16}
SETTINGS: tuple[dict[str, Any], ...] = tuple(
    COMMON | {"max_num_batched_tokens": num_tokens, "enable_cpu_offload": offload}
    for offload in (False, True)
    for num_tokens in (8192, 2048, 1024)
)
DOC_GPUS = ("RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090")  # 8, 12, 16 and 24 GB
DOC_MODELS = ("qwen3-4b", "qwen3-8b", "qwen2.5-7b-1m", "qwen3-30b-a3b")
DOC_HOST_GIB = 64
ANSWER_TOKENS = 500  # plans are compared by the time of an answer of this length to a prompt of the whole context


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model that runs. format: the format of the model's linear weights."""

    model: str
    format: str
    plan: CapacityPlan

    @property
    def is_resident(self) -> bool:
        return not self.plan.config.enable_cpu_offload

    @property
    def kv_bytes(self) -> int:
        """The size of the KV cache of one context, in whole blocks."""
        spec = self.plan.spec
        return ceil_div(self.plan.context, spec.block_size) * spec.block_bytes


def fits(
    machine: Machine, models: Iterable[str] = (), quantization: str | None = None, context: int | None = None
) -> list[Fit]:
    """List everything that runs on `machine`. `models`, `quantization` and `context` limit the list. By default, the
    list has all presets, the checkpoint's format and all of QUANTIZATIONS, and each of CONTEXTS that the model
    supports, or the model's longest context if that is shorter than all of CONTEXTS.

    Raises ConfigError if one of `models` does not take `context`.
    """
    found, named = [], tuple(models)
    for name in named or presets():
        stored = ModelConfig.without_weights(name)
        longest = max(stored.max_model_len_limit, _recommended_context(stored))
        if named and context is not None and context > longest:
            raise ConfigError(f"context={context} is more than the {longest} tokens that {name} takes; lower it")
        contexts = [tokens for tokens in CONTEXTS if tokens <= longest] or [longest]
        own = stored.quantization.method if stored.quantization else dtype_name(Config(model=name), stored)
        formats = {own: stored} if quantization is None else {}
        for each in QUANTIZATIONS if stored.quantization is None else ():
            if quantization in (None, each):
                formats[each] = stored.quantized(each)
        for format, model in formats.items():
            for tokens in contexts if context is None else [context]:
                if plans := list(_plans(name, model, machine, tokens)):
                    found.append(Fit(model=name, format=format, plan=min(plans, key=_request_s)))
    return found


def _recommended_context(model: ModelConfig) -> int:
    """Return the longest context that the model's authors recommend with YaRN, or 0 without a recommendation."""
    _, recommended = ARCHITECTURES[model.architecture].recommended_yarn.get(model.max_position_embeddings, (0, 0))
    return recommended


def _plans(name: str, model: ModelConfig, machine: Machine, context: int) -> Iterator[CapacityPlan]:
    """Yield the plans that work."""
    if model.max_model_len_limit < context <= _recommended_context(model):  # the rope changes neither memory nor speed
        model = replace(model, max_position_embeddings=context)
    for settings in SETTINGS:
        with suppress(ConfigError):
            plan = make_plan(Config(model=name, max_model_len=context, **settings), model, machine)
            check_plan(plan)
            yield plan


def _request_s(plan: CapacityPlan) -> float:
    """Return the least time of a request with a prompt of `context` tokens and an answer of ANSWER_TOKENS. A part
    without a known bound counts as 0.
    """
    num_tokens = plan.num_sequences * ANSWER_TOKENS
    return (first_token_s(plan) or 0.0) + num_tokens / (plan.expected_decode_tok_per_s or float("inf"))


def fit_table(machine: Machine, found: Sequence[Fit]) -> str:
    """Return a table of `found` as lines of text, with the options of each entry."""
    if machine.gpu_bytes is None:
        raise ConfigError("fit lists what runs on a GPU; leave out device='cpu'")
    title = (
        f"what runs on {machine.name} ({format_bytes(machine.gpu_bytes)}) with {format_bytes(machine.host_bytes)} of "
        "CPU memory; decode and first token are projected bounds, with drafts where a shadow pays"
    )
    if not found:
        return f"{title}\n  nothing; use a smaller model or context, or more memory"
    head = ("model", "format", "context", "KV cache", "where", "decode", "first token", "step tokens")
    rows = [
        (
            fit.model,
            fit.format,
            f"{fit.plan.context:,}",
            format_bytes(fit.kv_bytes),
            "GPU" if fit.is_resident else "offload",
            f"<= {rate_text(rate)}/s" if (rate := fit.plan.expected_decode_tok_per_s) else "unknown",
            f">= {seconds_text(first_s)}" if (first_s := first_token_s(fit.plan)) else "unknown",
            str(fit.plan.config.max_num_batched_tokens),
        )
        for fit in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(["", *map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]) for row in (head, *rows)
    ]
    common = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in COMMON.items())
    how = (
        f"every line needs {common}; add --max-model-len CONTEXT --max-num-batched-tokens STEP_TOKENS, "
        "--quantization FORMAT unless it is the checkpoint's format, --enable-cpu-offload for offload, and for a "
        "context beyond the model's limit the --hf-overrides that plan prints"
    )
    return "\n".join((title, *lines, how))


def doc_table(models: Sequence[str] = DOC_MODELS) -> str:
    """Return a table for the documents. For each model on each of DOC_GPUS, the table has the format with the most bits
    that keeps all KV on the GPU, or else the fastest format with offload.
    """
    lines = ["| GPU | model | " + " | ".join(f"{n:,} tokens" for n in CONTEXTS[:3]) + " |", "|" + "---|" * 5]
    return "\n".join(lines + [row for name in DOC_GPUS for model in models if (row := _doc_row(name, model))])


@cache
def _doc_row(name: str, model: str) -> str:
    gpu = find_gpu(name)
    found = fits(Machine.gpu(DOC_HOST_GIB * 2**30, gpu), [model])
    cells = [_doc_cell([fit for fit in found if fit.plan.context == n]) for n in CONTEXTS[:3]]
    return f"| {name}, {round(gpu.memory_gib)} GiB | {model} | {' | '.join(cells)} |" if any(cells) else ""


def _doc_cell(found: Sequence[Fit]) -> str:
    if not found:
        return ""
    best = next((fit for fit in found if fit.is_resident), None) or min(found, key=lambda fit: _request_s(fit.plan))
    rate, plain, first = best.plan.expected_decode_tok_per_s, best.plan.decode_tok_per_s, first_token_s(best.plan)
    assert rate and plain and first, "all rates of the table of GPUs are known"
    drafted = f" ({rate_text(plain)} without drafts)" if best.plan.num_pages else ""
    where = "" if best.is_resident else ", offload"
    return f"{best.format}{where}: {rate_text(rate)} tok/s{drafted}, {seconds_text(first)}"
