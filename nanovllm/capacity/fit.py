"""Choices of options: what an engine should do on a machine, so that a user need not know the options.

`choose` sets the options that the user left open: KV offload, the size of a step, the number of sequences, the share of
the GPU's memory, the context and, if the user wants it (fit=True), the format of the weights. Options that the user has
given never change. LLM calls `choose` when it starts (engine/setup.py), and `nanovllm plan` shows the same choice.
`fits` lists what runs on one GPU, with the same choices.

Every choice is a plan that `check_plan` accepts. Plans are compared by the time of a request, from the plan's bounds,
which no run exceeds.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nanovllm.capacity.costs import num_prefill_loaded_blocks, prefill_expert_bytes, prefill_flop
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import CapacityPlan, least
from nanovllm.capacity.plan_check import HEAD_FORMAT, can_work, fp8_problem
from nanovllm.checkpoint.architectures import ARCHITECTURES
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import QUANTIZATIONS, WEIGHTS_ALONE
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import StagingSizes, dtype_name
from nanovllm.utils.arithmetic import ceil_div

CONTEXTS = (32_768, 131_072, 262_144, 1_000_000)
USUAL_CONTEXT = CONTEXTS[0]  # the format of the weights is chosen for this context if the user names none
MIN_CONTEXT = 4096  # the least context that is chosen
# What is tried, the least different from the defaults first. Small steps and few sequences leave memory to KV.
_SIZES: tuple[dict[str, Any], ...] = (
    {},
    *(
        {"gpu_memory_utilization": 0.95, "max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
        for num_seqs, num_tokens in ((128, 8192), (128, 2048), *((16, 1024 * n) for n in (8, 4, 2, 1)), (4, 4096))
    ),
)
SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {"enable_cpu_offload": offload, **sizes} for offload in (False, True) for sizes in _SIZES
)
TOLERANCE = 1.03  # in the time of a request and in decode, for settings that differ less from the defaults
FAST_TOK_PER_S = 10.0  # bound of decode from which a longer context counts as fast; people read half as fast
MAX_POOL_SHARE = 0.5  # most of the CPU memory for the KV of a context that the user has not asked for
MIN_HINT_GAIN = 1.2  # in decode, for an option that the user is told about
MIN_HEAD_GAIN = 1.1  # in the time of a request, for a quantized output head, which changes results
ANSWER_TOKENS = 500  # plans are compared by the time of an answer of this length to a prompt of the whole context


# -- the time of a request ---------------------------------------------------------------------------------------------


def link_prefill_tok_per_s(plan: CapacityPlan) -> float | None:
    """Return the bound of prefill that the link sets, for prompts that run one after the other: for each chunk, all
    experts in CPU memory and all earlier blocks that are not resident cross the link.
    """
    byte_per_s = _link_byte_per_s(plan)
    if not byte_per_s:
        return None
    num_bytes = sum(prefill_expert_bytes(plan.config, plan.model, len(chunk)) for chunk in _chunks(plan))
    if plan.config.enable_cpu_offload:
        num_loaded = num_prefill_loaded_blocks(
            plan.context, plan.spec.block_size, plan.num_gpu_blocks, plan.config.max_num_batched_tokens
        )
        num_bytes += num_loaded * plan.spec.block_bytes
    return plan.context * byte_per_s / num_bytes if num_bytes else None


def expert_prefill_tok_per_s(plan: CapacityPlan) -> float | None:
    """Return the bound of prefill with experts in CPU memory, or None if there are none: while a chunk is computed,
    the experts of its layers cross the link.
    """
    byte_per_s, flop_per_s = _link_byte_per_s(plan), plan.machine.flop_per_s
    if not (plan.model.has_cpu_experts and byte_per_s and flop_per_s):
        return None
    seconds = done_flop = 0.0
    for chunk in _chunks(plan):
        flop = prefill_flop(plan.config, plan.model, chunk.stop, plan.machine.capability)
        link_s = prefill_expert_bytes(plan.config, plan.model, len(chunk)) / byte_per_s
        seconds += max(link_s, (flop - done_flop) / flop_per_s)
        done_flop = flop
    return plan.context / seconds


def _link_byte_per_s(plan: CapacityPlan) -> float | None:
    """Return the rate at which a GPU reads CPU memory, or None on a CPU."""
    if plan.machine.gpu_bytes is None:
        return None
    return least(plan.machine.link_byte_per_s, plan.cpu_byte_per_s)


def _chunks(plan: CapacityPlan) -> Iterator[range]:
    """Yield the positions of the chunks of a prompt, if experts cross the link for each."""
    step = plan.config.max_num_batched_tokens
    if plan.model.has_cpu_experts:
        yield from (range(start, min(start + step, plan.context)) for start in range(0, plan.context, step))


def flop_prefill_tok_per_s(plan: CapacityPlan) -> float | None:
    """Return the bound of prefill that the GPU's arithmetic sets."""
    if not plan.machine.flop_per_s:
        return None
    flop = prefill_flop(plan.config, plan.model, plan.context, plan.machine.capability)
    return plan.context * plan.machine.flop_per_s / flop


