"""ModelConfig: the content of a checkpoint's config.json, with the defaults of transformers.

This module owns the list of supported settings. Other settings raise CheckpointError here, and no later code checks
them. Each concern has one function, which returns a value for ModelConfig or raises CheckpointError: `_weight_dtype`
for the type of the weights, quantization.py for their quantization, `_layer_kinds` for the kinds of layers, `_mlp_size`
for the MLP, `_rope` for the rope. Importing this module loads neither torch nor transformers.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nanovllm.checkpoint import gguf_config
from nanovllm.checkpoint.files import INDEX_FILE, find_model, read_json, stored_names
from nanovllm.checkpoint.gguf import GGUFModel, is_gguf, read_model
from nanovllm.checkpoint.gguf_files import find_gguf
from nanovllm.checkpoint.quantization import (
    CHECKPOINT_FORMATS,
    HEAD_QUANTIZATIONS,
    QUANTIZATIONS,
    Quantization,
    gguf_quantization,
    parse_quantization,
)
from nanovllm.checkpoint.settings import (
    GENERATION_CONFIG_FILE,
    KEPT_ROPE_KEYS,
    MAX_POSITIONS,
    MROPE_KEYS,
    ROPE_KEYS,
    SWITCHES,
    check_settings,
    dtype_meaning,
    text_settings,
)
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.utils.arithmetic import SWIGLU_LIMIT, ceil_div

DTYPES = ("float32", "bfloat16", "float16")
RECURRENT_HEAD_DIMS = (16, 32, 64, 128)  # powers of two that fill a tile
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256, 512)  # the kernels are tested with these


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """The settings of Gemma's layers (models/gemma.py), which norm the outputs of attention and of the MLP, too."""

    norms_v: bool = False  # an RMSNorm without a weight on every head of v
    v_from_k: bool = False  # v is the product of k_proj in the layers that attend to all keys
    has_scalars: bool = False  # a scalar multiplies the output of each layer


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The properties of an architecture that are not in config.json.

    defaults: values of entries that a config.json leaves out, as in transformers' config classes. Using those classes
    would import most of transformers and torch's compiler, which takes up to 9 s in the first process on a machine.

    qkv_bias, o_bias, mlp_bias: whether these layers have biases, or the name of the entry of config.json that tells.
    expert_bias: the same for the router and the experts. expert_size: the name of the entry with an expert's features.
    has_sinks: see ModelConfig. interleaves_experts: a tensor of all experts has rows of gate and up in turns, and
    one that is not quantized has [input, output] features (models/expert_tensors.py).

    recommended_yarn: max_position_embeddings -> the length from which YaRN extends, and the longest context for which
    the model's authors recommend it, from the model cards.

    is_hybrid: most layers are recurrent, and the attention layers have an output gate and rotate part of a head.
    norms_add_one: norms multiply by 1 + weight. exceeds_float16: see ModelConfig.

    fixed: entry -> the values that are supported if config.json has the entry.
    """

    model_type: str  # as in config.json
    defaults: Mapping[str, Any]
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    has_experts: bool = False
    has_qk_norm: bool = False
    is_hybrid: bool = False
    norms_add_one: bool = False
    has_windows: bool = False  # some layers attend only to the tokens of a window
    ends_with_attention: bool = False  # the last layer attends to all keys, as transformers ensures
    has_sinks: bool = False
    expert_bias: bool = False
    expert_size: str = "moe_intermediate_size"
    interleaves_experts: bool = False
    gemma: "GemmaConfig | None" = None  # the settings of Gemma's layers that are not in config.json
    activation: str = "silu"  # as in ModelConfig
    exceeds_float16: bool = False
    image_tensors: tuple[str, ...] = ()  # prefixes of the names of tensors that only images or sounds need
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    recommended_yarn: Mapping[int, tuple[int, int]] = field(default_factory=dict)


_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {"intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936}
_QWEN |= {"max_position_embeddings": 32768}
_LLAMA = _COMMON | {"intermediate_size": 11008, "num_key_value_heads": None, "vocab_size": 32000}
_LLAMA |= {"max_position_embeddings": 2048, "eos_token_id": 2}
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_MISTRAL |= {"sliding_window": 4096}
_SEED_OSS = _COMMON | {"intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80}
_SEED_OSS |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136, "max_position_embeddings": 524288}
_SEED_OSS |= {"attention_bias": True, "eos_token_id": 2}
_QWEN_MOE = _QWEN | {"hidden_size": 2048, "num_hidden_layers": 24, "num_key_value_heads": 4, "intermediate_size": 6144}
_QWEN_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
_QWEN_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
_GPT_OSS = _COMMON | {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_experts": 128}
_GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
_GPT_OSS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128}
_GPT_OSS |= {"num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GPT_OSS |= {"rope_theta": 150000.0, "torch_dtype": "bfloat16"}  # the authors' files have no entry for the type
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_GPT_OSS |= {"rope_scaling": _GPT_OSS_ROPE, "sliding_window_pattern": 2}
_HYBRID = _COMMON | {"intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
_HYBRID |= {"vocab_size": 248320, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25}
_HYBRID |= {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
_HYBRID |= {"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
_HYBRID_MOE = _HYBRID | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256}
_HYBRID_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_HYBRID_MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GEMMA3: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_GEMMA3 |= {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072}
_GEMMA3 |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 1}
_GEMMA3 |= {"sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
_GEMMA3 |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_GEMMA4 = _GEMMA3 | {"num_hidden_layers": 30, "vocab_size": 262144, "sliding_window": 512, "rope_theta": None}
_GEMMA4 |= {"global_head_dim": 512, "num_global_key_value_heads": None}
_GEMMA4 |= {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
_GEMMA4 |= {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256}
_GEMMA4 |= {"enable_moe_block": False}
_GEMMA4_UNIFIED = _GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024}
_GEMMA4_UNIFIED |= {"hidden_size_per_layer_input": 0}
_GEMMA4_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": ("vision",),  # between the tokens of an image
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
}
_GEMMA3_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (None,),
}
_HYBRID_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),  # of the recurrent layers; transformers ignores it
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
    "mlp_only_layers": ([],),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
}


def _hybrid(model_type: str, *, has_experts: bool = False) -> Architecture:
    return Architecture(
        model_type=model_type,
        defaults=_HYBRID_MOE if has_experts else _HYBRID,
        has_qk_norm=True,
        has_experts=has_experts,
        is_hybrid=True,
        norms_add_one=True,
        image_tensors=("model.visual.",),
        fixed=_HYBRID_FIXED,
        recommended_yarn={262144: (262144, 1010000)},
    )


def _gemma3(model_type: str) -> Architecture:
    return Architecture(
        model_type=model_type,
        defaults=_GEMMA3,
        has_qk_norm=True,
        has_windows=True,
        norms_add_one=True,
        gemma=GemmaConfig(),
        activation="gelu_tanh",
        exceeds_float16=True,
        image_tensors=("model.vision_tower.", "model.multi_modal_projector."),
        fixed=_GEMMA3_FIXED,
    )


def _gemma4(model_type: str, defaults: Mapping[str, Any] = _GEMMA4) -> Architecture:
    parts = "vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder"
    return Architecture(
        model_type=model_type,
        defaults=defaults,
        has_qk_norm=True,
        has_windows=True,
        ends_with_attention=True,
        gemma=GemmaConfig(norms_v=True, has_scalars=True),
        activation="gelu_tanh",
        image_tensors=tuple(f"model.{part}." for part in parts),
        fixed=_GEMMA4_FIXED,
    )


_QWEN3_YARN = {40960: (32768, 131072)}  # these positions include the answer
# By architectures[0]. A dense decoder that differs only in the fields of Architecture needs only an entry here.
# Other weights go into model_layout.py, other computations into models/decoder.py
ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3", defaults=_QWEN | {"head_dim": 128}, has_qk_norm=True, recommended_yarn=_QWEN3_YARN
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe", defaults=_QWEN_MOE, has_qk_norm=True, has_experts=True, recommended_yarn=_QWEN3_YARN
    ),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2", defaults=_QWEN, qkv_bias=True, o_bias=False, recommended_yarn={32768: (32768, 131072)}
    ),
    "LlamaForCausalLM": Architecture(model_type="llama", defaults=_LLAMA, mlp_bias="mlp_bias"),
    "MistralForCausalLM": Architecture(model_type="mistral", defaults=_MISTRAL, qkv_bias=False, o_bias=False),
    "SeedOssForCausalLM": Architecture(
        model_type="seed_oss", defaults=_SEED_OSS, o_bias="attention_out_bias", mlp_bias="mlp_bias"
    ),
    "GptOssForCausalLM": Architecture(
        model_type="gpt_oss",
        defaults=_GPT_OSS,
        has_windows=True,
        has_sinks=True,
        has_experts=True,
        expert_bias=True,
        expert_size="intermediate_size",
        activation="clamped_swiglu",
        interleaves_experts=True,
        fixed={"swiglu_limit": (SWIGLU_LIMIT,)},  # transformers ignores it
    ),
    "Qwen3_5ForCausalLM": _hybrid("qwen3_5_text"),
    "Qwen3_5ForConditionalGeneration": _hybrid("qwen3_5"),
    "Qwen3_5MoeForCausalLM": _hybrid("qwen3_5_moe_text", has_experts=True),
    "Qwen3_5MoeForConditionalGeneration": _hybrid("qwen3_5_moe", has_experts=True),
    "Gemma3ForCausalLM": _gemma3("gemma3_text"),
    "Gemma3ForConditionalGeneration": _gemma3("gemma3"),
    "Gemma4ForCausalLM": _gemma4("gemma4_text"),
    "Gemma4ForConditionalGeneration": _gemma4("gemma4"),
    "Gemma4UnifiedForCausalLM": _gemma4("gemma4_unified_text", _GEMMA4_UNIFIED),
    "Gemma4UnifiedForConditionalGeneration": _gemma4("gemma4_unified", _GEMMA4_UNIFIED),
}
LAYER_KINDS = {  # by the names in config.json
    "full_attention": "attention",
    "linear_attention": "recurrent",
    "sliding_attention": "window",
}
ROPE_TYPES = {  # rope type -> the keys that it needs
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters, named as in transformers' `rope_parameters`. Each type uses some of the fields."""

    rope_type: str = "default"  # a key of ROPE_TYPES
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0  # the share of a head that is rotated; if proportional, of its pairs
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


