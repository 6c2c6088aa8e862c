"""Config: the engine's options as the user gave them. The options are checked when the Config is made."""

import re
from dataclasses import dataclass
from typing import TypedDict

from nanovllm.checkpoint.model_config import DTYPES
from nanovllm.checkpoint.quantization import HEAD_QUANTIZATIONS, QUANTIZATIONS
from nanovllm.checkpoint.settings import ENTRIES, check_overrides
from nanovllm.errors import ConfigError
from nanovllm.sampling_params import MAX_SEED, MIN_SEED
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.options import check_options, documented, option

BLOCK_SIZE_STEP = 256  # block sizes are multiples of this; with offload, it is also the grain of prefix hits
DEFAULT_BLOCK_SIZE = 256
GIVEN_SLOTS_BLOCK_SIZE = 4096
SPECULATION = ("off", "prompt_lookup", "resident", "shadow", "mtp", "auto")
MAX_GUESSES = 63
# Left free on top of the measured memory, for cuBLAS workspaces of more threads and gaps in the allocator's segments
GPU_RESERVE_BYTES = 128 * 2**20
DEFAULT_GUESSES = 15  # with 15 draft tokens, the queries of a sequence fill one tile of the decode kernels
ATTENTION_BACKENDS = ("flash", "cudnn", "triton", "torch")

_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")
_MAX_CPU_MEMORY_GB = 2**30  # one EiB
_MAX_STEP_MS = 3_600_000  # an hour
_MODEL, _KV_CACHE, _DISK = "model and device", "KV cache", "KV on disk"  # groups
_OFFLOAD, _SCHEDULING = "CPU offload", "scheduling"
DEFAULT_DISK_GB = 64.0
_MAX_DISK_GB = 2**30