def prefill_tok_per_s(plan: CapacityPlan) -> float | None:
    """Return the lowest bound of prefill, or None if no bound is known."""
    return least(link_prefill_tok_per_s(plan), flop_prefill_tok_per_s(plan), expert_prefill_tok_per_s(plan))


def first_token_s(plan: CapacityPlan) -> float | None:
    """Return the least time to the first token after a prompt of `context` tokens, or None if no bound is known."""
    rate = prefill_tok_per_s(plan)
    return plan.context / rate if rate else None


def request_s(plan: CapacityPlan) -> float:
    """Return the least time of a request with a prompt of `context` tokens and an answer of ANSWER_TOKENS. A part
    without a known bound counts as 0.
    """
    num_tokens = plan.num_sequences * ANSWER_TOKENS
    return (first_token_s(plan) or 0.0) + num_tokens / (plan.expected_decode_tok_per_s or float("inf"))


# -- the settings of one model and context -----------------------------------------------------------------------------


def is_resident(plan: CapacityPlan) -> bool:
    """Return True if all KV and all experts are on the GPU."""
    return not (plan.config.enable_cpu_offload or plan.model.has_cpu_experts)


def _is_as_fast(plan: CapacityPlan, fastest: CapacityPlan) -> bool:
    """Return True if a request, and decode alone, is as fast as with the fastest plan, within TOLERANCE."""
    slowest_rate = (fastest.expected_decode_tok_per_s or 0.0) / TOLERANCE
    is_as_fast = request_s(plan) <= TOLERANCE * request_s(fastest)
    return is_as_fast and (plan.expected_decode_tok_per_s or 0.0) >= slowest_rate


