"""What quantizing while loading costs on real text: `python -m benchmarks.real_formats`, or in `benchmarks.real_model`.

The weights of SmolLM2-135M-Instruct are quantized to each format, and transformers computes in fp32 how far the
probabilities of the next token move: KL is the mean of the Kullback-Leibler divergence, top-1 the share of tokens whose
most likely successor is the same. The engine's perplexity is compared, too.

The file has its weights in blocks of 32 columns. A quantizer to the same blocks would find their scales and lose
nothing, which says nothing about other models, so all features are shuffled first. The order of features changes no
result. Rows have 576 columns, which are not whole blocks of 256; the last blocks are filled up with zeros, and `bits`
counts whole blocks.
"""

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.reporting import report, run_options, versions
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.gguf import TYPES, read_model
from nanovllm.checkpoint.gguf_config import settings
from nanovllm.checkpoint.quantization import KL_ON_SMOLLM2, QUANTIZATIONS, Quantization
from nanovllm.models.block_quantizing import quantize_to_blocks
from nanovllm.models.gguf_tensors import open_gguf
from nanovllm.models.gguf_values import dequantize
from nanovllm.models.quantized_weights import quantize
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.utils.arithmetic import ceil_div

_UNIT = 256  # columns of the largest block


def texts() -> list[str]:
    """Return four modules of the standard library, and four parts of Python's manual."""
    import difflib
    import textwrap
    from pydoc_data import topics

    manual = "\n\n".join(topics.topics.values())
    code = [inspect.getsource(module) for module in (argparse, textwrap, difflib, inspect)]
    return code + [manual[start : start + 20_000] for start in range(0, 80_000, 20_000)]