MAX_MLP_TOKENS = 8192  # tokens whose MLP is computed together, which bounds the memory for its inner features


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The sparse MLPs of a mixture of experts. A router chooses some experts for each token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # divide the weights of the chosen experts by their sum
    layers: tuple[int, ...]  # the layers with a sparse MLP; all other layers have a dense MLP
    activation: str = "silu"  # as in ModelConfig
    shared_size: int = 0  # features of the expert that every token uses, scaled by a gate; 0 without such an expert
    has_bias: bool = False  # the router and the experts have biases
    # The layers whose experts are in CPU memory. KV on disk does not depend on them, so `repr` leaves them out
    cpu_layers: tuple[int, ...] = field(default=(), repr=False)

    def on_gpu(self, num_layers: int) -> "ExpertsConfig":
        """Return the configuration with the experts of `num_layers` layers on the GPU and the others in CPU memory.

        Layers on the GPU are spread evenly, so that while a long step computes one of them, the experts of the next
        layer arrive.
        """
        total = len(self.layers)
        is_on_gpu = ((i + 1) * num_layers // total > i * num_layers // total for i in range(total))
        cpu_layers = (layer for layer, is_resident in zip(self.layers, is_on_gpu, strict=True) if not is_resident)
        return replace(self, cpu_layers=tuple(cpu_layers))

    @property
    def mtp_is_on_cpu(self) -> bool:
        """True if the experts of the draft head are in CPU memory, as they are if the experts of any layer are."""
        return bool(self.cpu_layers)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The recurrent layers: a causal convolution over q, k and v, then the gated delta rule (layers/delta_net.py)."""

    num_key_heads: int  # heads of q and of k
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # tokens that the convolution reads: the token itself and the preceding tokens

    @property
    def conv_channels(self) -> int:
        """Features of q, k and v, which the convolution mixes over time."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The heads of the attention layers of one kind. All kinds have the same number of query heads."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # of the products of q and k

    @property
    def rotary_dim(self) -> int:
        """Number of elements at the beginning of a head that the rotary embedding rotates."""
        share = 1.0 if self.rope.rope_type == "proportional" else self.rope.partial_rotary_factor
        return int(self.head_dim * share)


@dataclass(frozen=True, kw_only=True)
class WindowConfig(AttentionConfig):
    """The layers that attend only to a window: a token sees itself and the `num_tokens` - 1 tokens before it."""

    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and settings of a decoder."""

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
    quantization: Quantization | None = None  # the checkpoint's quantization
    gguf_types: tuple[str, ...] = ()  # the quantized types of a GGUF file
    head_quantization: Quantization | None = None  # of the output head, if the head is quantized at loading
    # True if the embedding table is in pinned CPU memory for a GPU. No result depends on it, so `repr` leaves it out
    embedding_on_cpu: bool = field(default=False, repr=False)
    experts: ExpertsConfig | None = None  # None if every MLP is dense
    layer_kinds: tuple[str, ...]  # one for each layer: "attention" (to all keys), "window" or "recurrent"
    recurrent: RecurrentConfig | None = None  # None if no layer is recurrent
    window: WindowConfig | None = None  # None if no layer has a window
    attention_scale: float | None = None  # of the layers that attend to all keys; None for head_dim ** -0.5
    has_sinks: bool = False  # each head has a logit that joins the softmax without a value, in all attention layers
    attention_gate: bool = False  # sigmoid gates multiply the output of attention
    norms_add_one: bool = False  # norms multiply by 1 + weight
    # Of gated MLPs: "silu", "gelu_tanh" (GELU with the tanh approximation), or "clamped_swiglu" (act_and_mul in
    # layers/linear.py)
    activation: str = "silu"
    gemma: GemmaConfig | None = None  # None if the layers are not Gemma's
    logit_softcap: float | None = None  # logits are softcap * tanh(logits / softcap); None for no bound
    has_mtp: bool = False  # the checkpoint has a draft head (MTPHead)
    # Activations of real checkpoints are larger than 65504. The dtype is then another one, so `repr` leaves this out
    exceeds_float16: bool = field(default=False, repr=False)

    @property
    def has_own_head(self) -> bool:
        """True if the output head has a weight, False if the head uses the embedding table."""
        return not self.tie_word_embeddings or self.head_quantization is not None

    @property
    def head_format(self) -> Quantization | None:
        """The format of the output head's own weight, or None if it is not quantized."""
        return self.head_quantization or self._vocabulary_format("lm_head")

    @property
    def embedding_format(self) -> Quantization | None:
        """The format of the embedding table, or None if it is not quantized. In CPU memory the table has 16 bits."""
        return None if self.embedding_on_cpu else self._vocabulary_format("model.embed_tokens")

    @property
    def gguf_head_type(self) -> str | None:
        """The type of the weight that the output head multiplies by in a GGUF file, if it is a quantized type."""
        format = self._vocabulary_format("model.embed_tokens" if self.tie_word_embeddings else "lm_head")
        return None if format is None else format.block_type

    def _vocabulary_format(self, name: str) -> Quantization | None:
        """Return the type that a GGUF file has for a weight. Other formats do not quantize the vocabulary."""
        is_gguf = self.quantization is not None and self.quantization.is_gguf
        return self.quantization.format_of(name) if self.quantization is not None and is_gguf else None

    @property
    def embedding_scale(self) -> float:
        """The factor of the rows of the embedding table."""
        return 1.0 if self.gemma is None else self.hidden_size**0.5

    @property
    def has_cpu_experts(self) -> bool:
        """True if the experts of some layers are in CPU memory."""
        return self.experts is not None and bool(self.experts.cpu_layers)

    @property
    def num_attention_layers(self) -> int:
        return self.layer_kinds.count("attention")

    @property
    def num_recurrent_layers(self) -> int:
        return self.layer_kinds.count("recurrent")

    @property
    def num_window_layers(self) -> int:
        return self.layer_kinds.count("window")

    def attention(self, kind: str) -> AttentionConfig:
        """Return the heads of the layers of a kind: "attention" or "window"."""
        if kind == "window":
            assert self.window is not None, "no layer has a window"
            return self.window
        return AttentionConfig(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
        )

    def v_from_k(self, kind: str) -> bool:
        """Return True if the layers of a kind have no v projection."""
        return kind == "attention" and self.gemma is not None and self.gemma.v_from_k

    @property
    def rotary_dim(self) -> int:
        """Number of elements at the beginning of a head that the rotary embedding rotates."""
        return self.attention("attention").rotary_dim

    @property
    def max_model_len_limit(self) -> int:
        """Tokens of the longest sequence that the rotary embedding covers."""
        rope = self.rope
        covered = float(self.max_position_embeddings)
        if rope.rope_type == "dynamic" or (rope.rope_type == "linear" and self.gemma is None):
            covered *= rope.factor  # Gemma 3 counts the positions after the extension
        elif rope.rope_type == "yarn":
            covered = rope.original_max_position_embeddings * rope.factor
        return max(self.max_position_embeddings, int(covered))

    @classmethod
    def from_pretrained(
        cls, model: str, hf_overrides: Mapping[str, Any] | None = None
    ) -> tuple["ModelConfig", Path | None]:
        """Return the config of a local directory, a preset or a hub name, and the directory of the weights.

        The directory is None for a preset, which has no weights. For a hub name all files but the weights are
        downloaded or found in the cache; `fetch_weights` downloads the weights.

        hf_overrides: entries that replace entries of config.json (settings.py).

        Raises CheckpointError if the model is not found, and for a setting that is out of range or unsupported.
        Never runs code from the checkpoint and never asks for input on stdin.
        """
        config_path, directory = find_model(model)
        if is_gguf(directory):
            return _gguf_config(read_model(directory), hf_overrides), directory
        return _read_config(read_json(config_path), config_path, hf_overrides, model, directory), directory

    @classmethod
    def without_weights(cls, model: str, hf_overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Return the same config as `from_pretrained`, but download only config.json and the list of tensors, or the
        header of a file in GGUF.

        So for a hub name, the config lacks end tokens that only generation_config.json names.
        """
        if (gguf := find_gguf(model)) is not None:
            return _gguf_config(gguf.header(), hf_overrides)
        config_path, directory = find_model(model, ("config.json", INDEX_FILE))
        if is_gguf(directory):
            return _gguf_config(read_model(directory), hf_overrides)
        return _read_config(read_json(config_path), config_path, hf_overrides, model, directory)

    def check_format(self, name: str) -> None:
        """Raise ConfigError unless the checkpoint has the format `name`, one of CHECKPOINT_FORMATS."""
        method = CHECKPOINT_FORMATS[name]
        found = "gguf" if self.gguf_types else "none" if self.quantization is None else self.quantization.method
        if method != found:
            raise ConfigError(
                f"quantization={name!r} is for checkpoints with quant_method={method!r}, and this one has {found}; "
                f"leave it out, or choose one of {', '.join(QUANTIZATIONS)}"
            )

    def quantized(self, name: str | None, head: str | None = None, num_ranks: int = 1) -> "ModelConfig":
        """Return this config with quantization at loading: of linear layers to a format of QUANTIZATIONS, unless `name`
        is None, and of the output head to a format of HEAD_QUANTIZATIONS, unless `head` is None. `num_ranks` ranks
        share the columns of some layers, which must be whole blocks on each.

        Raises ConfigError if the checkpoint is quantized already, unless `name` is its own format. Only the
        checkpoint's files tell if a head in safetensors is quantized; loading checks that.
        """
        if head is not None and self.gguf_head_type is not None:
            raise ConfigError(
                f"quantize_head={head!r} is for output heads in 16 or 32 bits, and this GGUF file has the head in "
                f"{self.gguf_head_type}; leave it out"
            )
        if name is not None and self.gguf_types:
            raise ConfigError(
                f"quantization={name!r} is for checkpoints that are not quantized, and this GGUF file has the types "
                f"{', '.join(self.gguf_types)}; leave it out"
            )
        if name is not None and self.quantization is not None and name != self.quantization.method:
            raise ConfigError(
                f"quantization={name!r} is for checkpoints that are not quantized, and this one has "
                f"quant_method={self.quantization.method!r}; leave it out"
            )
        quantized = self
        if name is not None and self.quantization is None:
            quantized = replace(self, quantization=replace(QUANTIZATIONS[name], num_ranks=num_ranks))
        return quantized if head is None else replace(quantized, head_quantization=HEAD_QUANTIZATIONS[head])


def _gguf_config(model: GGUFModel, hf_overrides: Mapping[str, Any] | None) -> ModelConfig:
    if hf_overrides and hf_overrides.get("quantization_config"):
        raise ConfigError(
            f"hf_overrides has quantization_config, but {model.path} has the type of each tensor; leave it out"
        )
    content = gguf_config.settings(model)
    try:
        config = _read_config(content, model.path, hf_overrides, str(model.path), None)
    except CheckpointError as error:
        raise CheckpointError(f"{model.path} has metadata that is, in the terms of config.json: {error}") from error
    formats = gguf_quantization(gguf_config.quantized_layers(model))
    return replace(config, gguf_types=gguf_config.quantized_types(model), quantization=formats)


def _read_config(
    content: dict[str, Any],
    config_path: Path,
    hf_overrides: Mapping[str, Any] | None,
    model: str,
    directory: Path | None,
) -> ModelConfig:
    """Check the content of config.json after the overrides. directory: the model's directory, or None for a preset and
    for a file in GGUF, in which `config_path` and `content` have all there is.
    """
    given, outside = text_settings(content, hf_overrides, config_path)
    name = _architecture_name(given)
    check_settings(given, config_path)
    architecture = ARCHITECTURES[name]
    settings = _with_defaults(given, outside, architecture, config_path)
    _check_fixed(settings, architecture)

    def is_set(switch: bool | str) -> bool:
        return bool(settings.get(switch)) if isinstance(switch, str) else switch

    layer_kinds = _layer_kinds(settings, architecture, given.get(_interval_entry(architecture)))
    num_kv_heads, head_dim = _global_heads(settings, layer_kinds)
    rope, scale = _rope(settings, architecture), _attention_scale(settings, architecture)
    gemma, experts = architecture.gemma, _experts(settings, architecture) if architecture.has_experts else None
    if gemma is not None:
        gemma = replace(gemma, v_from_k=bool(settings.get("attention_k_eq_v")))
        experts = _gemma_experts(settings) if settings.get("enable_moe_block") else None
    config = ModelConfig(
        architecture=name,
        hidden_size=settings["hidden_size"],
        intermediate_size=_mlp_size(settings),
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=settings["vocab_size"],
        rms_norm_eps=float(settings["rms_norm_eps"]),
        max_position_embeddings=settings["max_position_embeddings"],
        tie_word_embeddings=bool(settings["tie_word_embeddings"]),
        qkv_bias=is_set(architecture.qkv_bias),
        o_bias=is_set(architecture.o_bias),
        mlp_bias=is_set(architecture.mlp_bias),
        qk_norm=architecture.has_qk_norm,
        rope=rope,
        torch_dtype=_weight_dtype(settings, architecture),
        eos_token_ids=_eos_token_ids(settings, None if "eos_token_id" in (hf_overrides or {}) else directory),
        quantization=parse_quantization(settings.get("quantization_config") or settings.get("compression_config")),
        experts=experts,
        layer_kinds=layer_kinds,
        has_sinks=architecture.has_sinks,
        recurrent=_recurrent(settings) if architecture.is_hybrid else None,
        window=_window(settings, rope, scale) if architecture.has_windows else None,
        attention_scale=scale,
        attention_gate=architecture.is_hybrid,
        norms_add_one=architecture.norms_add_one,
        activation=architecture.activation,
        gemma=gemma,
        logit_softcap=settings.get("final_logit_softcapping"),
        has_mtp=architecture.is_hybrid and _num_mtp_layers(settings) > 0 and _may_have_mtp_weights(model, directory),
        exceeds_float16=architecture.exceeds_float16,
    )
    if config.rotary_dim % 2 or config.rotary_dim < 2:
        raise CheckpointError(
            f"partial_rotary_factor={config.rope.partial_rotary_factor} rotates {config.rotary_dim} of the "
            f"{config.head_dim} elements of a head, which must be an even number; correct config.json"
        )
    if config.max_model_len_limit > MAX_POSITIONS:
        raise CheckpointError(
            f"max_position_embeddings={config.max_position_embeddings} with rope type {config.rope.rope_type!r} and "
            f"factor={config.rope.factor} covers {config.max_model_len_limit} tokens, more than the {MAX_POSITIONS} "
            "positions that fp32 can tell apart; lower the factor in config.json"
        )
    return config


def _with_defaults(
    given: Mapping[str, Any], outside: Mapping[str, Any], architecture: Architecture, path: Path
) -> dict[str, Any]:
    """Return the entries with the architecture's defaults. Null for a switch, hidden_act or the rope counts as absent.

    outside: entries outside `text_config`, which transformers ignores. Raises CheckpointError if an entry outside has
    another value than the entry in the text part.
    """
    defaults = architecture.defaults
    if "head_dim" in given and given["head_dim"] is None and "head_dim" in defaults:
        raise CheckpointError(
            f"head_dim=None can mean hidden_size / num_attention_heads or the default of {architecture.model_type}, "
            f"{defaults['head_dim']}; correct {path}"
        )
    is_absent = {name for name in (*SWITCHES, "hidden_act", "rope_parameters") if given.get(name) is None}
    settings = {**defaults, **{name: value for name, value in given.items() if name not in is_absent}}
    if given.get("rope_scaling") and "rope_parameters" not in given:
        settings.pop("rope_parameters", None)
    for name, value in outside.items():
        if value != settings.get(name):
            raise CheckpointError(
                f"{name}={value!r} is outside text_config, and text_config.{name}={settings.get(name)!r}; the text "
                f"part is read from text_config, so move the entry there or remove it from {path}"
            )
    return settings


def _check_fixed(settings: Mapping[str, Any], architecture: Architecture) -> None:
    for name, supported in architecture.fixed.items():
        if settings.get(name) is not None and settings[name] not in supported:
            raise CheckpointError(
                f"{name}={settings[name]!r} is not supported for model_type={architecture.model_type!r}; use a "
                f"checkpoint with {name}={' or '.join(map(repr, supported))}"
            )


def _architecture_name(settings: Mapping[str, Any]) -> str:
    """Return the architecture. Raises CheckpointError if it is not supported, or needs code from the checkpoint."""
    given = settings.get("architectures")
    name = given[0] if isinstance(given, list) and given else given
    model_type = settings.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES or ARCHITECTURES[name].model_type != model_type:
        supported = ", ".join(f"{name} ({each.model_type})" for name, each in ARCHITECTURES.items())
        raise CheckpointError(
            f"architectures[0]={name!r} with model_type={model_type!r} is not supported; supported are {supported}"
        )
    auto_map = settings.get("auto_map")
    if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
        raise CheckpointError(
            f"auto_map.AutoModelForCausalLM={auto_map['AutoModelForCausalLM']!r} asks for code from the checkpoint, "
            f"which is never run; remove auto_map from config.json if the weights belong to a plain {name}"
        )
    return name


# -- one concern each ------------------------------------------------------------------------------------------------


def _weight_dtype(settings: Mapping[str, Any], architecture: Architecture) -> str:
    """Return the type of the weights that are not quantized: one of DTYPES. Files of a model whose activations exceed
    float16 may have its weights in float16, which then become bfloat16.
    """
    dtype = dtype_meaning(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype} in config.json is not supported; use a checkpoint in {', '.join(DTYPES)}")
    return "bfloat16" if dtype == "float16" and architecture.exceeds_float16 else dtype


def _interval_entry(architecture: Architecture) -> str:
    """Return the entry that gives the distance between layers that attend to all keys, "" if there is none."""
    if architecture.is_hybrid:
        return "full_attention_interval"
    return "sliding_window_pattern" if architecture.has_windows else ""


def _layer_kinds(
    settings: Mapping[str, Any], architecture: Architecture, given_interval: int | None
) -> tuple[str, ...]:
    """Return the kind of each layer. Only hybrid architectures have recurrent layers, and only architectures that mix
    them with attention to all keys have layers with a window.

    given_interval: the distance between layers that attend to all keys in config.json, if it has this entry.
    """
    remedy = "only full attention is supported; use a checkpoint without a sliding window"
    # Qwen's files give a window and disable it with use_sliding_window=false. Without use_sliding_window it is enabled
    use, window = settings.get("use_sliding_window"), settings.get("sliding_window")
    if not architecture.has_windows and (use or (window and use is None)):
        raise CheckpointError(f"use_sliding_window={use}, sliding_window={window} is not supported: {remedy}")
    if chunks := settings.get("dual_chunk_attention_config"):  # transformers ignores the entry; long prompts differ
        raise CheckpointError(
            f"dual_chunk_attention_config={chunks} is not supported; "
            "remove the entry from config.json to run plain attention"
        )
    num_layers, entry = settings["num_hidden_layers"], _interval_entry(architecture)
    interval = settings[entry] if entry else 1
    if interval is None and not settings.get("layer_types"):
        _require_integers(settings, entry)
    other = "linear_attention" if architecture.is_hybrid else "sliding_attention"
    by_interval = [other if interval and (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    if architecture.ends_with_attention:
        by_interval[-1] = "full_attention"
    types = settings.get("layer_types") or by_interval
    supported = ["full_attention", other] if entry else ["full_attention"]
    if other_types := sorted({str(each) for each in types} - set(supported)):
        raise CheckpointError(f"layer_types {', '.join(other_types)} are not supported: {remedy}")
    if len(types) != num_layers:
        raise CheckpointError(
            f"layer_types has {len(types)} layers, but num_hidden_layers={num_layers}; correct config.json, or give "
            "both in hf_overrides"
        )
    if set(types) != set(supported):
        raise CheckpointError(
            f"layer_types has {types.count('full_attention')} of {num_layers} layers with full_attention; give at "
            f"least one layer of each type: {', '.join(supported)}"
        )
    if architecture.ends_with_attention and types[-1] != "full_attention":
        raise CheckpointError(
            f"layer_types ends with {types[-1]}, and the last layer of {architecture.model_type} has full_attention; "
            "correct config.json, or give layer_types in hf_overrides"
        )
    if given_interval and types != by_interval:
        raise CheckpointError(
            f"{entry}={given_interval} and layer_types={reprlib.repr(types)} disagree; remove one of them from "
            "config.json, or give one of them in hf_overrides"
        )
    return tuple(LAYER_KINDS[each] for each in types)


def _attention_scale(settings: Mapping[str, Any], architecture: Architecture) -> float | None:
    """Return the factor of the products of q and k, or None for the usual factor."""
    if architecture.gemma is None:
        return None
    return 1.0 if architecture.gemma.norms_v else float(settings["query_pre_attn_scalar"]) ** -0.5


def _global_heads(settings: Mapping[str, Any], layer_kinds: tuple[str, ...]) -> tuple[int, int]:
    """Return num_kv_heads and head_dim of the layers that attend to all keys. In Gemma 4 these layers have other heads
    than the layers with a window; transformers writes `per_layer_config` with what differs in each layer.
    """
    if "global_head_dim" not in settings:
        return _num_heads(settings)[1], _head_dim(settings)
    num_kv_heads = settings["num_global_key_value_heads"] if settings["attention_k_eq_v"] else None
    heads = {"head_dim": settings["global_head_dim"], "num_key_value_heads": num_kv_heads}
    if of_layers := settings.get("per_layer_config"):
        expected = {layer for layer, kind in enumerate(layer_kinds) if kind == "attention"}
        numbers = {int(layer): heads for layer, heads in of_layers.items() if layer.isdecimal()}
        found = {layer: heads for layer, heads in numbers.items() if layer < len(layer_kinds)}  # others: overridden
        heads = next(iter(found.values()), {})
        is_same = found.keys() == expected and all(each == heads for each in found.values())
        if not is_same or set(heads) - {"head_dim", "num_key_value_heads"} or not isinstance(heads, dict):
            raise CheckpointError(
                f"per_layer_config={reprlib.repr(of_layers)} is not supported; supported are head_dim and "
                "num_key_value_heads, equal in all layers with full_attention and absent in the others"
            )
    else:
        _require_integers(settings, "global_head_dim")
    check_settings({**settings, **heads}, Path("per_layer_config"))
    settings = {**settings, **{name: value for name, value in heads.items() if value is not None}}
    return _num_heads(settings)[1], _head_dim(settings)


def _window(settings: Mapping[str, Any], rope: RopeConfig, scale: float | None) -> WindowConfig:
    """Return the layers with a window. Gemma's have a rope with another theta, which no extension changes."""
    if type(num_tokens := settings["sliding_window"]) is not int or not 1 <= num_tokens <= MAX_POSITIONS:
        raise CheckpointError(
            f"sliding_window={num_tokens!r} must be an integer from 1 to {MAX_POSITIONS}; correct config.json"
        )
    if "rope_local_base_freq" in settings:
        given = settings.get("window_rope_parameters") or {}
        rope = _read_rope(given, {"rope_theta": settings["rope_local_base_freq"]}, settings, is_partial=False)
    num_kv_heads, head_dim = _num_heads(settings)[1], _head_dim(settings)
    return WindowConfig(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5 if scale is None else scale,
        num_tokens=num_tokens,
    )


def _require_integers(settings: Mapping[str, Any], *names: str) -> None:
    """Refuse null for these entries. The ranges have been checked."""
    for name in names:
        if settings[name] is None:
            raise CheckpointError(f"{name}=None must be an integer; correct config.json")


def _recurrent(settings: Mapping[str, Any]) -> RecurrentConfig:
    _require_integers(settings, "linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim")
    key_heads, value_heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    if value_heads % key_heads:
        raise CheckpointError(
            f"linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}; correct "
            "config.json"
        )
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if settings[name] not in RECURRENT_HEAD_DIMS:
            raise CheckpointError(
                f"{name}={settings[name]} is not supported; use a checkpoint with one of "
                f"{', '.join(map(str, RECURRENT_HEAD_DIMS))}"
            )
    return RecurrentConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=settings["linear_key_head_dim"],
        value_head_dim=settings["linear_value_head_dim"],
        conv_kernel=settings["linear_conv_kernel_dim"],
    )


def _num_mtp_layers(settings: Mapping[str, Any]) -> int:
    num_layers: int = settings.get("mtp_num_hidden_layers") or 0
    if num_layers > 1:
        raise CheckpointError(f"mtp_num_hidden_layers={num_layers} is not supported; use a checkpoint with 0 or 1")
    return num_layers


def _may_have_mtp_weights(model: str, directory: Path | None) -> bool:
    """Return False if the files lack the draft head that config.json describes, because some tools leave it out."""
    if directory is None:
        return True
    names = stored_names(model, directory)
    return names is None or any(name.startswith("mtp.") for name in names)


def _mlp_size(settings: Mapping[str, Any]) -> int:
    """Return the features of the dense MLP, or of the expert that every token uses. Both are gated with SiLU."""
    if settings["hidden_act"] != "silu":
        raise CheckpointError(
            f"hidden_act={settings['hidden_act']!r} is not supported; use a checkpoint with hidden_act='silu'"
        )
    return int(settings.get("shared_expert_intermediate_size") or settings["intermediate_size"])


def _experts(settings: Mapping[str, Any], architecture: Architecture) -> ExpertsConfig:
    _require_integers(settings, "num_experts_per_tok", architecture.expert_size, "decoder_sparse_step")
    # transformers 5 writes num_local_experts
    count = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    _require_integers(settings, count)
    num_experts = settings[count]
    num_chosen, num_layers = settings["num_experts_per_tok"], settings["num_hidden_layers"]
    if num_chosen > num_experts:
        raise CheckpointError(
            f"num_experts_per_tok={num_chosen} is more than num_experts={num_experts}; correct config.json"
        )
    dense = settings["mlp_only_layers"] or []
    if wrong := [layer for layer in dense if type(layer) is not int or not 0 <= layer < num_layers]:
        raise CheckpointError(f"mlp_only_layers has {wrong}, but layers are 0 to {num_layers - 1}; correct config.json")
    step = settings["decoder_sparse_step"]
    return ExpertsConfig(
        shared_size=settings.get("shared_expert_intermediate_size") or 0,
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        intermediate_size=settings[architecture.expert_size],
        has_bias=architecture.expert_bias,
        activation=architecture.activation,
        norm_topk_prob=bool(settings["norm_topk_prob"]),
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
    )


def _gemma_experts(settings: Mapping[str, Any]) -> ExpertsConfig:
    """Return the experts of Gemma 4. Every layer has a dense MLP and experts."""
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if settings.get(name) is None:
            raise CheckpointError(f"enable_moe_block=True needs {name}, which is missing; correct config.json")
    num_experts, num_chosen = settings["num_experts"], settings["top_k_experts"]
    if num_chosen > num_experts:
        raise CheckpointError(f"top_k_experts={num_chosen} is more than num_experts={num_experts}; correct config.json")
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        intermediate_size=settings["moe_intermediate_size"],
        norm_topk_prob=True,
        layers=tuple(range(settings["num_hidden_layers"])),
        activation="gelu_tanh",
    )


