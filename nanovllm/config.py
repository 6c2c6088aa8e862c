"""Config: what the user said, checked where it is made. KVCacheSpec: the shape of one rank's KV cache."""

import re
from dataclasses import dataclass

from nanovllm.checkpoint.config_overrides import check_overrides
from nanovllm.sampling_params import MAX_INT32, MAX_SEED, MIN_SEED

BLOCK_SIZE_STEP = 256  # block sizes are multiples of this; prefix hits count in grains of it
DEFAULT_BLOCK_SIZE = 256
GIVEN_SLOTS_BLOCK_SIZE = 4096

_CHOICES = {
    "attn_backend": ("auto", "flash", "cudnn", "triton", "torch"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "safetensors", "dummy"),
    "generation_config": ("auto", "none"),
}
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")
_MAX_CPU_MEMORY_GB = 2**30  # an EiB
_AT_LEAST_ONE = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size", "num_cpu_blocks")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The engine's options. A bad value raises ValueError with the value, the limit and the remedy.

    model: a local directory, a hub name, or the name of a preset in benchmarks/configs (with load_format="dummy").
    max_num_batched_tokens: most new tokens in one step; a longer prompt is split. max_num_seqs: most running
    sequences. max_model_len: tokens of prompt and answer; None: the model's own limit. gpu_memory_utilization: share
    of the GPU's memory the engine may use. kvcache_block_size: tokens per block; None: 256, or 4096 where
    num_gpu_blocks is given. num_kvcache_blocks: blocks of the all-GPU pool, -1: what fits. enable_cpu_offload: keep
    all KV in pinned CPU memory and `num_gpu_blocks` slots of it on the GPU (None: what fits). num_cpu_blocks or
    cpu_memory_gb: size of the CPU pool (None: two sequences of max_model_len, or a block for every slot that two such
    sequences and short ones can use, if that is more; at most 70% of the memory available). chunked_prefill: one
    token budget for decodes and prefill chunks in the same step; False: prefill before decode.
    hf_overrides: entries that replace those of the model's config.json, e.g. another rope. load_format: "dummy" draws
    random weights. generation_config: "auto" takes the sampling defaults of `chat` and of the command line from the
    model's generation_config.json; "none" takes SamplingParams' own. seed: the seed for random weights and for requests
    that set none.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int = -1
    enable_cpu_offload: bool = False
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    cpu_memory_gb: float | None = None
    chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    attn_backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    generation_config: str = "auto"
    hf_overrides: dict | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        self._check_integers()
        if not self.model:
            raise ValueError("model='' must be a directory ('.' is this one), a hub name (owner/name) or a preset")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}")
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device={self.device!r} is unknown; choose auto, cpu, cuda or cuda:N, where N is 0 to 99")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1")
        if not 1 <= self.tensor_parallel_size <= 8:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} must be between 1 and 8")
        if self.kvcache_block_size is not None and self.kvcache_block_size % BLOCK_SIZE_STEP:
            raise ValueError(
                f"kvcache_block_size={self.kvcache_block_size} must be a multiple of {BLOCK_SIZE_STEP}; "
                f"try {-(-self.kvcache_block_size // BLOCK_SIZE_STEP) * BLOCK_SIZE_STEP}"
            )
        self._check_offload()
        check_overrides(self.hf_overrides or {})

    def _check_types(self) -> None:
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if isinstance(value, bool) and kind is not bool:
                raise ValueError(f"{name}={value!r} must not be a boolean")
            if kind is float and isinstance(value, int):
                continue
            allowed = (float, int, type(None)) if kind == float | None else kind
            if not isinstance(value, allowed):
                raise ValueError(f"{name}={value!r} has type {type(value).__name__}, expected {kind}")

    def _check_integers(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be 1 or more")
        if self.num_kvcache_blocks != -1 and self.num_kvcache_blocks < 1:
            raise ValueError(f"num_kvcache_blocks={self.num_kvcache_blocks} must be 1 or more, or -1 for what fits")
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} must be between {MIN_SEED} and {MAX_SEED} (64 bits)")
        for name in (*_AT_LEAST_ONE, "num_kvcache_blocks", "num_gpu_blocks"):
            value = getattr(self, name)
            if value is not None and value > MAX_INT32:
                raise ValueError(f"{name}={value} must be at most {MAX_INT32}")

    def _check_offload(self) -> None:
        if not self.enable_cpu_offload:
            for name in ("num_gpu_blocks", "num_cpu_blocks", "cpu_memory_gb"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to the offload path; add enable_cpu_offload=True")
            return
        if self.num_kvcache_blocks != -1:
            raise ValueError("num_kvcache_blocks is the all-GPU pool; with enable_cpu_offload use num_gpu_blocks")
        if self.num_gpu_blocks is not None and self.num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks={self.num_gpu_blocks} must be 2 or more")
        if self.num_cpu_blocks is not None and self.cpu_memory_gb is not None:
            raise ValueError("num_cpu_blocks and cpu_memory_gb both size the CPU pool; give one of them")
        if self.cpu_memory_gb is not None and not 0 < self.cpu_memory_gb <= _MAX_CPU_MEMORY_GB:
            raise ValueError(f"cpu_memory_gb={self.cpu_memory_gb} must be above 0 and at most {_MAX_CPU_MEMORY_GB}")

    @property
    def block_size(self) -> int:
        """Tokens per block. A number of slots is given for long sequences, whose slots are large by default. Where the
        slots are what fits, there are enough small ones for hundreds of short sequences, too.
        """
        if self.kvcache_block_size is not None:
            return self.kvcache_block_size
        return DEFAULT_BLOCK_SIZE if self.num_gpu_blocks is None else GIVEN_SLOTS_BLOCK_SIZE
