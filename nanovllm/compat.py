"""vLLM's names: which of them mean the same here, which change nothing, and what to use instead of the others.

`LLM`, `SamplingParams` and `StructuredOutputs` pass what the user gave to `translated`. A name that is neither ours nor
in these tables is refused with the nearest names.
"""

import difflib
import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from nanovllm.utils.options import shown

Kind = TypeVar("Kind", bound=type)


class Refused(NamedTuple):
    """A name without a counterpart. instead: what the user can do. harmless: values that change nothing, with None."""

    instead: str
    harmless: tuple[Any, ...] = ()


class Names(NamedTuple):
    """vLLM's names of one class. same: vLLM's name -> our name. values: our name -> vLLM's value -> our value.
    ignored: names whose values change nothing here.
    """

    same: Mapping[str, str]
    values: Mapping[str, Mapping[Any, Any]]
    ignored: frozenset[str]
    refused: Mapping[str, Refused]


_TEXT_ONLY = "the models here read and write text"
_HUB = "download that snapshot (`hf download`) and give its directory as model"
_ROPE = 'use hf_overrides={"rope_parameters": {...}}'
_FROM_DIRECTORY = (
    "the tokenizer comes with the model, from its directory or GGUF file; leave it out, or use "
    "skip_tokenizer_init=True and token ids"
)

