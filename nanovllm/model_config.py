"""ModelConfig: what a checkpoint's config.json says, read through transformers and checked at the gate.

Owns the list of what is implemented. A setting outside it raises ValueError here; nothing past this file checks again.
Importing this module loads neither torch nor transformers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config_overrides import apply_overrides, written

# architectures[0] -> model_type of its config.json
ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
DTYPES = ("float32", "bfloat16", "float16")
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
# Not implemented, and they change the numbers. transformers ignores the second, without which long prompts differ.
_FOREIGN_SETTINGS = {
    "quantization_config": "use an unquantised checkpoint (float32, bfloat16 or float16)",
    "dual_chunk_attention_config": "remove the entry from config.json to run plain attention",
}
_ROPE_KEYS = {  # required keys of each type
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
    """Rotary embedding parameters, named as in transformers' `rope_parameters`. Fields of other types are unused."""

    rope_type: str = "default"  # default, linear, dynamic, yarn, llama3
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # of dynamic, yarn and llama3: the length the model was trained for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, as all below
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
    qk_norm: bool  # RMSNorm of every head of q and k before rope
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

        The directory is None for a preset, which has shapes only. A hub name is downloaded (or found in the cache) by
        huggingface_hub. `hf_overrides` replaces entries of config.json (config_overrides.py). Raises ValueError for a
        model that is not found and for every setting not implemented.
        """
        config_path, directory = _find_model(model, _DOWNLOADED)
        return _read_config(config_path, directory, hf_overrides), directory

    @classmethod
    def without_weights(cls, model: str, hf_overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """The same config, read from config.json alone: nothing else is downloaded for a hub name.

        End tokens that only generation_config.json names are missing from it.
        """
        config_path, _ = _find_model(model, ["config.json"])
        return _read_config(config_path, None, hf_overrides)


def presets() -> dict[str, Path]:
    """Preset name -> its config.json: of the installed package, else of the repository."""
    package = Path(__file__).resolve().parent
    for folder in (package / "presets", package.parent / "benchmarks" / "configs"):
        paths = sorted(folder.glob("*.json"))
        if paths:
            return {path.stem: path for path in paths}
    return {}


def _find_model(model: str, downloaded: Sequence[str]) -> tuple[Path, Path | None]:
    """(config.json, directory of the weights or None) of a directory, a preset or a hub name.

    `downloaded`: patterns of the files to fetch for a hub name.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        known = presets()
        if model in known:
            return known[model], None
        looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or not model
        remedy = f"give a directory with config.json, a preset ({', '.join(known)}) or a hub name (owner/name)"
        if looks_like_path:
            raise ValueError(f"model directory {model!r} does not exist; {remedy}")
        try:
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(model, allow_patterns=list(downloaded)))
        except Exception as error:  # no network, no such name, a gated repository: the text says which
            raise ValueError(
                f"model {model!r} is no directory and could not be downloaded; {remedy}: {error}"
            ) from error
    if not (directory / "config.json").is_file():
        raise ValueError(f"no config.json in {directory}; give the directory that save_pretrained or a download wrote")
    return directory / "config.json", directory


def _read_config(config_path: Path, directory: Path | None, hf_overrides: Mapping[str, Any] | None) -> ModelConfig:
    """config.json with the overrides in it, checked. `directory`: where generation_config.json may be."""
    settings = apply_overrides(_read_json(config_path), hf_overrides)
    _check_one_rope(settings)
    try:
        from transformers import AutoConfig

        with written(settings) as path:
            hf = AutoConfig.from_pretrained(str(path))
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and errors of its own
        raise ValueError(f"{config_path} is not a config.json that transformers can read: {error}") from error
    return _from_hf(hf, _eos_token_ids(hf, directory))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} instead of a JSON object; download it again")
    return content


def _eos_token_ids(hf: Any, directory: Path | None) -> tuple[int, ...]:
    """End tokens of config.json and of generation_config.json, each once."""
    values = [getattr(hf, "eos_token_id", None)]
    path = directory / "generation_config.json" if directory else None
    if path and path.is_file():
        values.append(_read_json(path).get("eos_token_id"))
    lists = [value if isinstance(value, list) else [value] for value in values]
    return tuple(dict.fromkeys(token_id for ids in lists for token_id in ids if token_id is not None))


def _from_hf(hf: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    architecture = _check_supported(hf)
    dtype = getattr(hf, "dtype", None) or getattr(hf, "torch_dtype", None) or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} of config.json is not supported; use a checkpoint in {', '.join(DTYPES)}")
    attention_bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        # Qwen2 always has biases on q, k and v and never elsewhere; transformers does not ask its config either
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(hf, "mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope=_rope_config(hf),
        torch_dtype=dtype,
        eos_token_ids=eos_token_ids,
    )


def _check_supported(hf: Any) -> str:
    """The architecture, once every setting that would change the numbers is known to be implemented."""
    architecture: str = (getattr(hf, "architectures", None) or [""])[0]
    if ARCHITECTURES.get(architecture) != hf.model_type:
        raise ValueError(
            f"architectures[0]={architecture!r} with model_type={hf.model_type!r} is not supported; "
            f"supported are {', '.join(f'{name} ({kind})' for name, kind in ARCHITECTURES.items())}"
        )
    for name, remedy in _FOREIGN_SETTINGS.items():
        if getattr(hf, name, None):
            raise ValueError(f"{name}={getattr(hf, name)} is not supported; {remedy}")
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act={hf.hidden_act!r} is not supported; use a checkpoint with hidden_act='silu'")
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; correct config.json"
        )
    _check_no_sliding_window(hf)
    return architecture


def _check_no_sliding_window(hf: Any) -> None:
    remedy = "only full attention is supported; use a checkpoint without a sliding window"
    # Qwen names a window that use_sliding_window=false then switches off; elsewhere naming one is using it
    use = getattr(hf, "use_sliding_window", None)
    window = getattr(hf, "sliding_window", None)
    if use or (window and use is None):
        raise ValueError(f"use_sliding_window={use}, sliding_window={window} is not supported: {remedy}")
    other_types = sorted(set(getattr(hf, "layer_types", None) or ()) - {"full_attention"})
    if other_types:
        raise ValueError(f"layer_types {', '.join(other_types)} are not supported: {remedy}")


def _check_one_rope(config_json: dict[str, Any]) -> None:
    """Asked of the file itself: transformers fails on such a config with a message that does not say so."""
    given = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope parameters per layer type ({', '.join(given)}) are not supported; only one for all is")


def _rope_config(hf: Any) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    unknown = sorted(set(given) - _ROPE_OPTIONAL_KEYS)
    missing = sorted(key for key in _ROPE_KEYS[rope_type] if key not in given)
    if unknown or missing:
        raise ValueError(
            f"rope type {rope_type!r} has unknown keys {unknown} and misses {missing}; correct config.json"
        )
    partial = given.get("partial_rotary_factor") or getattr(hf, "partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not supported; only 1.0 (rotate the whole head) is")
    max_position = hf.max_position_embeddings
    original = given.get("original_max_position_embeddings") or max_position
    if rope_type == "dynamic":
        original = max_position  # transformers grows the base from here whatever the entry says
    factor = given.get("factor") or (max_position / original if rope_type == "yarn" else 1.0)
    if factor < 1.0:
        raise ValueError(f"rope factor={factor} is not supported; it stretches the context and is 1 or more")
    optional = (
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    )
    return RopeConfig(
        rope_type=rope_type,
        rope_theta=float(given.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0),
        factor=float(factor),
        original_max_position_embeddings=int(original),
        **{name: given[name] for name in optional if given.get(name) is not None},
    )
