"""Writes checkpoints as GGUF files, as llama.cpp's converters do, with the package `gguf`.

The writer changes tensors forwards (conversion/llama.py and conversion/qwen.py of llama.cpp); nanovllm changes them
back. So that quantized files have an oracle, `write_gguf` also writes the checkpoint whose weights have the values that
the package `gguf` computes of the file.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

TYPES = {
    name: gguf.GGMLQuantizationType[name]
    for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "GptOssForCausalLM": "gpt-oss",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
_GEMMA_VECTORS = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_FFN_NORM = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # where post_attention_layernorm is ffn_norm
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def write_gguf(
    path: Path,
    directory: Path,
    *,
    types: Sequence[str] = ("F32",),
    same_values: Path | None = None,
    num_files: int = 1,
    fused_experts: bool = False,
    metadata: Callable[[Any], None] | None = None,
) -> Path:
    """Write the checkpoint in `directory` to `path`, and return the path of the first file.

    types: the types of matrices, in turn. same_values: where to write a checkpoint in fp32 with the values of the file.
    num_files: how many files the model is divided into. fused_experts: one tensor for gate and up of all experts.
    metadata: is called with the writer, to add entries.
    """
    config = json.loads((directory / "config.json").read_text())
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    stored = {name: tensor.float() for name, tensor in stored.items()}
    if config["model_type"] == "gpt_oss":
        stored = _with_single_experts(stored)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["architectures"][0]], split_max_tensors=0)
    if num_files > 1:
        writer.split_max_tensors = -(-_num_written(stored, fused_experts) // num_files)
    _add_metadata(writer, config, stored)
    if metadata is not None:
        metadata(writer)
    values, turn = dict[str, torch.Tensor](), 0
    for name, sources in _stacked(config, stored, fused_experts).items():
        given = torch.stack([stored[source] for source in sources])
        array, kind = _changed(config, name, _arranged(config, name, given)).numpy(), TYPES["F32"]
        if array.ndim > 1 and not any(part in name for part in ("norm", "conv1d", "ffn_gate_inp", ".bias")):
            kind, turn = TYPES[types[turn % len(types)]], turn + 1
        blocks = quantized(array, kind, seed=turn)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        if kind != TYPES["F32"]:
            read = gguf.dequantize(blocks.reshape(-1, blocks.shape[-1]), kind).reshape(-1)
            places = _arranged(config, name, torch.arange(given.numel()).view(given.shape)).reshape(-1)
            given = torch.zeros(given.numel()).index_copy(0, places, torch.from_numpy(read.copy())).view(given.shape)
        values |= dict(zip(sources, given.unbind(0), strict=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if same_values is not None:
        same_values.mkdir(parents=True, exist_ok=True)
        (same_values / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
        values = _with_joined_experts(values) if config["model_type"] == "gpt_oss" else values
        save_file(values, same_values / "model.safetensors", {"format": "pt"})
    return path if num_files == 1 else path.with_name(f"{path.stem}-00001-of-{num_files:05d}.gguf")


def _with_single_experts(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the weights of gpt-oss as Qwen3's mixture names them, with rows before columns."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        parent, _, last = name.rpartition(".experts.")
        if not parent:
            found[name.replace("mlp.router", "mlp.gate")] = tensor
            continue
        ending = "bias" if last.endswith("_bias") else "weight"
        parts = ("gate", "up") if last.startswith("gate_up") else ("down",)
        for expert, each in enumerate(tensor):
            rows = each if ending == "bias" else each.T
            for i, part in enumerate(parts):
                found[f"{parent}.experts.{expert}.{part}_proj.{ending}"] = rows[i :: len(parts)]
    return found


def _with_joined_experts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `_with_single_experts`."""
    found = {name.replace("mlp.gate.", "mlp.router."): each for name, each in values.items() if ".experts." not in name}
    for parent in {name.partition(".experts.")[0] for name in values if ".experts." in name}:
        count = sum(name.startswith(f"{parent}.experts.") and "down_proj.bias" in name for name in values)
        for new, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for ending in ("weight", "bias"):
                names = [
                    [f"{parent}.experts.{expert}.{part}_proj.{ending}" for part in parts] for expert in range(count)
                ]
                rows = [torch.stack([values[name] for name in of_expert], 1).flatten(0, 1) for of_expert in names]
                joined = torch.stack(rows)
                found[f"{parent}.experts.{new}" + ("_bias" if ending == "bias" else "")] = (
                    joined if ending == "bias" else joined.mT.contiguous()
                )
    return found


