"""What a GGUF file says about its model, in the terms of a checkpoint in safetensors.

`settings` returns the entries of config.json, `generation_settings` returns the entries of generation_config.json, and
`weights` lists the tensors by their names in a checkpoint. llama.cpp's converters change some tensors. `Weight` says
how to change them back:


- llama: rows of q and k are ordered for a rope that rotates neighbours instead of halves
- gemma3: norms have 1 added
- qwen35 and qwen35moe: norms have 1 added, except the norm of the recurrent layers; A_log is stored as -exp(A_log);
  value heads are ordered by their place within a key head first, and then by key head

For gpt-oss, llama.cpp truncates the range of YaRN, about which files say nothing. config.json and nanovllm do not.

Importing this module loads no torch.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from nanovllm.checkpoint.gguf import GGUFModel, GGUFTensor
from nanovllm.checkpoint.quantization import GGUFLayer, without_expert
from nanovllm.errors import CheckpointError

_ARCHITECTURES = {  # general.architecture -> architectures[0] and model_type of config.json
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
}
_HYBRIDS = ("qwen35", "qwen35moe")
_MIXTURES = ("qwen3moe", "qwen35moe", "gpt-oss")
_GEMMAS = ("gemma3", "gemma4")
_GEMMA3_27B_LAYERS = 62
_OPTIONAL = {  # metadata entry, after the architecture's name -> entry of config.json
    "feed_forward_length": "intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
}
_EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GPT_OSS_SETTINGS = {"expert_feed_forward_length": "intermediate_size"}
_RECURRENT_SETTINGS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_NEUTRAL = {  # entries that would change what the model computes -> their values without effect
    **dict.fromkeys(("attention.scale", "attn_logit_softcapping"), 0),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), 1),
    **dict.fromkeys(("attention.temperature_scale", "pooling_type", "attention.clamp_kqv"), 0),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"), 1),
    "rope.scaling.yarn_log_multiplier": 0,
    "attention.causal": True,
}
_YARN = {  # entries of a YaRN rope -> keys of rope_parameters
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_TENSOR = "rope_freqs.weight"
_END_TOKENS = {  # texts of tokens that end an answer. Many files name only one of them as eos_token_id
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"),
}
_HARMONY_END_TOKENS = {"<|endoftext|>", "<|return|>", "<|call|>"}  # of gpt-oss, where <|end|> only ends a message
_SAMPLING = {  # metadata entry -> entry of generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
_MAX_COUNT = 2**31
NORMAL_TOKEN = 1  # in tokenizer.ggml.token_type

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_out": "linear_attn.out_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_GEMMA_LAYERS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
}
_OF_LAYERS_WITH_ENDING = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "attn_sinks.weight": "self_attn.sinks",
}
_OF_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
_OF_DRAFT_HEAD = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}


class Weight(NamedTuple):
    """A weight of a checkpoint, [shape], in a GGUF file: rows of a tensor, flattened to a matrix, and their order."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    first_row: int = 0
    # int64: for each row of the weight its row in the tensor, or None for the same order; and the same for columns. The
    # elements of a vector are columns of one row.
    row_order: np.ndarray | None = None
    column_order: np.ndarray | None = None
    change: Literal["minus one", "log of minus"] | None = None  # to the values

    def ordered(self, order: np.ndarray) -> "Weight":
        """Return the weight with another order of rows, or of the elements of a vector."""
        return self._replace(column_order=order) if len(self.shape) == 1 else self._replace(row_order=order)


