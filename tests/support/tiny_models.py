"""Tiny random checkpoints of every supported architecture, written by transformers. For everybody's tests."""

from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral", "seed_oss", "qwen3_moe")
WINDOWED = ("gpt_oss",)  # some layers have a window
HYBRIDS = ("qwen3_5", "qwen3_5_moe")  # most layers are recurrent
GEMMAS = ("gemma3", "gemma4", "gemma4_moe")  # every other layer has a window
GEMMA_WINDOW = 8
RECURRENT = {  # sizes of the recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
WINDOW, SWIGLU_EXPERTS = 12, {"num_local_experts": 8, "num_experts_per_tok": 3}
ROPES: dict[str, dict[str, Any]] = {  # `rope_scaling` for max_position_embeddings=128
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def write_tiny_model(
    directory: Path,
    architecture: str = "qwen3",
    *,
    rope: str | dict[str, Any] = "default",
    tied: bool = False,
    bias: bool = False,
    vocab_size: int = 320,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 128,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    experts: dict[str, Any] | None = None,
    recurrent: dict[str, Any] | None = None,
    with_vision: bool = False,
    with_mtp: bool = False,
    gemma: dict[str, Any] | None = None,
) -> Path:
    """Write config.json and safetensors to `directory` and return it. The same arguments write the same weights.

    The weights are such that greedy output does not repeat one token: embeddings are small against the layers, so
    that the next token depends on what attention saw. `bias`: where the architecture has the choice (llama: every
    linear layer, qwen3: attention). Qwen2 has biases on q, k, v always, and head_dim = hidden_size / num_heads.

    Every fourth layer of a hybrid model is attention, or every second one if 4 does not divide their number.
    `with_vision`: its text part is nested, beside a vision tower. `with_mtp`: it has a draft head, which transformers
    does not read. `gemma`: entries of config.json that replace others in a Gemma.

    The last layer of a Gemma attends to all keys, and so does every second one before it. In Gemma 4 these layers have
    larger heads, and no v_proj.
    """
    import transformers

    if architecture in GEMMAS:
        types = ["full_attention" if (num_layers - i) % 2 else "sliding_attention" for i in range(num_layers)]
        text = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": max_position_embeddings,
            "sliding_window": GEMMA_WINDOW,
            "layer_types": types,
            "tie_word_embeddings": tied,
            "attention_bias": bias,
            "eos_token_id": vocab_size - 1,
        }
        if architecture == "gemma3":
            text |= {"query_pre_attn_scalar": 24, "rope_scaling": dict(ROPES[rope] if isinstance(rope, str) else rope)}
        else:
            text |= {"final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
            text |= {"global_head_dim": 2 * head_dim, "num_key_value_heads": 2 * num_kv_heads}
            text |= {"num_global_key_value_heads": num_kv_heads}
        if architecture == "gemma4_moe":
            text |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
        text |= gemma or {}
        kind = "Gemma3" if architecture == "gemma3" else "Gemma4"
        whole = getattr(transformers, f"{kind}TextConfig")(**text)
        if with_vision:
            vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            vision |= {"patch_size": 2, "image_size": 8, "head_dim": 8, "num_key_value_heads": 2}
            whole = getattr(transformers, f"{kind}Config")(
                text_config=whole.to_dict(), vision_config=vision, tie_word_embeddings=tied
            )
        form = "ForConditionalGeneration" if with_vision else "ForCausalLM"
        return _write(getattr(transformers, kind + form)(whole), directory, seed, dtype, sharded)
    if architecture in HYBRIDS:
        kind = "Qwen3_5Moe" if architecture == "qwen3_5_moe" else "Qwen3_5"
        scaling = dict(ROPES[rope] if isinstance(rope, str) else rope)
        interval = 2 if num_layers % 4 else 4
        sparse = {**EXPERTS, "shared_expert_intermediate_size": 64, **(experts or {})}
        text = getattr(transformers, f"{kind}TextConfig")(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25, **scaling},
            layer_types=["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)],
            tie_word_embeddings=tied,
            attention_bias=bias,
            eos_token_id=vocab_size - 1,
            **(recurrent or RECURRENT),
            **(sparse if architecture == "qwen3_5_moe" else {"intermediate_size": intermediate_size}),
            **({"mtp_num_hidden_layers": 1} if with_mtp else {}),
        )
        if with_vision:
            vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2}
            vision |= {"out_hidden_size": hidden_size, "num_position_embeddings": 16}
            whole = getattr(transformers, f"{kind}Config")(
                text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied
            )
            model = getattr(transformers, f"{kind}ForConditionalGeneration")(whole)
        else:
            model = getattr(transformers, f"{kind}ForCausalLM")(text)
        _write(model, directory, seed, dtype, sharded)
        if with_mtp:
            _add_mtp_head(model, directory, seed)
        return directory
    kinds = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral", "seed_oss": "SeedOss"}
    kinds |= {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}
    options: dict[str, Any] = {
        "qwen3": {"attention_bias": bias, "head_dim": head_dim},
        "qwen2": {},
        "llama": {"attention_bias": bias, "mlp_bias": bias, "head_dim": head_dim},
        "mistral": {"sliding_window": None, "head_dim": head_dim},
        "qwen3_moe": {"attention_bias": bias, "head_dim": head_dim, **(experts or EXPERTS)},
        "gpt_oss": {
            "attention_bias": True,
            "head_dim": head_dim,
            "sliding_window": WINDOW,
            **(experts or SWIGLU_EXPERTS),
        },
        "seed_oss": {"attention_out_bias": bias, "mlp_bias": bias, "head_dim": head_dim},
    }[architecture]
    config = getattr(transformers, f"{kinds[architecture]}Config")(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        rope_theta=10000.0,
        rope_scaling=dict(ROPES[rope] if isinstance(rope, str) else rope),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=vocab_size - 1,
        pad_token_id=None,
        **options,
    )
    return _write(getattr(transformers, f"{kinds[architecture]}ForCausalLM")(config), directory, seed, dtype, sharded)


def _write(model: Any, directory: Path, seed: int, dtype: torch.dtype, sharded: bool) -> Path:
    _randomise(model, seed)
    model.to(dtype).save_pretrained(directory, max_shard_size="100KB" if sharded else "5GB")
    return directory


def _add_mtp_head(model: Any, directory: Path, seed: int) -> None:
    """Add the tensors of a draft head: the model's first layer of attention once more, with other weights."""
    from safetensors.torch import load_file, save_file

    file, text = directory / "model.safetensors", model.config.get_text_config()
    tensors, number = load_file(file), text.layer_types.index("full_attention")
    prefix = next(name for name in tensors if f".layers.{number}." in name and ".visual." not in name)
    prefix = prefix.partition(f".layers.{number}.")[0] + f".layers.{number}."
    shapes = {
        f"mtp.layers.0.{n.removeprefix(prefix)}": each.shape for n, each in tensors.items() if n.startswith(prefix)
    }
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    shapes |= {f"mtp.{name}.weight": torch.Size([text.hidden_size]) for name in names}
    shapes["mtp.fc.weight"] = torch.Size([text.hidden_size, 2 * text.hidden_size])
    generator = torch.Generator().manual_seed(seed + 1)
    head = {name: (torch.randn(shape, generator=generator) * 0.13).to(model.dtype) for name, shape in shapes.items()}
    save_file(tensors | head, file, metadata={"format": "pt"})


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clamps = model.config.model_type == "gpt_oss"  # large enough values for some to be clamped
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                is_added_to_one = parameter.abs().max() == 0
                parameter.uniform_(0.8, 1.2, generator=generator).sub_(float(is_added_to_one))
                continue
            if name.endswith("scale"):
                parameter.uniform_(0.5, 1.5, generator=generator)
                continue
            if name.endswith(("A_log", "dt_bias")):
                parameter.uniform_(-2, 1, generator=generator)
                continue
            if "conv1d" in name:
                parameter.normal_(0, 0.5, generator=generator)
                continue
            if name.endswith("sinks"):
                parameter.normal_(1, 1, generator=generator)
                continue
            if clamps and "experts.gate_up_proj" in name:
                parameter.normal_(0, 0.4, generator=generator)
                continue
            is_query_or_key = "q_proj" in name or "k_proj" in name
            std = 0.03 if "embed" in name else 0.2 if is_query_or_key else 0.13
            parameter.normal_(0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3, generator=generator)


def write_tiny_tokenizer(directory: Path, vocab_size: int = 320) -> Path:
    """A byte-level tokenizer for such a model: ids 0..255 are bytes, the last is the end token, the rest "<id>"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"<{token_id}>" for token_id in range(len(letters), vocab_size - 1)), "<eos>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(directory)
    return directory


def reference_model(directory: Path) -> Any:
    """The checkpoint as transformers runs it on the CPU in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).float().eval()


def greedy_reference(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy token ids by transformers, the end token ignored."""
    model = reference_model(directory)
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()