def quantized(array: np.ndarray, kind: gguf.GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """Return the bytes of blocks of this type. Of types that the package cannot write, blocks are random."""
    if kind == TYPES["F32"]:
        return array
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        return random_blocks(array.shape, kind, seed)


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    """Return random codes with scales such that values are about 0.1."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    scale = {
        "Q4_K": (0, 0.0003),
        "Q5_K": (0, 0.00015),
        "Q6_K": (208, 0.00005),
        "IQ4_XS": (0, 0.0001),
        "IQ4_NL": (0, 0.001),
    }
    place, number = scale[kind.name]
    blocks[..., place : place + 2] = np.array([number], np.float16).view(np.uint8)
    if kind.name in ("Q4_K", "Q5_K"):
        blocks[..., 2:4] = np.array([number * 5], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _num_written(stored: dict[str, torch.Tensor], fused: bool) -> int:
    experts = {n.rpartition(".experts.")[0] for n in stored if ".experts." in n}
    return len([n for n in stored if ".experts." not in n]) + len(experts) * (2 if fused else 3)


def _add_metadata(writer: Any, config: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    num_draft_layers = int("mtp.fc.weight" in stored)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "sliding_window" in config and config["model_type"].startswith("gemma"):
        head_dim = _add_gemma_metadata(writer, config, head_dim)
    writer.add_block_count(config["num_hidden_layers"] + num_draft_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    if "per_layer_config" not in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    is_partial = rope.get("rope_type") != "proportional"
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)) if is_partial else head_dim)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    if config.get("top_k_experts"):
        config = config | {"num_experts_per_tok": config["top_k_experts"]}
    if config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "linear_conv_kernel_dim" in config:
        heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if num_draft_layers:
        writer.add_nextn_predict_layers(num_draft_layers)
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos)


def _add_gemma_metadata(writer: Any, config: dict[str, Any], head_dim: int) -> int:
    """Add what only Gemma's files have. Returns the head dim of the layers that attend to all keys."""
    windows = [each == "sliding_attention" for each in config["layer_types"]]
    writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "gemma3_text":
        return head_dim
    others = next(iter(config["per_layer_config"].values()))
    kv_heads = others.get("num_key_value_heads", config["num_key_value_heads"])
    writer.add_sliding_window_pattern(windows)
    writer.add_head_count_kv([config["num_key_value_heads"] if each else kv_heads for each in windows])
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    num_pairs, share = others["head_dim"] // 2, config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    factors = [1.0] * int(num_pairs * share)
    writer.add_tensor("rope_freqs.weight", np.array(factors + [1e30] * (num_pairs - len(factors)), np.float32))
    return int(others["head_dim"])


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What the converter stores of Llama 3's rope: numbers by which frequencies are divided."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        original, low, high = (
            rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _stacked(config: dict[str, Any], stored: dict[str, torch.Tensor], fused: bool) -> dict[str, list[str]]:
    """Return the names of the checkpoint's tensors by the names in the file, where experts are one tensor."""
    found: dict[str, list[str]] = {}
    for name in stored:
        base, _, ending = name.rpartition(".")
        is_gemma = config["model_type"].startswith("gemma")
        layer = f"blk.{config['num_hidden_layers']}." if name.startswith("mtp.") else ""
        if match := re.match(r"(model|mtp)\.layers\.(\d+)\.", name):
            number = int(match[2]) + config["num_hidden_layers"] * (match[1] == "mtp")
            layer, base = f"blk.{number}.", base[match.end() :]
            if is_gemma and name[match.end() :] in _GEMMA_VECTORS:
                found[layer + _GEMMA_VECTORS[name[match.end() :]]] = [name]
                continue
        if is_gemma and base in _GEMMA_NAMES:
            new = f"{_GEMMA_NAMES[base]}.{ending}"
        elif ending in ("A_log", "dt_bias"):
            new = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}[ending]
        elif ".experts." in base:
            kind = base.rpartition(".")[2].removesuffix("_proj")
            new = f"ffn_{'gate_up' if fused and kind in ('gate', 'up') else kind}_exps.{ending}"
        elif ending == "sinks":
            new = "attn_sinks.weight"
        elif base == "post_attention_layernorm" and config["model_type"] not in _FFN_NORM:
            new = f"post_attention_norm.{ending}"
        else:
            new = f"{_NAMES[base]}.{ending}"
        found.setdefault(layer + new, []).append(name)
    return found


def _arranged(config: dict[str, Any], name: str, given: torch.Tensor) -> torch.Tensor:
    """Arrange the elements as the file has them. given: the stacked tensors of the experts, or one tensor."""
    if "_exps.bias" in name:
        return given
    if "_exps.weight" in name:
        experts = config.get("num_experts") or config["num_local_experts"]
        return given.view(experts, -1, given.shape[-1]).contiguous()
    tensor = given[0]
    stem = name.split(".", 2)[-1].removesuffix(".weight")
    if config["model_type"] in ("llama", "mistral") and stem.split(".")[0] in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"] if stem.startswith("attn_q") else config["num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()
    if "linear_conv_kernel_dim" not in config:
        return tensor.contiguous()
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = values * config["linear_value_head_dim"]

    def tiled(part: torch.Tensor) -> torch.Tensor:
        """From the value heads of key head 0, then those of key head 1, to the first value heads of all key heads."""
        return part.reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(part.shape)

    if stem in ("attn_qkv", "ssm_conv1d"):
        tensor = tensor.squeeze()
        tensor = torch.cat([tensor[:-size], tiled(tensor[-size:])])
    elif stem in ("attn_gate", "ssm_a", "ssm_dt.bias", "ssm_alpha", "ssm_beta"):
        tensor = tiled(tensor)
    elif stem == "ssm_out":
        tensor = tiled(tensor.t().contiguous()).t()
    return (tensor[0] if stem == "ffn_gate_inp_shexp" else tensor).contiguous()


def _changed(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Change values as the converters of Gemma 3 and Qwen3.5 do."""
    if config["model_type"] == "gemma3_text":
        return tensor + 1 if name.endswith("norm.weight") else tensor
    if "linear_conv_kernel_dim" not in config:
        return tensor
    if name.endswith("ssm_a"):
        return -tensor.exp()
    return tensor + 1 if name.endswith("norm.weight") and "ssm_norm" not in name else tensor


def add_tiny_vocabulary(writer: Any, vocab_size: int = 320) -> None:
    """Add a byte-level vocabulary with one merge, whose last token ends an answer."""
    letters = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"[PAD{token_id}]" for token_id in range(len(letters) + 1, vocab_size - 1)]
    writer.add_token_list([*letters, "ab", *unused, "<|im_end|>"])
    writer.add_token_types([1] * (len(letters) + 1) + [5] * len(unused) + [3])
    writer.add_token_merges(["a b"])