def load_reference(file: Path, stored: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Return the model in transformers, with its weights rounded to `stored`, and the tokenizer.

    The file is read here because transformers takes several seconds to read its vocabulary, and this twice.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**settings(read_model(file)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    weights = {name: tensor.read().to(stored) for name, tensor in open_gguf(file).items()}
    model.load_state_dict(weights, strict=False)  # the output head is the embedding table
    return model, load_tokenizer(file)


@torch.no_grad()
def shuffle(model: Any) -> None:
    """Shuffle the features between layers, within each MLP, and of v within each head."""
    generator, config = torch.Generator().manual_seed(0), model.config

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)

    def select(layer: Any, features: torch.Tensor, dim: int) -> None:
        layer.weight.copy_(layer.weight.index_select(dim, features))

    hidden = order(config.hidden_size)
    select(model.model.embed_tokens, hidden, 1)
    select(model.model.norm, hidden, 0)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            select(norm, hidden, 0)
        for reads in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            select(reads, hidden, 1)
        for writes in (attention.o_proj, mlp.down_proj):
            select(writes, hidden, 0)
        inner = order(config.intermediate_size)
        for writes in (mlp.gate_proj, mlp.up_proj):
            select(writes, inner, 0)
        select(mlp.down_proj, inner, 1)
        head_dim, num_heads, num_kv_heads = attention.head_dim, config.num_attention_heads, config.num_key_value_heads
        heads = torch.stack([order(head_dim) for _ in range(num_kv_heads)])
        select(attention.v_proj, (heads + head_dim * torch.arange(num_kv_heads)[:, None]).flatten(), 0)
        heads = heads.repeat_interleave(num_heads // num_kv_heads, 0)
        select(attention.o_proj, (heads + head_dim * torch.arange(num_heads)[:, None]).flatten(), 1)


def rounded(weight: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, float]:
    """Return the values of a weight in a layer's format, and the bits of a value."""
    num_columns = weight.shape[1]
    if quantization.block_type is None:
        quantize(weight, quantization).copy_values(values := torch.empty_like(weight))
        return values, quantization.bits + 32 / num_columns
    (kind,) = (each for each in TYPES.values() if each.name == quantization.block_type)
    whole = F.pad(weight, (0, -num_columns % _UNIT))
    values = dequantize(quantize_to_blocks(whole, kind.name), kind)
    return values[:, :num_columns], 8 * kind.num_bytes / kind.num_values


def measure(names: list[str], model: Any, tokenizer: Any, num_tokens: int) -> list[dict[str, Any]]:
    """Return the losses of formats, on the first `num_tokens` tokens of each text. The model's features are shuffled.
    Its weights are replaced.
    """
    ids = torch.tensor([tokenizer.encode(text[: 8 * num_tokens])[:num_tokens] for text in texts()])
    layers = {
        name: layer for name, layer in model.model.named_modules(prefix="model") if isinstance(layer, torch.nn.Linear)
    }
    stored = {name: layer.weight.data for name, layer in layers.items()}
    exact, rows = _log_probabilities(model, ids), []
    for name in names:
        num_bits, num_weights = 0.0, 0
        for layer_name, weight in stored.items():
            columns = ceil_div(weight.shape[1], _UNIT) * _UNIT
            quantization = QUANTIZATIONS[name].format_of(layer_name)
            quantization = quantization and quantization.for_columns(columns)
            assert quantization is not None, "all layers of the decoder are quantized"
            layers[layer_name].weight.data, bits = rounded(weight, quantization)
            num_bits, num_weights = num_bits + bits * weight.numel(), num_weights + weight.numel()
        found = _log_probabilities(model, ids)
        divergences = [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(exact, found, strict=True)]
        same = [float((p.argmax(-1) == q.argmax(-1)).float().mean()) for p, q in zip(exact, found, strict=True)]
        kl, top_1 = (sum(each) / len(ids) for each in (divergences, same))
        rows.append({"format": name, "bits": num_bits / num_weights, "kl": kl, "top_1": top_1})
        print(f"{name:<12} {rows[-1]['bits']:5.2f}  {kl:.4f}  {top_1:.3f}", flush=True)
    return rows


@torch.inference_mode()
def _log_probabilities(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the logarithms of the next token's probabilities for each text, [tokens, vocabulary]."""
    return [model(each[None]).logits[0].log_softmax(-1) for each in ids]


def perplexities(file: Path, num_tokens: int) -> dict[str, float]:
    """Return the perplexity of the texts with the weights of the file, of the engine and of transformers."""
    model, tokenizer = load_reference(file, torch.float32)
    shuffle(model)
    prompts = [tokenizer.encode(text[: 8 * num_tokens])[:num_tokens] for text in texts()]
    expected = []
    for ids, found in zip(prompts, _log_probabilities(model, torch.tensor(prompts)), strict=True):
        expected += found[:-1].gather(1, torch.tensor(ids[1:])[:, None]).flatten().tolist()
    with LLM(file, device="cpu", dtype="float32", max_model_len=num_tokens + 1) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    got = [
        of_token[token_id].logprob
        for ids, output in zip(prompts, outputs, strict=True)
        for token_id, of_token in list(zip(ids, output["prompt_logprobs"], strict=True))[1:]
    ]
    both = {"engine": got, "transformers": expected}
    return {name: float(torch.tensor(each).double().mean().neg().exp()) for name, each in both.items()}


def table(file: Path, num_tokens: int = 500, names: list[str] | None = None) -> dict[str, Any]:
    """Print and return the losses of formats, and the perplexities."""
    print("KL: mean divergence from the weights in 16 bits; top-1: the share of tokens with the same successor")
    print("format        bits  KL      top-1", flush=True)
    model, tokenizer = load_reference(file)
    shuffle(model)
    rows = measure(names or list(KL_ON_SMOLLM2), model, tokenizer, num_tokens)
    found = perplexities(file, num_tokens)
    print("perplexity: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return {"formats": rows, "perplexity": found}


def main() -> None:
    from benchmarks.real_model import model_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=KL_ON_SMOLLM2, default=list(KL_ON_SMOLLM2))
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each of eight texts")
    parser.add_argument("--json", help="file for the result")
    args = parser.parse_args()
    found = table(model_file(), args.tokens, args.formats)
    report({"versions": versions(), "options": run_options(args)} | found, args.json)


if __name__ == "__main__":
    main()