ENGINE = Names(
    same={
        "attention_backend": "attn_backend",
        "block_size": "kvcache_block_size",
        "enable_chunked_prefill": "chunked_prefill",
        "num_gpu_blocks_override": "num_kvcache_blocks",
    },
    values={
        "attn_backend": {"FLASH_ATTN": "flash", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch", None: "auto"},
        "chunked_prefill": {None: True},
        "dtype": {"half": "float16", "float": "float32"},
        "enable_prefix_caching": {None: True},
        "generation_config": {"vllm": "none"},
        "max_num_batched_tokens": {None: 16384},
        "max_num_seqs": {None: 512},
        "num_kvcache_blocks": {None: -1},
        "seed": {None: 0},
    },
    # How vLLM compiles, logs, schedules or copies; models whose code is in the checkpoint do not run here at all
    ignored=frozenset(
        "async_scheduling allowed_local_media_path compilation_config cuda_graph_sizes cudagraph_capture_sizes "
        "disable_async_output_proc disable_cascade_attn disable_custom_all_reduce disable_hybrid_kv_cache_manager "
        "disable_log_requests disable_log_stats enable_log_requests guided_decoding_backend limit_mm_per_prompt "
        "max_context_len_to_capture max_parallel_loading_workers max_seq_len_to_capture mm_processor_cache_gb "
        "optimization_level prefix_caching_hash_algo preemption_mode safetensors_load_strategy served_model_name "
        "show_hidden_metrics_for_version structured_outputs_config swap_space trust_remote_code use_tqdm_on_load "
        "use_v2_block_manager".split()
    ),
    refused={
        "code_revision": Refused("no code of a checkpoint is run", ("main",)),
        "config_format": Refused("the model's directory needs a config.json", ("auto", "hf")),
        "convert": Refused(_TEXT_ONLY, ("auto", "none")),
        "cpu_offload_gb": Refused(
            "use enable_cpu_offload=True to keep the KV cache in CPU memory, or enable_expert_offload=True for the "
            "experts of a mixture",
            (0,),
        ),
        "data_parallel_size": Refused("use `nanovllm serve --num-replicas` or `nanovllm batch`", (1,)),
        "distributed_executor_backend": Refused("ranks are processes of this machine", ("mp", "uni")),
        "download_dir": Refused("set the environment variable HF_HUB_CACHE"),
        "enable_expert_parallel": Refused("tensor_parallel_size splits the experts, too", (False,)),
        "enable_lora": Refused("merge the adapter into the model's weights first", (False,)),
        "enable_prompt_embeds": Refused("give text or token ids", (False,)),
        "enable_sleep_mode": Refused("use close(), and make a new LLM", (False,)),
        "hf_config_path": Refused("put the config.json into the model's directory, or use hf_overrides"),
        "hf_token": Refused("set the environment variable HF_TOKEN", (False,)),
        "kv_cache_dtype": Refused(
            "the KV cache has the type of the weights (dtype); use enable_cpu_offload=True for more room", ("auto",)
        ),
        "kv_cache_memory_bytes": Refused("use gpu_memory_utilization or num_kvcache_blocks"),
        "kv_offloading_size": Refused("use enable_cpu_offload=True with cpu_memory_gb"),
        "kv_transfer_config": Refused("use enable_cpu_offload=True, or kv_disk_path to keep the KV in files"),
        "logits_processors": Refused("use logit_bias, bad_words or structured_outputs of SamplingParams", ([], ())),
        "logprobs_mode": Refused("log-probabilities are the model's own", ("raw_logprobs",)),
        "max_logprobs": Refused("logprobs=20 is the most", tuple(range(21))),
        "max_lora_rank": Refused("merge the adapter into the model's weights first", (16,)),
        "max_loras": Refused("merge the adapter into the model's weights first", (1,)),
        "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
        "model_impl": Refused("every model runs in this engine's own layers", ("auto", "vllm")),
        "num_scheduler_steps": Refused("leave it out", (1,)),
        "override_generation_config": Refused("give SamplingParams the values", ({},)),
        "pipeline_parallel_size": Refused("use tensor_parallel_size", (1,)),
        "profiler_config": Refused("use torch.profiler"),
        "reasoning_parser": Refused("use reasoning_tags of SamplingParams", ("",)),
        "revision": Refused(_HUB, ("main",)),
        "rope_scaling": Refused(_ROPE, ({},)),
        "rope_theta": Refused(_ROPE),
        "runner": Refused(_TEXT_ONLY, ("auto", "generate")),
        "scheduling_policy": Refused("requests run in the order of their arrival", ("fcfs",)),
        "speculative_config": Refused("use speculation, such as 'prompt_lookup' or 'mtp', and num_speculative_tokens"),
        "speculative_model": Refused("use speculation, such as 'prompt_lookup' or 'mtp'"),
        "task": Refused(_TEXT_ONLY, ("auto", "generate")),
        "tokenizer": Refused(_FROM_DIRECTORY),  # the model's own name changes nothing
        "tokenizer_mode": Refused("the tokenizer is the tokenizer.json of the model's directory", ("auto", "hf")),
        "tokenizer_revision": Refused(_FROM_DIRECTORY, ("main",)),
        "worker_use_ray": Refused("ranks are processes of this machine", (False,)),
    },
)

SAMPLING = Names(
    same={"guided_decoding": "structured_outputs"},
    values={},
    ignored=frozenset({"skip_clone"}),
    refused={
        "allowed_token_ids": Refused("use logit_bias, or structured_outputs with choice or regex"),
        "best_of": Refused("use n and choose by cumulative_logprob", (1,)),
        "early_stopping": Refused("there is no beam search; use n", (False,)),
        "extra_args": Refused("nothing reads them", ({},)),
        "flat_logprobs": Refused("logprobs are a list of dicts", (False,)),
        "length_penalty": Refused("there is no beam search; use n", (1.0,)),
        "logits_processors": Refused("use logit_bias, bad_words or structured_outputs", ([], ())),
        "spaces_between_special_tokens": Refused("special tokens are written as the tokenizer writes them", (True,)),
        "thinking_token_budget": Refused("use max_tokens"),
        "truncate_prompt_tokens": Refused("give the prompt's last token ids as the prompt"),
        "use_beam_search": Refused("there is no beam search; use n", (False,)),
    },
)

STRUCTURED = Names(
    same={},
    values={},
    ignored=frozenset({"backend", "disable_fallback"}),
    refused={
        "disable_additional_properties": Refused('put "additionalProperties": false into the schema', (False,)),
        "disable_any_whitespace": Refused("use regex", (False,)),
        "grammar": Refused("use regex, json or choice"),
        "structural_tag": Refused("use tagged_json"),
        "whitespace_pattern": Refused("use regex"),
    },
)

CALL = Names(  # arguments of LLM.generate and LLM.chat
    same={},
    values={},
    ignored=frozenset({"arrival_time", "chat_template_content_format", "trace_headers"}),
    refused={
        "enable_thinking": Refused('use chat_template_kwargs={"enable_thinking": ...}'),
        "guided_options_request": Refused("use structured_outputs of SamplingParams"),
        "inputs": Refused("give prompts"),
        "lora_request": Refused("merge the adapter into the model's weights first"),
        "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
        "priority": Refused("requests run in the order of their arrival", ([], 0)),
        "prompt_adapter_request": Refused("no adapters are applied"),
        "prompt_token_ids": Refused('give prompts=[{"prompt_token_ids": ids}]'),
        "tokenization_kwargs": Refused("give token ids", ({},)),
    },
)

_NO_POOLING = "the models here generate text; there are no embeddings and no scores"
METHODS: Mapping[str, str] = {  # methods and attributes of vLLM's LLM and AsyncLLM
    "apply_model": "`runner.model` is rank 0's model",
    "beam_search": "use generate with n",
    "classify": _NO_POOLING,
    "collective_rpc": "ranks take no calls from outside",
    "embed": _NO_POOLING,
    "encode": f"{_NO_POOLING}; for token ids use get_tokenizer().encode",
    "get_metrics": "use stats()",
    "llm_engine": "LLM itself has add_request, step and abort, and LLMEngine has vLLM's methods",
    "pause_generation": "stop making requests, or abort them",
    "preprocess_chat": "use chat_token_ids",
    "renderer": "use get_tokenizer() or chat_token_ids",
    "reward": _NO_POOLING,
    "score": _NO_POOLING,
    "set_tokenizer": _FROM_DIRECTORY,
    "sleep": "use close(), and make a new LLM",
    "start_profile": "use torch.profiler",
    "stop_profile": "use torch.profiler",
    "wake_up": "make a new LLM",
}
IMPORTS: Mapping[str, str] = {  # what scripts import from vllm
    "AsyncLLMEngine": "use AsyncLLM",
    "BeamSearchParams": METHODS["beam_search"],
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Vector"), METHODS["get_metrics"]),
    "LoRARequest": CALL.refused["lora_request"].instead,
    "LogitsProcessor": SAMPLING.refused["logits_processors"].instead,
    "PoolingParams": _NO_POOLING,
    "VllmConfig": "use Config of nanovllm.config",
    "destroy_distributed_environment": "use close()",
    "destroy_model_parallel": "use close()",
    "parse_model_prompt": "give the text or the token ids to generate",
    "print_embeddings": _NO_POOLING,
}


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Release the memory of engines that were dropped without `close`."""
    gc.collect()


def translated(
    given: Mapping[str, Any], ours: Collection[str], names: Names, error: type[Exception], owner: str
) -> dict[str, Any]:
    """Return the arguments with our names, without the arguments that change nothing. Raises `error` for the others.

    ours: our names. owner: the class, for messages.
    """
    found: dict[str, Any] = {}
    for given_name, given_value in given.items():
        if given_name in names.ignored:
            continue
        name = names.same.get(given_name, given_name)
        if name in ours:
            if name in found or (name != given_name and name in given):
                raise error(f"{owner} got {name} and {given_name}, which mean the same; give one of them")
            found[name] = _value(given_value, names.values.get(name, {}))
        elif name in names.refused:
            refused = names.refused[name]
            if given_value is not None and not _is_one_of(given_value, refused.harmless):
                raise error(f"{owner} does not take {name}={shown(given_value)}: {refused.instead}")
        else:
            known = sorted({*ours, *names.same, *names.refused})
            nearest = difflib.get_close_matches(name, known, 3, 0.7)
            remedy = f"did you mean {' or '.join(nearest)}?" if nearest else f"it has {', '.join(sorted(ours))}"
            raise error(f"{owner} has no option {name}; {remedy if nearest or ours else 'leave it out'}")
    return found


def _value(value: Any, values: Mapping[Any, Any]) -> Any:
    """Return our value for a value of vLLM."""
    return values.get(value, value) if value is None or isinstance(value, str) else value


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return True if the value is in `harmless`. A boolean equals no number, and an enum equals its value."""
    value = getattr(value, "value", value)
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


def takes(names: Names, error: type[Exception]) -> Callable[[Kind], Kind]:
    """Return a decorator that lets a frozen dataclass take vLLM's names as arguments."""

    def decorate(kind: Kind) -> Kind:
        changed: Any = kind
        make, ours = changed.__init__, frozenset(changed.__dataclass_fields__)

        @wraps(make)
        def init(self: Any, **given: Any) -> None:
            if not given.keys() <= ours:
                given = translated(given, ours, names, error, kind.__name__)
            make(self, **given)

        def refuse_change(self: Any, name: str, value: Any) -> None:
            raise FrozenInstanceError(f"{kind.__name__} cannot be changed; use dataclasses.replace(..., {name}=...)")

        changed.__init__, changed.__setattr__ = init, refuse_change
        return kind

    return decorate


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error about a missing attribute, with the remedy for a method of vLLM."""
    remedy = f"; {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{remedy}")