def _num_heads(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of heads of q, and of k and v."""
    heads = settings["num_attention_heads"]
    kv_heads = settings["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; correct config.json"
        )
    return heads, kv_heads


def _head_dim(settings: Mapping[str, Any]) -> int:
    """Return head_dim, which defaults to hidden_size / num_attention_heads."""
    hidden_size, num_heads = settings["hidden_size"], settings["num_attention_heads"]
    head_dim: int = settings.get("head_dim") or hidden_size // num_heads
    if head_dim not in HEAD_DIMS:
        raise CheckpointError(
            f"head_dim={head_dim} (hidden_size={hidden_size}, num_attention_heads={num_heads}) is not supported; "
            f"use a checkpoint with one of {', '.join(map(str, HEAD_DIMS))}"
        )
    return head_dim


def _eos_token_ids(settings: Mapping[str, Any], directory: Path | None) -> tuple[int, ...]:
    """Return the end tokens in config.json and in the generation_config.json of `directory`, without duplicates.

    directory: the model's directory, or None to read config.json alone.
    """
    given, vocab_size = {"config.json": settings.get("eos_token_id")}, settings["vocab_size"]
    path = directory / GENERATION_CONFIG_FILE if directory else None
    if path and path.is_file():
        given[path.name] = read_json(path).get("eos_token_id")
    token_ids: dict[int, None] = {}
    for file, value in given.items():
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise CheckpointError(
                    f"eos_token_id={value!r} in {file} must be token ids from 0 to {vocab_size - 1}; correct {file}"
                )
            token_ids[token_id] = None
    return tuple(token_ids)


def _rope(settings: Mapping[str, Any], architecture: Architecture) -> RopeConfig:
    """Return the rope of the layers that attend to all keys, from `rope_parameters` (transformers 5) or `rope_theta`
    and `rope_scaling` (earlier).
    """
    if settings.get("window_rope_parameters") is not None and not architecture.has_windows:
        raise CheckpointError(
            "rope_parameters in config.json are given per layer type (full_attention, sliding_attention); "
            f"{architecture.model_type} has one rope for all layers"
        )
    entry = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    outside = {name: settings.get(name) for name in KEPT_ROPE_KEYS}
    return _read_rope(entry, outside, settings, is_partial=architecture.is_hybrid)


def _read_rope(
    entry: Mapping[str, Any], outside: Mapping[str, Any], settings: Mapping[str, Any], *, is_partial: bool
) -> RopeConfig:
    """Read the entry of a rope and keys that are outside the entry. is_partial: the rope may rotate a part of each
    head, and have sections for images.
    """
    given = {name: value for name, value in entry.items() if value is not None}
    if given.get("type") and given.get("rope_type", given["type"]) != given["type"]:
        raise CheckpointError(
            f"rope type={given['type']!r} and rope_type={given['rope_type']!r} mean the same setting and disagree; "
            "remove one of them from config.json"
        )
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    known = ROPE_KEYS.keys() - (set() if is_partial else MROPE_KEYS)
    unknown, missing = sorted(entry.keys() - known), sorted(set(ROPE_TYPES[rope_type]) - given.keys())
    if unknown or missing:
        raise CheckpointError(
            f"rope type {rope_type!r} has unknown keys {unknown} and lacks {missing}; correct config.json"
        )
    given = {name: value for name, value in outside.items() if value is not None} | given
    partial = given.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and not is_partial and rope_type != "proportional":
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported; only 1.0 (rotate the whole head) is")
    names = {each.name for each in fields(RopeConfig)}
    max_position = settings["max_position_embeddings"]
    values = {"original_max_position_embeddings": settings.get("original_max_position_embeddings") or max_position}
    values |= {name: value for name, value in given.items() if name in names} | {"rope_type": rope_type}
    values["partial_rotary_factor"] = partial
    if rope_type == "dynamic":
        values["original_max_position_embeddings"] = max_position  # transformers ignores the file's entry
    rope = RopeConfig(**values | {name: float(values[name]) for name in ("rope_theta", "factor") if name in values})
    for lower, upper in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if getattr(rope, lower) >= getattr(rope, upper):
            raise CheckpointError(
                f"rope {lower}={getattr(rope, lower)} must be below {upper}={getattr(rope, upper)}; correct config.json"
            )
    return rope


def rope_extension(model: ModelConfig, num_tokens: int) -> str:
    """Return the remedy of an error message: an `hf_overrides` to copy, with which the rope covers `num_tokens`."""
    overrides, remark = rope_overrides(model, num_tokens)
    return f"extend the rope ({remark}) with hf_overrides, on the command line --hf-overrides '{json.dumps(overrides)}'"


def rope_overrides(model: ModelConfig, num_tokens: int) -> tuple[dict[str, Any], str]:
    """Return the `hf_overrides` with which the rope covers `num_tokens`, and a remark about them."""
    rope, max_position = model.rope, model.max_position_embeddings
    if rope.rope_type == "default":
        cards = ARCHITECTURES[model.architecture].recommended_yarn
        original, recommended = cards.get(max_position, (max_position, 0))
        factor = ceil_div(num_tokens, original)
        scaling: dict[str, Any] = {"rope_type": "yarn", "rope_theta": rope.rope_theta, "factor": float(factor)}
        scaling["original_max_position_embeddings"] = original
        overrides = {"rope_parameters": scaling, "max_position_embeddings": original * factor}
        remark = "yarn; check whether the model's authors recommend it"
        if recommended:
            remark = f"yarn, which the model's authors recommend up to {recommended} tokens"
    else:
        stretch, kept = ceil_div(num_tokens, model.max_model_len_limit), ("rope_type", *ROPE_TYPES[rope.rope_type])
        values = {each.name: (getattr(rope, each.name), each.default) for each in fields(rope)}
        scaling = {name: value for name, (value, default) in values.items() if name in kept or value != default}
        overrides = {"rope_parameters": scaling | {"factor": rope.factor * stretch}}
        if rope.rope_type in ("yarn", "llama3", "proportional") or model.gemma is not None:
            overrides["max_position_embeddings"] = model.max_model_len_limit * stretch
        remark = f"{rope.rope_type} with a larger factor than the model was trained with"
    return overrides, remark