def _places(changes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the options that say where KV and experts may be."""
    return changes.get("enable_cpu_offload"), changes.get("enable_expert_offload")


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What the user has asked for, and the machine for it."""

    config: Config
    given: Collection[str]  # options of `config` that never change
    machine: Machine
    num_sequences: int = 1
    staging: StagingSizes = StagingSizes()

    def plan(self, model: ModelConfig, context: int, changes: Mapping[str, Any]) -> CapacityPlan:
        """Return the plan with the changes. Raises ConfigError if the options contradict each other."""
        head = HEAD_FORMAT if model.head_quantization else None
        config = replace(self.config, quantize_head=head, **changes)
        return make_plan(
            *(config, model, self.machine),
            context=context,
            num_sequences=self.num_sequences,
            staging=self.staging,
        )

    def all_changes(self, model: ModelConfig, context: int) -> list[dict[str, Any]]:
        """List the changes to try for a context, the least different from the defaults first."""
        always: dict[str, Any] = {} if context == model.max_model_len_limit else {"max_model_len": context}
        wanted = [always | settings for settings in SETTINGS]
        if model.experts is not None:  # a copy of the KV in few bits may be faster than experts in CPU memory
            all_on_gpu = [each | {"enable_expert_offload": False} for each in wanted if each["enable_cpu_offload"]]
            wanted = [each | {"enable_expert_offload": None} for each in wanted] + all_on_gpu
        found: list[dict[str, Any]] = []
        for each in wanted:
            changes = {name: value for name, value in each.items() if name not in self.given}
            if changes not in found:
                found.append(changes)
        return found

    def working_plans(self, model: ModelConfig, context: int) -> list[CapacityPlan]:
        """List the plans that work, or only the first that has everything on the GPU. If the smallest sizes do not fit
        with KV and experts in certain places, no other sizes do.
        """
        working: list[CapacityPlan] = []
        for _, same_places in groupby(self.all_changes(model, context), key=_places):
            alike = list(same_places)
            if not any(self._fits_gpu(model, context, changes) for changes in alike[-2:]):  # the smallest sizes
                continue
            for changes in alike:
                with suppress(ConfigError):
                    if can_work(plan := self.plan(model, context, changes)):
                        if is_resident(plan):
                            return [plan]
                        working.append(plan)
        return working

    def _fits_gpu(self, model: ModelConfig, context: int, changes: Mapping[str, Any]) -> bool:
        with suppress(ConfigError):
            return self.plan(model, context, changes).fits_gpu
        return False

    def best_plan(self, model: ModelConfig, context: int, *, with_head: bool = False) -> CapacityPlan | None:
        """Return the plan with the least changes that is as fast as the fastest, within TOLERANCE, or None if nothing
        works.

        with_head: if KV is missing on the GPU, quantize the output head where only that lets the context run, or makes
        a request MIN_HEAD_GAIN as fast.
        """
        plans = self.working_plans(model, context)
        fastest = min(plans, key=request_s, default=None)
        is_open = with_head and "quantize_head" not in self.given and model.gguf_head_type is None
        if is_open and (fastest is None or fastest.num_missing_blocks):
            others = self.working_plans(model.quantized(None, HEAD_FORMAT), context)
            other = min(others, key=request_s, default=None)
            if other is not None and (fastest is None or request_s(other) * MIN_HEAD_GAIN <= request_s(fastest)):
                plans, fastest = others, other
        return next((plan for plan in plans if fastest is not None and _is_as_fast(plan, fastest)), None)

    def most_frugal(self, model: ModelConfig, context: int) -> Config:
        """Return the options that take the least memory of the GPU, or the defaults if that memory is not the problem,
        or if the given options forbid all others.
        """
        changes = self.all_changes(model, context)
        with suppress(ConfigError):
            if not self.plan(model, context, changes[0]).fits_gpu:
                last = changes[-1] | ({"enable_expert_offload": None} if "enable_expert_offload" in changes[-1] else {})
                return self.plan(model, context, last).config
        return replace(self.config, **changes[0])

    def best_format(self, stored: ModelConfig, formats: Iterable[str | None], context: int) -> str | None:
        """Return the format with the most bits that has everything on the GPU, or else the fastest, or None for the
        checkpoint's. formats: most bits first.
        """
        seconds: dict[str | None, float] = {}
        for name in formats:
            plan = self.best_plan(
                stored.quantized(name, self.config.quantize_head, self.config.tensor_parallel_size),
                context,
                with_head=True,
            )
            if plan is not None and is_resident(plan):
                return name
            if plan is not None:
                seconds[name] = request_s(plan)
        return min(seconds, key=seconds.__getitem__, default=None)


# -- the choice for an engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChosenOptions:
    """The options of an engine. If no choice works, they are the options that take the least memory."""

    config: Config
    model: ModelConfig  # quantized as `config` says
    plan: CapacityPlan | None = None  # of the choice, for its context; None if nothing was to be chosen or works
    text: str = ""  # what was chosen and why, in one line; empty if nothing was to be chosen


def choose(
    config: Config,
    given: Iterable[str],
    stored: ModelConfig,
    machine: Machine,
    *,
    context: int | None = None,
    least_context: int = 0,
    num_sequences: int = 1,
    staging: StagingSizes = StagingSizes(),
) -> ChosenOptions:
    """Choose the options of `config` that the user has not given. With fit=None the format of the weights stays, with
    fit=True it may be one of WEIGHTS_ALONE; on a CPU and with fit=False nothing changes.

    The context is `context`, or else max_model_len. If both are open, it is the model's longest context or, if that is
    slower than FAST_TOK_PER_S or its KV takes more than MAX_POOL_SHARE of the CPU memory, the longest power of two for
    which neither is so, but at least `least_context`.

    stored: the model without the quantization of the options. Raises ConfigError as `ModelConfig.quantized` does.
    """
    as_given = stored.quantized(config.quantization, config.quantize_head, config.tensor_parallel_size)
    limit, asked = stored.max_model_len_limit, context or config.max_model_len
    if config.fit is False or machine.gpu_bytes is None or (asked or 0) > limit:
        return ChosenOptions(config=config, model=as_given)
    known = {name for name in given if getattr(config, name, None) is not None}
    wish = _Wish(config=config, given=known, machine=machine, num_sequences=num_sequences, staging=staging)
    contexts = [asked] if asked else [limit, *_shorter(limit)]
    if not asked and least_context > MIN_CONTEXT:
        least_context = min(least_context, limit)
        contexts = [*(tokens for tokens in contexts if tokens > least_context), least_context]
    is_open = config.quantization is None and stored.quantization is None and not stored.gguf_types
    if config.fit and is_open:
        name = wish.best_format(stored, (None, *WEIGHTS_ALONE), asked or min(limit, USUAL_CONTEXT))
        wish = replace(wish, config=replace(config, quantization=name))
    model = stored.quantized(wish.config.quantization, config.quantize_head, config.tensor_parallel_size)
    plan: CapacityPlan | None = None
    for tokens in contexts:
        if plan is not None and tokens < USUAL_CONTEXT:
            break
        plan = wish.best_plan(model, tokens, with_head=bool(config.fit)) or plan
        if plan is not None and _is_fast(plan):
            break
    if plan is None:
        return ChosenOptions(config=wish.most_frugal(model, contexts[0]), model=model)
    hints = _hints(wish, stored, plan, is_open and not config.fit)
    model = stored.quantized(plan.config.quantization, plan.config.quantize_head, plan.config.tensor_parallel_size)
    return ChosenOptions(config=plan.config, model=model, plan=plan, text=_describe(config, plan, bool(asked), hints))


def fit_remedy(
    config: Config,
    given: Iterable[str],
    stored: ModelConfig,
    machine: Machine,
    *,
    staging: StagingSizes = StagingSizes(),
) -> str:
    """Return the end of a refusal, which names fit=True if `choose` then finds a format of the weights that fits, or
    "". Options that the user has given are not named. The arguments are the same as in `choose`.
    """
    if config.fit or config.quantization is not None or (config.fit is False and "fit" in given):
        return ""
    chosen = choose(replace(config, fit=True), given, stored, machine, staging=staging)
    format = chosen.config.quantization
    return f", or use fit=True, which chooses quantization={format}" if chosen.plan and format else ""


def _is_fast(plan: CapacityPlan) -> bool:
    """Return True if the plan's context may be chosen for a user who names none."""
    is_small = plan.cpu_pool_bytes <= MAX_POOL_SHARE * plan.machine.host_bytes
    return is_resident(plan) or (is_small and (plan.expected_decode_tok_per_s or 0.0) >= FAST_TOK_PER_S)


def _shorter(limit: int) -> Iterator[int]:
    """Yield the powers of two that are chosen as a context, if they are less than `limit`, the longest first."""
    context = 1 << (limit - 1).bit_length() - 1
    while context >= MIN_CONTEXT:
        yield context
        context //= 2


def _describe(before: Config, plan: CapacityPlan, is_asked: bool, hints: list[str]) -> str:
    """Say in one line what was chosen, why, and what would be faster."""
    now, context = plan.config, plan.context
    names = ("quantization", "quantize_head", "max_model_len", *SETTINGS[-1])
    chosen = [f"{name}={getattr(now, name)}" for name in names if getattr(now, name) != getattr(before, name)]
    if is_resident(plan):
        why = f"the GPU has room for the model and the KV of {context:,} tokens"
    else:
        num_tokens = min(plan.num_gpu_blocks * plan.spec.block_size, context)
        parts = [f"the KV of {num_tokens:,} of {context:,} tokens"]
        if plan.model.has_cpu_experts and plan.model.experts is not None:
            parts.append(f"the experts of {plan.num_gpu_expert_layers} of {len(plan.model.experts.layers)} layers")
        why = f"the GPU has room for {' and '.join(parts)}"
    if not is_asked and context < plan.model.max_model_len_limit:
        why += (
            f", and a longer context takes over half of the CPU memory or decodes at less than {FAST_TOK_PER_S:g} tok/s"
        )
    rate = plan.expected_decode_tok_per_s
    bound = f"; decode at most {rate:,.1f} tok/s" if rate else ""
    faster = f"; faster: {', or '.join(hints)}" if hints else ""
    return f"chose {' '.join(chosen) or 'the defaults'}, because {why}{bound}{faster}"


def _hints(wish: _Wish, stored: ModelConfig, plan: CapacityPlan, with_formats: bool) -> list[str]:
    """Name what would decode MIN_HINT_GAIN as fast: another format, and a shorter context that fits the GPU."""
    rate, hints = plan.expected_decode_tok_per_s, []
    if rate is None or is_resident(plan):
        return []
    if with_formats and (name := wish.best_format(stored, WEIGHTS_ALONE, plan.context)) is not None:
        other = wish.best_plan(
            stored.quantized(name, wish.config.quantize_head, wish.config.tensor_parallel_size), plan.context
        )
        if other is not None and (other.expected_decode_tok_per_s or 0.0) >= MIN_HINT_GAIN * rate:
            hints.append(f"quantization={name} ({other.expected_decode_tok_per_s:,.1f} tok/s; fit=True chooses it)")
    model = stored.quantized(plan.config.quantization, plan.config.quantize_head, plan.config.tensor_parallel_size)
    shorter = replace(wish, given={*wish.given} - {"max_model_len"})
    for tokens in _shorter(plan.context):
        other = shorter.best_plan(model, tokens)
        if other is not None and is_resident(other):
            faster = other.expected_decode_tok_per_s or 0.0
            hints += [f"max_model_len={tokens} ({faster:,.1f} tok/s)"] if faster >= MIN_HINT_GAIN * rate else []
            break
    return hints


# -- everything that runs on a GPU -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model that runs. format: the format of the model's linear weights. The output head is quantized if
    `plan.model` has it so.
    """

    model: str
    format: str
    plan: CapacityPlan

    @property
    def is_resident(self) -> bool:
        return is_resident(self.plan)

    @property
    def where(self) -> str:
        names = {"offload": self.plan.config.enable_cpu_offload, "experts": self.plan.model.has_cpu_experts}
        return ", ".join(name for name, is_on_cpu in names.items() if is_on_cpu) or "GPU"

    @property
    def kv_bytes(self) -> int:
        """The size of the KV cache of one context, in whole blocks."""
        spec = self.plan.spec
        return ceil_div(self.plan.context, spec.block_size) * spec.block_bytes


def fits(
    machine: Machine, models: Iterable[str] = (), quantization: str | None = None, context: int | None = None
) -> list[Fit]:
    """List everything that runs on `machine`. `models`, `quantization` and `context` limit the list. By default, the
    list has all presets, the checkpoint's format and all of QUANTIZATIONS but int8, and each of CONTEXTS that the model
    supports, or the model's longest context if that is shorter than all of CONTEXTS. With `quantization`, presets that
    are quantized already are left out.

    Raises ConfigError if one of `models` does not take `context` or `quantization`, and if the GPU does not.
    """
    return list(each_fit(machine, models, quantization, context))


def each_fit(
    machine: Machine, models: Iterable[str] = (), quantization: str | None = None, context: int | None = None
) -> Iterator[Fit]:
    """Yield what `fits` lists, the checkpoint's format before the others. The search goes on with the next call, and
    raises the errors.
    """
    named = tuple(models)
    if quantization is not None and (problem := fp8_problem(machine, QUANTIZATIONS[quantization])):
        raise ConfigError(problem)
    for name in named or presets():
        stored = config_without_weights(name)
        if quantization is not None and stored.quantization is not None and not named:
            continue
        wish = _Wish(config=Config(model=name), given=(), machine=machine)
        longest = max(stored.max_model_len_limit, _recommended_context(stored))
        if named and context is not None and context > longest:
            raise ConfigError(f"context={context} is more than the {longest} tokens that {name} takes; lower it")
        contexts = [tokens for tokens in CONTEXTS if tokens <= longest] or [longest]
        own = stored.quantization.method if stored.quantization else dtype_name(Config(model=name), stored)
        formats = {own: stored} if quantization is None else {quantization: stored.quantized(quantization)}
        if quantization is None and not (stored.quantization or stored.gguf_types):
            formats |= {each: stored.quantized(each) for each in (*WEIGHTS_ALONE, "fp8_dynamic")}
        for format, model in formats.items():
            for tokens in contexts if context is None else [context]:
                if model.max_model_len_limit < tokens:  # the rope changes neither memory nor speed
                    model = replace(model, max_position_embeddings=tokens)
                if (plan := wish.best_plan(model, tokens, with_head=True)) is not None:
                    yield Fit(model=name, format=format, plan=plan)


def _recommended_context(model: ModelConfig) -> int:
    """Return the longest context that the model's authors recommend with YaRN, or 0 without a recommendation."""
    _, recommended = ARCHITECTURES[model.architecture].recommended_yarn.get(model.max_position_embeddings, (0, 0))
    return recommended