class _Metadata:
    """The entries of a file's metadata, with the architecture's name left out."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self.architecture = str(model.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{model.path} has general.architecture={self.architecture!r}, which is not supported; supported are "
                f"{', '.join(_ARCHITECTURES)}"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry, a number or a text. An array is returned as a description, which no caller accepts."""
        value = self._model.metadata.get(f"{self.architecture}.{name}", default)
        return f"an array of {len(value)}" if isinstance(value, np.ndarray | list) else value

    def number(self, name: str, default: float | None = None) -> float:
        """Return the entry, which must be one number for all layers. Raises CheckpointError for other entries."""
        value, of_layers = self.get(name, default), self._model.metadata.get(f"{self.architecture}.{name}")
        if isinstance(of_layers, np.ndarray):  # some converters write a number for each layer
            distinct = set(of_layers.tolist()) - {0}
            value = distinct.pop() if len(distinct) == 1 else "different numbers for layers"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"{self._model.path} has {value!r} as metadata entry {self.architecture}.{name}, which must be a "
                "number; download it again, or use a file that a current version of llama.cpp has converted"
            )
        return value

    def of_layers(self, name: str, num_layers: int) -> list[Any] | None:
        """Return the entry if it is a list with an element for each layer, or None."""
        value = self._model.metadata.get(f"{self.architecture}.{name}")
        listed = value.tolist() if isinstance(value, np.ndarray) else value
        return listed if isinstance(listed, list) and len(listed) == num_layers else None

    def count(self, name: str, default: int | None = None) -> int:
        """Return an entry that must be a positive integer, or the default."""
        value = self.number(name, default)
        if value != default and not (isinstance(value, int) and 0 < value <= _MAX_COUNT):
            raise CheckpointError(
                f"{self._model.path} has {value!r} as metadata entry {self.architecture}.{name}, which must be an "
                f"integer from 1 to {_MAX_COUNT}; download it again"
            )
        return int(value)

    def largest_dimension(self) -> int:
        return max(size for tensor in self._model.tensors.values() for size in tensor.shape)

    def refusal(self, name: str, remedy: str) -> CheckpointError:
        return CheckpointError(
            f"{self._model.path} has {self.architecture}.{name}={self.get(name)!r}, which is not supported; {remedy}"
        )


