"""ModelConfig: the content of a checkpoint's config.json, with the defaults of transformers.

Owns the list of supported settings. A setting outside it raises CheckpointError here, and no later code checks again.
Importing this module loads neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.checkpoint.config_overrides import apply_overrides
from nanovllm.checkpoint.files import find_model, read_json
from nanovllm.checkpoint.model_settings import MAX_POSITIONS, check_settings
from nanovllm.errors import CheckpointError

# architectures[0] -> model_type of its config.json
ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
# Values of entries that a config.json leaves out, as in transformers' config classes. Using those classes would import
# most of transformers and torch's compiler, which takes up to 9 s in the first process on a machine.
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_COMMON = {**_SIZES, "hidden_act": "silu", "tie_word_embeddings": False}
_QWEN = {**_COMMON, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {**_QWEN, "max_position_embeddings": 32768, "head_dim": 128},
    "Qwen2ForCausalLM": {**_QWEN, "max_position_embeddings": 32768},
    "LlamaForCausalLM": {
        **_COMMON,
        "intermediate_size": 11008,
        "num_key_value_heads": None,  # the same as num_attention_heads
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
}
DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)  # the kernels are tested with these
# Unsupported settings that change the numbers. transformers ignores the second one, so it differs on long prompts.
_FOREIGN_SETTINGS = {
    "quantization_config": "use an unquantised checkpoint (float32, bfloat16 or float16)",
    "dual_chunk_attention_config": "remove the entry from config.json to run plain attention",
}
_ROPE_KEYS = {  # rope type -> required keys
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_OPTIONAL_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters, named as in transformers' `rope_parameters`. Each type uses some of the fields."""

    rope_type: str = "default"  # default, linear, dynamic, yarn, llama3
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # dynamic, yarn and llama3: the length the model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn; so are all fields below
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and settings of a dense decoder."""

    architecture: str  # a key of ARCHITECTURES
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on every head of q and k before rope
    rope: RopeConfig
    torch_dtype: str  # "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...]

    @property
    def max_model_len_limit(self) -> int:
        """Tokens of the longest sequence that the rotary embedding covers."""
        rope = self.rope
        covered = float(self.max_position_embeddings)
        if rope.rope_type in ("linear", "dynamic"):
            covered *= rope.factor
        elif rope.rope_type == "yarn":
            covered = rope.original_max_position_embeddings * rope.factor
        return max(self.max_position_embeddings, int(covered))

    @classmethod
    def from_pretrained(
        cls, model: str, hf_overrides: Mapping[str, Any] | None = None
    ) -> tuple["ModelConfig", Path | None]:
        """The config of a local directory, a preset or a hub name, and the directory with its weights.

        The directory is None for a preset, which has no weights. For a hub name all files but the weights are
        downloaded or found in the cache; `fetch_weights` gets the weights.

        hf_overrides: entries that replace those of config.json (config_overrides.py).

        Raises CheckpointError if the model is not found, and for a setting that is out of its range or unsupported.
        Never runs code from the checkpoint and never asks for input on stdin.
        """
        config_path, directory = find_model(model)
        return _read_config(config_path, directory, hf_overrides), directory

    @classmethod
    def without_weights(cls, model: str, hf_overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """The same config, read from config.json alone. No other file of a hub name is downloaded.

        It lacks end tokens that only generation_config.json names.
        """
        config_path, _ = find_model(model, ("config.json",))
        return _read_config(config_path, None, hf_overrides)


def _read_config(config_path: Path, directory: Path | None, hf_overrides: Mapping[str, Any] | None) -> ModelConfig:
    """Read and check config.json after the overrides. directory: where generation_config.json may be."""
    given = apply_overrides(read_json(config_path), hf_overrides)
    architecture = _check_architecture(given)
    check_settings(given, config_path)
    settings = SimpleNamespace(**(DEFAULTS[architecture] | given))
    return _from_settings(settings, architecture, _eos_token_ids(settings, directory))


def _check_architecture(settings: Mapping[str, Any]) -> str:
    """The architecture, if it is supported without running code from the checkpoint."""
    given = settings.get("architectures")
    architecture = given[0] if isinstance(given, list) and given else given
    model_type = settings.get("model_type")
    if not isinstance(architecture, str) or ARCHITECTURES.get(architecture) != model_type:
        raise CheckpointError(
            f"architectures[0]={architecture!r} with model_type={model_type!r} is not supported; "
            f"supported are {', '.join(f'{name} ({kind})' for name, kind in ARCHITECTURES.items())}"
        )
    auto_map = settings.get("auto_map")
    if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
        raise CheckpointError(
            f"auto_map.AutoModelForCausalLM={auto_map['AutoModelForCausalLM']!r} asks for code from the checkpoint, "
            f"which is never run; remove auto_map from config.json if the weights belong to a plain {architecture}"
        )
    return architecture


def _eos_token_ids(settings: Any, directory: Path | None) -> tuple[int, ...]:
    """The end tokens in config.json and generation_config.json, without duplicates."""
    given = {"config.json": getattr(settings, "eos_token_id", None)}
    path = directory / "generation_config.json" if directory else None
    if path and path.is_file():
        given["generation_config.json"] = read_json(path).get("eos_token_id")
    token_ids: dict[int, None] = {}
    for file, value in given.items():
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < settings.vocab_size:
                raise CheckpointError(
                    f"eos_token_id={value!r} in {file} must be token ids from 0 to {settings.vocab_size - 1}; "
                    f"correct {file}"
                )
            token_ids[token_id] = None
    return tuple(token_ids)


def _from_settings(settings: Any, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    _check_supported(settings)
    dtype = getattr(settings, "dtype", None) or getattr(settings, "torch_dtype", None) or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype} in config.json is not supported; use a checkpoint in {', '.join(DTYPES)}")
    attention_bias = bool(getattr(settings, "attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_hidden_layers,
        num_heads=settings.num_attention_heads,
        num_kv_heads=settings.num_key_value_heads or settings.num_attention_heads,
        head_dim=_head_dim(settings),
        vocab_size=settings.vocab_size,
        rms_norm_eps=settings.rms_norm_eps,
        max_position_embeddings=settings.max_position_embeddings,
        tie_word_embeddings=bool(settings.tie_word_embeddings),
        # Qwen2 always has biases on q, k and v and nowhere else; transformers does not read its config for that either
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(settings, "mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope=_rope_config(settings),
        torch_dtype=dtype,
        eos_token_ids=eos_token_ids,
    )
    if config.max_model_len_limit > MAX_POSITIONS:
        raise CheckpointError(
            f"max_position_embeddings={config.max_position_embeddings} with rope type {config.rope.rope_type!r} and "
            f"factor={config.rope.factor} covers {config.max_model_len_limit} tokens, more than the {MAX_POSITIONS} "
            "positions that fp32 can tell apart; lower the factor in config.json"
        )
    return config


def _check_supported(settings: Any) -> None:
    """Raise CheckpointError for an unsupported setting that would change the numbers."""
    for name, remedy in _FOREIGN_SETTINGS.items():
        if getattr(settings, name, None):
            raise CheckpointError(f"{name}={getattr(settings, name)} is not supported; {remedy}")
    if settings.hidden_act != "silu":
        raise CheckpointError(
            f"hidden_act={settings.hidden_act!r} is not supported; use a checkpoint with hidden_act='silu'"
        )
    heads, kv_heads = settings.num_attention_heads, settings.num_key_value_heads or settings.num_attention_heads
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; correct config.json"
        )
    _check_no_sliding_window(settings)


def _head_dim(settings: Any) -> int:
    """head_dim, which defaults to hidden_size / num_attention_heads."""
    head_dim: int = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    if head_dim not in HEAD_DIMS:
        raise CheckpointError(
            f"head_dim={head_dim} (hidden_size={settings.hidden_size}, num_attention_heads="
            f"{settings.num_attention_heads}) is not supported; use a checkpoint with one of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    return head_dim


def _check_no_sliding_window(settings: Any) -> None:
    remedy = "only full attention is supported; use a checkpoint without a sliding window"
    # Qwen's files give a window and switch it off with use_sliding_window=false. Without that entry a window is used
    use = getattr(settings, "use_sliding_window", None)
    window = getattr(settings, "sliding_window", None)
    if use or (window and use is None):
        raise CheckpointError(f"use_sliding_window={use}, sliding_window={window} is not supported: {remedy}")
    other_types = sorted(set(getattr(settings, "layer_types", None) or ()) - {"full_attention"})
    if other_types:
        raise CheckpointError(f"layer_types {', '.join(other_types)} are not supported: {remedy}")


def _rope_config(settings: Any) -> RopeConfig:
    """The rope, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (earlier versions)."""
    given = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in _ROPE_KEYS:
        raise CheckpointError(f"rope type {rope_type!r} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    unknown = sorted(set(given) - _ROPE_OPTIONAL_KEYS)
    missing = sorted(key for key in _ROPE_KEYS[rope_type] if given.get(key) is None)
    if unknown or missing:
        raise CheckpointError(
            f"rope type {rope_type!r} has unknown keys {unknown} and lacks {missing}; correct config.json"
        )
    partial = given.get("partial_rotary_factor") or getattr(settings, "partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported; only 1.0 (rotate the whole head) is")
    max_position = settings.max_position_embeddings
    original = given.get("original_max_position_embeddings") or max_position
    if rope_type == "dynamic":
        original = max_position  # transformers ignores the entry and scales the base from here on
    optional = (
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    )
    rope = RopeConfig(
        rope_type=rope_type,
        rope_theta=float(given.get("rope_theta") or getattr(settings, "rope_theta", None) or 10000.0),
        factor=float(given.get("factor") or 1.0),
        original_max_position_embeddings=int(original),
        **{name: given[name] for name in optional if given.get(name) is not None},
    )
    for lower, upper in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if getattr(rope, lower) >= getattr(rope, upper):
            raise CheckpointError(
                f"rope {lower}={getattr(rope, lower)} must be below {upper}={getattr(rope, upper)}; correct config.json"
            )
    return rope