@documented()
@dataclass(frozen=True, kw_only=True)
class Config:
    """The engine's options.

    An invalid value, or options that contradict each other, raise ConfigError. The message names the value, the limit
    and the remedy.
    """

    model: str = option(
        help="local directory, GGUF file, hub name (owner/name, owner/name:Q4_K_M), demo (the built-in model), or a "
        "preset, such as qwen3-0.6b, with load_format=dummy",
        group=_MODEL,
    )
    device: str = option("auto", help="cpu, cuda or cuda:N; auto: the GPU if there is one", group=_MODEL)
    dtype: str = option(
        "auto",
        help=f"type of the weights and the KV cache: {', '.join(DTYPES)}; auto: the checkpoint's, or "
        "bfloat16 if the checkpoint has float16 and the model's activations exceed it",
        group=_MODEL,
        choices=("auto", *DTYPES),
    )
    load_format: str = option(
        "auto",
        help="auto: the model's files; safetensors: refuse a model in GGUF; dummy: random weights from a config alone",
        group=_MODEL,
        choices=("auto", "safetensors", "dummy"),
    )
    fit: bool | None = option(
        False,
        help="choose the options that are not given, so that the model and its context fit the GPU and are fast: "
        "enable_cpu_offload, max_model_len, max_num_batched_tokens, max_num_seqs and gpu_memory_utilization; "
        "fit=True: also quantization and quantize_head, which change results; fit=False: choose nothing. serve, chat "
        "and generate choose all but these two by default (in Python, None)",
        group=_MODEL,
    )
    quantization: str | None = option(
        None,
        help=f"quantize linear layers while they are loaded: {', '.join(QUANTIZATIONS)}; by default they stay as the "
        "checkpoint has them. On a GPU int8 takes half of the memory of 16 bits, int4 three tenths. fp8_dynamic "
        "quantizes activations, too, in products of many rows",
        group=_MODEL,
        choices=tuple(QUANTIZATIONS),
    )
    quantize_head: str | None = option(
        None,
        help=f"quantize the output head while it is loaded, if the checkpoint has it in 16 or 32 bits: "
        f"{', '.join(HEAD_QUANTIZATIONS)}; by default it stays as it is. On a GPU it takes about half of the memory of "
        "16 bits",
        group=_MODEL,
        choices=tuple(HEAD_QUANTIZATIONS),
    )
    embedding_on_cpu: bool | str = option(
        "auto",
        help="keep the embedding table in pinned CPU memory, from which the GPU reads the rows that it needs: True, "
        "False, or auto: where otherwise less than one sequence of max_model_len would fit the GPU. If the output head "
        "uses the same table, it must be quantized (quantize_head). On a CPU nothing changes",
        group=_MODEL,
        choices=(True, False, "auto"),
    )
    hf_overrides: dict | None = option(
        None,
        help="entries that replace entries of the model's config.json, such as a different rope; "
        "a JSON object on the command line",
        group=_MODEL,
    )
    attn_backend: str = option(
        "auto",
        help=f"attention kernels: {', '.join(ATTENTION_BACKENDS)}; auto: the fastest that can run. "
        "On a GPU, torch needs enforce_eager",
        group=_MODEL,
        choices=("auto", *ATTENTION_BACKENDS),
    )
    enforce_eager: bool = option(False, help="run without CUDA graphs", group=_MODEL)
    tensor_parallel_size: int = option(
        1, help="number of ranks that the model is split over, 1 to 8; one GPU per rank", group=_MODEL, least=1, most=8
    )
    generation_config: str = option(
        "auto",
        help="where chat and the command line take sampling defaults from; auto: the model's generation_config.json, "
        "none: SamplingParams",
        group=_MODEL,
        choices=("auto", "none"),
    )
    skip_tokenizer_init: bool = option(
        False,
        help="load no tokenizer, and work on token ids alone; without it, serve and batch refuse a model that has no "
        "tokenizer",
        group=_MODEL,
    )
    seed: int = option(
        0, help="seed for random weights and for requests that set no seed", group=_MODEL, least=MIN_SEED, most=MAX_SEED
    )

    max_model_len: int | None = option(
        None,
        help="maximum number of tokens in prompt and answer together; by default, the length that the model's rope "
        "covers",
        group=_KV_CACHE,
        least=1,
    )
    kvcache_block_size: int | None = option(
        None,
        help="tokens per block, a multiple of 256; by default 256, or 4096 if num_gpu_blocks is given",
        group=_KV_CACHE,
        least=1,
    )
    enable_prefix_caching: bool = option(
        True, help="reuse the KV of earlier prompts that begin with the same tokens", group=_KV_CACHE
    )
    gpu_memory_utilization: float = option(
        0.9, help="fraction of the GPU's memory that the engine may use", group=_KV_CACHE, above=0, most=1
    )
    num_kvcache_blocks: int = option(-1, help="blocks on the GPU without offload; -1: as many as fit", group=_KV_CACHE)

    kv_disk_path: str | None = option(
        None,
        help="folder that keeps the KV of prompts, so that it is not computed again after a restart or once it has "
        "left memory; several engines may share it; by default, none is kept",
        group=_DISK,
    )
    kv_disk_gb: float | None = option(
        None,
        help=f"most GiB below kv_disk_path, for all models together; what was used least recently goes first; by "
        f"default {DEFAULT_DISK_GB:g}",
        group=_DISK,
        above=0,
        most=_MAX_DISK_GB,
    )

    enable_cpu_offload: bool = option(
        False, help="keep all KV in pinned CPU memory, and some of its blocks in slots on the GPU", group=_OFFLOAD
    )
    num_gpu_blocks: int | None = option(
        None, help="slots on the GPU, 2 or more; by default, as many as fit", group=_OFFLOAD, least=2
    )
    num_cpu_blocks: int | None = option(
        None,
        help="blocks in CPU memory; by default, one per slot, but at least enough for two sequences of max_model_len, "
        "at most enough for those two plus max_num_seqs sequences of 1,024 tokens, and never more than 70% of the "
        "available memory",
        group=_OFFLOAD,
        least=1,
    )
    cpu_memory_gb: float | None = option(
        None,
        help="size of the blocks in CPU memory in GiB, instead of num_cpu_blocks",
        group=_OFFLOAD,
        above=0,
        most=_MAX_CPU_MEMORY_GB,
    )
    cpu_attention: str = option(
        "auto",
        help="let the CPU attend to blocks in its memory while others are streamed, in steps in which no sequence has "
        "more than 64 new tokens; auto: where that is faster; on: always to some blocks; off: never",
        group=_OFFLOAD,
        choices=("auto", "on", "off"),
    )
    cpu_attention_threads: int | None = option(
        None,
        help="CPU threads of each rank for cpu_attention and for experts in CPU memory; by default the rank's share of "
        "the available CPUs, less one or two for the threads that drive the GPU",
        group=_OFFLOAD,
        least=1,
    )
    enable_expert_offload: bool | None = option(
        False,
        help="keep experts of a mixture in pinned CPU memory, whole layers at a time: the CPU computes few tokens, and "
        "experts cross the link for many. serve, chat and generate do so by default (in Python, None) where otherwise "
        "less than one sequence of max_model_len would fit the GPU. On a CPU, experts stay in the checkpoint's format",
        group=_OFFLOAD,
    )
    num_gpu_expert_layers: int | None = option(
        None,
        help="layers whose experts stay on the GPU with enable_expert_offload; by default, as many as fit in addition "
        "to the KV of one sequence of max_model_len; on a CPU, none",
        group=_OFFLOAD,
        least=0,
    )
    gpu_expert_memory_gb: float | None = option(
        None,
        help="most GiB for experts on each GPU, instead of num_gpu_expert_layers",
        group=_OFFLOAD,
        least=0,
        most=_MAX_CPU_MEMORY_GB,
    )

    max_num_batched_tokens: int = option(
        16384, help="maximum new tokens in one step; a longer prompt is split into chunks", group=_SCHEDULING, least=1
    )
    max_num_seqs: int = option(512, help="maximum number of sequences that run at once", group=_SCHEDULING, least=1)
    chunked_prefill: bool = option(
        True, help="run chunks of prompts in the same steps as decodes; if off, prompts run first", group=_SCHEDULING
    )

    max_step_ms: float | None = option(
        None,
        help="longest step to aim for, in milliseconds: chunks of prompts are no longer than that, and chunks of long "
        "prompts are spread so that running answers keep their pace; without it, chunks are as long as "
        "max_num_batched_tokens allows, which gives the most tokens per second",
        group=_SCHEDULING,
        least=1,
        most=_MAX_STEP_MS,
    )

    speculation: str | None = option(
        None,
        help="draft the next tokens and verify all drafts in one step, which changes no token; prompt_lookup: what "
        "followed the same words before in prompt or answer; resident: the model over the keys on the GPU, with CPU "
        "offload; shadow: the model over a copy of the keys in 3 or 4 bits on the GPU; mtp: the checkpoint's draft "
        "head, where it has one; auto: prompt_lookup and mtp or, without a draft head and with CPU offload, "
        "shadow or else resident, whichever gains more; with CPU offload it uses mtp only where it takes a quarter of "
        "the memory for KV or less, and shadow only where its memory gains more than further slots would; off: never; "
        "by default, auto with CPU offload, else off",
        group=_SCHEDULING,
        choices=SPECULATION,
    )
    num_speculative_tokens: int | None = option(
        None,
        help=f"maximum draft tokens of a sequence in one step, 1 to {MAX_GUESSES}; fewer are used where that is "
        f"faster; by default {MAX_GUESSES} with a shadow, else {DEFAULT_GUESSES}",
        group=_SCHEDULING,
        least=1,
        most=MAX_GUESSES,
    )
    shadow_bits: int | None = option(
        None,
        help="bits of a number in the shadow, the copy of the KV that drafts read: 4 or 3; by default, 4 if they fit",
        group=_SCHEDULING,
        least=3,
        most=4,
    )
    shadow_memory_gb: float | None = option(
        None,
        help="most GiB for the shadow on each GPU; by default, what the slots of num_gpu_blocks leave, or half of what "
        "is free",
        group=_SCHEDULING,
        above=0,
        most=_MAX_CPU_MEMORY_GB,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if not self.model:
            raise ConfigError(
                "model='' must be a directory ('.' for the current one), a GGUF file, a hub name (owner/name) or a "
                "preset"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device={self.device!r} is unknown; choose auto, cpu, cuda or cuda:N, where N is 0 to 99"
            )
        if self.kvcache_block_size is not None and self.kvcache_block_size % BLOCK_SIZE_STEP:
            raise ConfigError(
                f"kvcache_block_size={self.kvcache_block_size} must be a multiple of {BLOCK_SIZE_STEP}; "
                f"try {ceil_div(self.kvcache_block_size, BLOCK_SIZE_STEP) * BLOCK_SIZE_STEP}"
            )
        if self.num_kvcache_blocks != -1 and self.num_kvcache_blocks < 1:
            raise ConfigError(
                f"num_kvcache_blocks={self.num_kvcache_blocks} must be 1 or more, or -1 for as many as fit"
            )
        if self.speculation == "resident" and not self.enable_cpu_offload:
            raise ConfigError(
                "speculation='resident' drafts by the keys on the GPU, which are all keys without CPU offload; "
                "use 'prompt_lookup' or 'auto', or add enable_cpu_offload=True"
            )
        if self.speculation == "mtp" and self.kv_disk_path is not None:
            raise ConfigError(
                "speculation='mtp' needs the draft head's own K and V, which kv_disk_path does not keep; leave it out, "
                "or use 'auto'"
            )
        for name in ("shadow_bits", "shadow_memory_gb"):
            if getattr(self, name) is not None and not self.wants_shadow:
                raise ConfigError(
                    f"{name} applies only to speculation='shadow' and, with CPU offload, to 'auto'; leave it out, or "
                    "set speculation"
                )
        if self.max_step_ms is not None and not self.chunked_prefill:
            raise ConfigError(
                "max_step_ms applies only to chunked prefill; leave it out, or leave out chunked_prefill=False"
            )
        self._check_disk()
        self._check_expert_offload()
        self._check_offload()
        for name in self.hf_overrides or {}:
            if name not in ENTRIES and name in self.__dataclass_fields__:
                raise ConfigError(f"hf_overrides names {name!r}, which is an option of the engine; give {name} itself")
        check_overrides(self.hf_overrides or {})

    def _check_disk(self) -> None:
        if self.kv_disk_path is None:
            if self.kv_disk_gb is not None:
                raise ConfigError(f"kv_disk_gb={self.kv_disk_gb:g} limits what is below kv_disk_path; add kv_disk_path")
        elif not self.kv_disk_path:
            raise ConfigError("kv_disk_path='' must be a folder ('.' for the current one)")
        elif not self.enable_prefix_caching:
            raise ConfigError(
                "kv_disk_path keeps what the prefix cache knows; leave it out, or leave out enable_prefix_caching=False"
            )

    @property
    def disk_bytes(self) -> int:
        """Most bytes below kv_disk_path, or 0 without kv_disk_path."""
        if self.kv_disk_path is None:
            return 0
        return int((DEFAULT_DISK_GB if self.kv_disk_gb is None else self.kv_disk_gb) * 2**30)

    def _check_expert_offload(self) -> None:
        names = "num_gpu_expert_layers", "gpu_expert_memory_gb"
        given = [name for name in names if getattr(self, name) is not None]
        if given and not self.enable_expert_offload:
            raise ConfigError(f"{given[0]} applies only to experts in CPU memory; add enable_expert_offload=True")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(names)} both limit the experts on the GPU; give one of them")

    def _check_offload(self) -> None:
        if self.cpu_attention_threads is not None and not self.enable_expert_offload:
            if not self.enable_cpu_offload:
                raise ConfigError(
                    "cpu_attention_threads applies only to CPU offload and to experts in CPU memory; add "
                    "enable_cpu_offload=True or enable_expert_offload=True"
                )
            if self.cpu_attention == "off":
                raise ConfigError(
                    "cpu_attention_threads has no effect with cpu_attention='off' unless experts are in CPU memory "
                    "(enable_expert_offload=True); leave one of them out"
                )
        if not self.enable_cpu_offload:
            for name in ("num_gpu_blocks", "num_cpu_blocks", "cpu_memory_gb"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} applies only to CPU offload; add enable_cpu_offload=True")
            if self.cpu_attention == "on":
                raise ConfigError("cpu_attention='on' applies only to CPU offload; add enable_cpu_offload=True")
            return
        if self.num_kvcache_blocks != -1:
            raise ConfigError(
                "num_kvcache_blocks applies only without CPU offload; with enable_cpu_offload use num_gpu_blocks"
            )
        if self.num_cpu_blocks is not None and self.cpu_memory_gb is not None:
            raise ConfigError("num_cpu_blocks and cpu_memory_gb both set the size of the CPU pool; give one of them")

    @property
    def speculation_method(self) -> str:
        """The method of `speculation` in effect."""
        return self.speculation or ("auto" if self.enable_cpu_offload else "off")

    @property
    def wants_shadow(self) -> bool:
        """True if drafts may read a copy of the KV in a few bits. With "auto", start-up decides whether it pays."""
        return self.speculation_method == "shadow" or (self.speculation_method == "auto" and self.enable_cpu_offload)

    @property
    def max_guesses(self) -> int:
        """Draft tokens of a sequence in one step; 0 without speculation."""
        if self.speculation_method == "off":
            return 0
        return self.num_speculative_tokens or (MAX_GUESSES if self.wants_shadow else DEFAULT_GUESSES)

    @property
    def block_size(self) -> int:
        """Tokens per block.

        Users who set the number of slots usually serve a few long sequences, so the default is then a large block.
        Otherwise blocks are small, so that enough of them fit for hundreds of short sequences.
        """
        if self.kvcache_block_size is not None:
            return self.kvcache_block_size
        return DEFAULT_BLOCK_SIZE if self.num_gpu_blocks is None else GIVEN_SLOTS_BLOCK_SIZE


class EngineOptions(TypedDict, total=False):
    """The fields of Config but the model, for editors: they show them as the arguments of LLM and AsyncLLM."""

    fit: bool | None
    device: str
    dtype: str
    load_format: str
    quantization: str | None
    quantize_head: str | None
    embedding_on_cpu: bool | str
    hf_overrides: dict | None
    attn_backend: str
    enforce_eager: bool
    tensor_parallel_size: int
    generation_config: str
    skip_tokenizer_init: bool
    seed: int
    max_model_len: int | None
    kvcache_block_size: int | None
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    num_kvcache_blocks: int
    kv_disk_path: str | None
    kv_disk_gb: float | None
    enable_cpu_offload: bool
    num_gpu_blocks: int | None
    num_cpu_blocks: int | None
    cpu_memory_gb: float | None
    cpu_attention: str
    cpu_attention_threads: int | None
    enable_expert_offload: bool | None
    num_gpu_expert_layers: int | None
    gpu_expert_memory_gb: float | None
    max_num_batched_tokens: int
    max_num_seqs: int
    chunked_prefill: bool
    max_step_ms: float | None
    speculation: str | None
    num_speculative_tokens: int | None
    shadow_bits: int | None
    shadow_memory_gb: float | None