def settings(model: GGUFModel) -> dict[str, Any]:
    """Return the entries of config.json. Raises CheckpointError for what is missing or not supported."""
    given, names = _Metadata(model), model.tensors.keys()
    for name, neutral in _NEUTRAL.items():
        if given.get(name, neutral) != neutral:
            raise given.refusal(name, "use another model")
    has_experts, is_hybrid = given.architecture in _MIXTURES, given.architecture in _HYBRIDS
    is_gemma = given.architecture in _GEMMAS
    if given.get("final_logit_softcapping") and not is_gemma:
        raise given.refusal("final_logit_softcapping", "use another model")
    if given.get("expert_count") and not has_experts and given.architecture != "gemma4":
        raise given.refusal("expert_count", f"use a mixture of experts with the architecture {' or '.join(_MIXTURES)}")
    num_heads, num_draft_layers = given.count("attention.head_count"), given.count("nextn_predict_layers", 0)
    num_layers = given.count("block_count") - num_draft_layers
    if num_layers > len(names):
        raise given.refusal("block_count", f"the file has {len(names)} tensors; download it again")
    head_dim = given.count("attention.key_length", given.count("embedding_length") // num_heads)
    if given.count("attention.value_length", head_dim) != head_dim:
        raise given.refusal("attention.value_length", f"K has {head_dim} features, and V must have as many")
    architecture, model_type = _ARCHITECTURES[given.architecture]
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": _dtype(model),
        "hidden_size": given.count("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": None if is_gemma else given.count("attention.head_count_kv"),
        "head_dim": head_dim,
        "vocab_size": _tensor(model, "token_embd.weight").shape[0],
        "max_position_embeddings": given.count("context_length"),
        "rms_norm_eps": given.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(model, given, head_dim),
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": _end_tokens(model.metadata, given.architecture),
    }
    found |= {entry: given.count(name) for name, entry in _OPTIONAL.items() if given.get(name)}
    if is_gemma:
        found |= _gemma_settings(model, given, found)
    if given.architecture != "qwen2":  # whose q, k and v always have biases
        found["attention_bias"] = "blk.0.attn_q.bias" in names
    if has_experts:
        names_of = _EXPERT_SETTINGS | (_GPT_OSS_SETTINGS if given.architecture == "gpt-oss" else {})
        found |= {entry: given.count(name) for name, entry in names_of.items()} | {"norm_topk_prob": True}
    if given.architecture == "gpt-oss" and found["rope_parameters"]["rope_type"] == "yarn":
        found["rope_parameters"]["truncate"] = False
    if is_hybrid:
        found |= {entry: given.count(name) for name, entry in _RECURRENT_SETTINGS.items()}
        found["linear_value_head_dim"] = given.count("ssm.inner_size") // found["linear_num_value_heads"]
        kinds = {True: "linear_attention", False: "full_attention"}
        found["layer_types"] = [kinds[f"blk.{layer}.ssm_out.weight" in names] for layer in range(num_layers)]
        has_head = f"blk.{num_layers}.nextn.eh_proj.weight" in names
        found["mtp_num_hidden_layers"] = num_draft_layers if has_head else 0
    return found


def _gemma_settings(model: GGUFModel, given: _Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of Gemma 3 and 4. Their files leave out what llama.cpp knows of the architecture."""
    num_layers, head_dim = found["num_hidden_layers"], found["head_dim"]
    windows = given.of_layers("attention.sliding_window_pattern", num_layers)
    if windows is None:
        interval = given.count("attention.sliding_window_pattern", 6)
        windows = [bool((layer + 1) % interval) for layer in range(num_layers)]
    of_window = {"rope_type": "default", "rope_theta": float(given.number("rope.freq_base_swa", 10000.0))}
    new: dict[str, Any] = {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windows],
        "sliding_window": given.count("attention.sliding_window"),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": of_window},
        "final_logit_softcapping": given.get("final_logit_softcapping") or None,
    }
    heads = given.of_layers("attention.head_count_kv", num_layers)
    heads = [given.count("attention.head_count_kv")] * num_layers if heads is None else heads
    of_kind = {
        kind: [count for count, each in zip(heads, windows, strict=True) if each == kind] for kind in (True, False)
    }
    if any(len(set(counts)) > 1 or not isinstance(counts[0], int) for counts in of_kind.values() if counts):
        raise given.refusal("attention.head_count_kv", "layers of a kind must have equally many heads")
    if given.architecture == "gemma3":
        # llama.cpp has no entry for it, and knows the 27B by its number of layers
        is_27b = num_layers == _GEMMA3_27B_LAYERS
        scalar = found["hidden_size"] / found["num_attention_heads"] if is_27b else head_dim
        return new | {"num_key_value_heads": heads[0], "query_pre_attn_scalar": scalar}
    (of_windows, *_), (of_others, *_) = (of_kind[kind] or heads for kind in (True, False))
    last = max((layer for layer, each in enumerate(windows) if not each), default=0)
    takes_v_from_k = f"blk.{last}.attn_v.weight" not in model.tensors
    if of_windows != of_others and not takes_v_from_k:
        raise given.refusal("attention.head_count_kv", "layers with attn_v must have equally many heads")
    new |= {"num_key_value_heads": of_windows, "attention_k_eq_v": takes_v_from_k}
    new |= {"num_global_key_value_heads": of_others if takes_v_from_k else None}
    new |= {"head_dim": given.count("attention.key_length_swa"), "global_head_dim": head_dim}
    new["num_kv_shared_layers"] = int(given.number("attention.shared_kv_layers", 0))
    new["hidden_size_per_layer_input"] = int(given.number("embedding_length_per_layer_input", 0))
    if given.get("expert_count"):
        new |= {entry: given.count(name) for name, entry in _EXPERT_SETTINGS.items()} | {"enable_moe_block": True}
        new["top_k_experts"] = new.pop("num_experts_per_tok")
    return new


def _tensor(model: GGUFModel, name: str) -> GGUFTensor:
    if name not in model.tensors:
        raise CheckpointError(f"{model.path} lacks the tensor {name}; download it again")
    return model.tensors[name]


def _dtype(model: GGUFModel) -> str:
    """Return the type of most values, or bfloat16 for quantized values."""
    sizes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        sizes[tensor.type.name] += math.prod(tensor.shape)
    return {"F32": "float32", "F16": "float16"}.get(sizes.most_common(1)[0][0], "bfloat16")


def quantized_types(model: GGUFModel) -> tuple[str, ...]:
    """Return the names of the quantized types of the tensors, the most frequent first."""
    types = Counter(tensor.type.name for tensor in model.tensors.values() if tensor.type.is_quantized)
    return tuple(name for name, _ in types.most_common())


def _end_tokens(metadata: Mapping[str, Any], architecture: str) -> list[int]:
    """Return the tokens that end an answer: the tokens that the file names for it, and known end tokens."""
    is_harmony = architecture == "gpt-oss"
    kinds, texts = ["eos"] if is_harmony else ["eos", "eot", "eom"], _HARMONY_END_TOKENS if is_harmony else _END_TOKENS
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    known: list[int] = []
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        marked = zip(tokens, types.tolist(), strict=False)
        known = [i for i, (text, kind) in enumerate(marked) if kind != NORMAL_TOKEN and text in texts]
    return list(dict.fromkeys([each for each in named if isinstance(each, int)] + known))


def _rope(model: GGUFModel, given: _Metadata, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(given.number("rope.freq_base", 10000.0))}
    kind = given.get("rope.scaling.type") or "none"
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(given.number("rope.scaling.factor"))}
    elif kind != "none":
        raise given.refusal("rope.scaling.type", "supported are none, linear and yarn")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = given.count("rope.scaling.original_context_length")
        rope |= {key: given.number(name) for name, key in _YARN.items() if given.get(name) is not None}
    num_rotated = given.count("rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    if given.architecture == "gemma4":
        rope |= {"rope_type": "proportional", "partial_rotary_factor": _proportion(model)}
    elif _ROPE_TENSOR in model.tensors:
        rope |= _llama3_rope(model, rope["rope_theta"], num_rotated)
    return rope


def _proportion(model: GGUFModel) -> float:
    """Return the share of pairs that rotate in the layers of Gemma 4 that attend to all keys: those with the factor 1.
    The factor of the others is 1e30. Of a file on the hub only the header is read; a plan needs no proportion.
    """
    if _ROPE_TENSOR not in model.tensors:
        return 1.0
    tensor = model.tensors[_ROPE_TENSOR]
    if not tensor.path.is_file():
        return 0.25
    factors = _read_floats(tensor)
    num_rotated = int((factors == 1).sum())
    if not (factors[:num_rotated] == 1).all() or not (factors[num_rotated:] >= 1e29).all() or not num_rotated:
        raise CheckpointError(
            f"{model.path} has factors for the rope ({_ROPE_TENSOR}) that are not Gemma 4's, which is not supported"
        )
    return num_rotated / len(factors)


def _llama3_rope(model: GGUFModel, theta: float, num_rotated: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's rope, of which files store the factors that divide the frequencies.

    Raises CheckpointError if the factors are not Llama 3's (transformers, modeling_rope_utils.py). Of a file on the hub
    only the header is read, which has no factors; a plan needs none.
    """
    tensor = _tensor(model, _ROPE_TENSOR)
    if not tensor.path.is_file():
        return {}
    stored = _read_floats(tensor)
    factor, original = float(stored.max(initial=1.0)), _LLAMA3_ROPE["original_max_position_embeddings"]
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = original * theta ** -(np.arange(0, num_rotated, 2) / num_rotated) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise CheckpointError(
            f"{model.path} has factors for the rope ({_ROPE_TENSOR}) that are not Llama 3's, which is not supported"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _read_floats(tensor: GGUFTensor) -> np.ndarray:
    if tensor.type.name != "F32":
        raise CheckpointError(f"{tensor.where} has the type {tensor.type.name} instead of F32; download it again")
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.offset)
        return np.frombuffer(stream.read(tensor.num_bytes), "<f4")


def generation_settings(model: GGUFModel) -> dict[str, Any]:
    """Return the entries of generation_config.json, from what the converter took from such a file."""
    return {entry: model.metadata[name] for name, entry in _SAMPLING.items() if name in model.metadata}


# -- weights -----------------------------------------------------------------------------------------------------


def weights(model: GGUFModel) -> Iterator[tuple[str, Weight]]:
    """Yield each weight with its name in a checkpoint. A tensor without such a name keeps its own name."""
    given = _Metadata(model)
    num_layers = given.count("block_count") - given.count("nextn_predict_layers", 0)
    changed, is_gemma = _CHANGES[given.architecture](given), given.architecture in _GEMMAS
    names = _OF_LAYERS | _OF_GEMMA_LAYERS if is_gemma else _OF_LAYERS
    for name, tensor in model.tensors.items():
        if name == _ROPE_TENSOR:
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            yield _ENDS.get(name, name), changed(name, Weight(tensor, tensor.shape))
            continue
        layer, last = int(match[1]), match[2]
        parent = f"model.layers.{layer}" if layer < num_layers else f"mtp.layers.{layer - num_layers}"
        stem, _, ending = last.rpartition(".")
        if stem in _OF_EXPERTS and len(tensor.shape) == 3:
            yield from _experts(tensor, f"{parent}.experts" if is_gemma else f"{parent}.mlp.experts", _OF_EXPERTS[stem])
        elif ending == "bias" and len(tensor.shape) == 2 and len(_OF_EXPERTS.get(stem, ())) == 1:
            for expert in range(tensor.shape[0]):
                name = f"{parent}.mlp.experts.{expert}.{_OF_EXPERTS[stem][0]}.bias"
                yield name, Weight(tensor, tensor.shape[1:], expert)
        elif last in _OF_DRAFT_HEAD:
            yield _OF_DRAFT_HEAD[last], changed(last, Weight(tensor, tensor.shape))
        elif last in _OF_LAYERS_WITH_ENDING:
            yield f"{parent}.{_OF_LAYERS_WITH_ENDING[last]}", changed(last, Weight(tensor, tensor.shape))
        elif stem in names:
            yield f"{parent}.{names[stem]}.{ending}", changed(last, Weight(tensor, tensor.shape))
        else:
            yield name, Weight(tensor, tensor.shape)


def quantized_layers(model: GGUFModel) -> set[GGUFLayer]:
    """Return the layers whose weights are blocks of a quantized type."""
    found = set()
    for name, weight in weights(model):
        parent, _, last = name.rpartition(".")
        if weight.tensor.type.is_quantized and last == "weight" and len(weight.shape) == 2:
            found.add(GGUFLayer(without_expert(parent), weight.tensor.type.name, weight.column_order is not None))
    return found


def _experts(tensor: GGUFTensor, parent: str, layers: tuple[str, ...]) -> Iterator[tuple[str, Weight]]:
    """Yield each expert's part of a tensor of all experts."""
    num_experts, num_rows, num_columns = tensor.shape
    size = num_rows // len(layers)
    for expert in range(num_experts):
        for i, layer in enumerate(layers):
            first = expert * num_rows + i * size
            yield f"{parent}.{expert}.{layer}.weight", Weight(tensor, (size, num_columns), first)


_Change = Callable[[str, Weight], Weight]


def _unchanged(given: _Metadata) -> _Change:
    return lambda name, weight: weight


def _norms_minus_one(given: _Metadata) -> _Change:
    return lambda name, weight: weight._replace(change="minus one") if name.endswith("norm.weight") else weight


def _llama(given: _Metadata) -> _Change:
    """Order the rows of q and k by halves again. GGUF has rows 2 i and 2 i + 1 where the checkpoint has i and i + half
    a head.
    """
    heads = {"attn_q": given.count("attention.head_count"), "attn_k": given.count("attention.head_count_kv")}

    def change(name: str, weight: Weight) -> Weight:
        num_heads, num_rows = heads.get(name.partition(".")[0]), weight.shape[0]
        if num_heads is None or num_rows % (2 * num_heads):
            return weight
        rows = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return weight.ordered(rows)

    return change


def _hybrid(given: _Metadata) -> _Change:
    num_key_heads, num_value_heads = given.count("ssm.group_count"), given.count("ssm.time_step_rank")
    num_features, ratio = given.count("ssm.inner_size"), num_value_heads // num_key_heads
    if num_value_heads % num_key_heads or num_features % num_value_heads:
        raise given.refusal(
            "ssm.time_step_rank",
            f"it must be a multiple of ssm.group_count={num_key_heads} and divide ssm.inner_size={num_features}",
        )
    if num_features > given.largest_dimension():
        raise given.refusal("ssm.inner_size", "no tensor is as large; download the file again")
    head_dim = num_features // num_value_heads
    # The file's place of each value head of the checkpoint, where the heads of a key head are neighbours
    heads = np.arange(num_value_heads).reshape(ratio, num_key_heads).swapaxes(0, 1).reshape(-1)
    features = (heads[:, None] * head_dim + np.arange(head_dim)).reshape(-1)

    def after_q_and_k(num_rows: int) -> np.ndarray:
        first = num_rows - len(features)
        return np.concatenate([np.arange(first), first + features])

    def change(name: str, weight: Weight) -> Weight:
        stem, shape = name.removesuffix(".weight"), weight.shape
        if stem.endswith("norm") and stem != "ssm_norm":
            return weight._replace(change="minus one")
        if stem == "ffn_gate_inp_shexp" and len(shape) == 1:
            return weight._replace(shape=(1, *shape))
        if stem in ("attn_qkv", "ssm_conv1d"):
            if stem == "ssm_conv1d" and len(shape) == 2:
                weight = weight._replace(shape=(shape[0], 1, shape[1]))
            return weight.ordered(after_q_and_k(shape[0]))
        if stem == "attn_gate":
            return weight.ordered(features)
        if stem == "ssm_out":
            return weight._replace(column_order=features)
        if stem in ("ssm_a", "ssm_dt.bias", "ssm_alpha", "ssm_beta"):
            weight = weight.ordered(heads)
        return weight._replace(change="log of minus") if stem == "ssm_a" else weight

    return change


_CHANGES: dict[str, Callable[[_Metadata], _Change]] = {
    "llama": _llama,
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "gpt-oss", "gemma4"), _unchanged),
    "gemma3": _norms_minus_one,
    **dict.fromkeys(_HYBRIDS, _hybrid),
}
