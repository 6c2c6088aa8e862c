"""The supported architectures, and the properties that each has besides its config.json.

Importing this module loads neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.checkpoint.model_config import GemmaConfig
from nanovllm.utils.arithmetic import SWIGLU_LIMIT


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

    fixed: entry -> the values that are supported if config.json has the entry. remedies: entry -> what to use instead
    of a checkpoint with another value.
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
    gemma: GemmaConfig | None = None  # the settings of Gemma's layers that are not in config.json
    activation: str = "silu"  # as in ModelConfig
    exceeds_float16: bool = False
    image_tensors: tuple[str, ...] = ()  # prefixes of the names of tensors that only images or sounds need
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    remedies: Mapping[str, str] = field(default_factory=dict)
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
_NO_GEMMA4_E = "Gemma 4 E2B and E4B have such layers; use Gemma 4 12B, 26B-A4B or 31B"
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
        remedies=dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), _NO_GEMMA4_E),
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
