"""A two-layer Qwen3 checkpoint with hand-set weights, which continues a text like an earlier passage of the text.

The model is an induction head: it looks up the last 6 tokens in the whole context, and predicts the token that followed
the same 6 tokens earlier. The checkpoint is an ordinary one (`Qwen3ForCausalLM`, 0.7M parameters), so a long passkey
prompt shows whether an engine attends to every token at the right position. Nothing is trained; the whole construction
is described here.

**Residual stream**, 9 blocks of 16 channels:

    block 0      a constant 1, in its first channel
    block 1      the code of this token                              written by the embedding
    block 1 + m  the code of the token m back, m = 1..6              written by layer 1
    block 8      the code of the next token                          written by layer 2, read by the head

A code has length 1, so the stream's length at the three norms is sqrt(2), sqrt(8) and 3 for any text. The norms'
weights undo exactly this scale: norm(x) = x, so the rest of this description leaves out the norms. (Near the start
there is no token m back, and layer 1 copies another token. So only the first 6 positions cannot be found.)

**Rotary.** theta = 1e32 rotates pair i of the 64 (dims i and i + 64) by 10^(-i/2) radians per token. Pairs 0..11 tell
positions apart. Pairs 16..63 rotate by less than 0.011 radians in 2^20 tokens, so they do not depend on positions.

**Layer 1: which token was m back?** One head per m. Query and key come from the constant: every position has the same
key k, and the query of head m is k rotated back by m tokens. With b_i the share of pair i in |k|^2, the score of the
token d back is S * sum_i b_i cos(10^(-i/2) (d - m)), which is S at d = m. The shares fall as 0.8^i. Then the tokens
next to m are 19.5 below S, and all others up to 2^20 tokens together have 3e-8 of the weight. The value is the token's
code.

**Layer 2: where did these 6 tokens occur before?** The query holds the codes of the last 6 tokens (blocks 1..6), the
key at a token the codes of the 6 tokens before it (blocks 2..7), both in the pairs that do not depend on positions. The
score is S/6 times the sum of 6 products of codes: S for a full match. The value is the code of the key's token, which
followed the match. Each of the 6 heads finds the match and copies a different part of the code's channels, so every
head has to be right.

**Codes.** Two codes have a product of at most 1/4, so with 5 of 6 tokens equal the score is at most S (5 + 1/4)/6, that
is S/8 below a match. The bytes have the Nordstrom-Robinson code, here as the octacode over Z4 under the Gray map
(0, 1, 2, 3 -> 00, 01, 11, 10): 256 words of 16 bits, any two at least 6 bits apart, a bit written as +-1/4. Unit
vectors have products of +-1/4 with all of them, and are the codes of the special tokens. Every entry is exact in
bfloat16.

**Sharpness.** The q and k norms give vectors of length 4 sqrt(128), so S = 16 sqrt(128) = 181 and S/8 = 22.6. If every
one of 131,072 tokens matched in 5 of 6, they would together have exp(11.8 - 22.6) = 2e-5 of the weight. Rounding to
bfloat16 moves a score by less than 1.
"""

import json
import logging
import math
import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.utils import user_cache

logger = logging.getLogger(__name__)

# -- the tokenizer: one token per byte of UTF-8, whose id is its value, and two special tokens -----------------------

NUM_BYTES = 256
END_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (END_TOKEN, "<|pad|>")  # ids 256, 257
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
END_TOKEN_ID = NUM_BYTES

# A model that only copies needs its own template. If the last characters of a message occurred in an earlier line, the
# answer follows the message directly: it is the rest of that line. Any other message is followed by REPLY_MARK, which
# the model continues with HELP, because every prompt begins with the two. Every line ends with the end token, so an
# answer ends with its line.
MATCH_TOKENS = 6  # tokens that the model looks up
REPLY_MARK = "\nModel: "
HELP = "I complete lines; type the first words of one from above."
_CONSTANTS = {"mark": REPLY_MARK, "help": HELP, "end": END_TOKEN, "num_matched": MATCH_TOKENS}
CHAT_TEMPLATE = (
    "".join(f"{{%- set {name} = {value!r} -%}}\n" for name, value in _CONSTANTS.items())
    + """\
{%- set ns = namespace(text=mark ~ help ~ end) -%}
{%- for message in messages -%}
{%- set content = message['content'] | replace('\\n', end ~ '\\n') -%}
{%- if message['role'] == 'user' -%}
{%- set before = ns.text ~ '\\n' ~ content[:-1] -%}
{%- set ending = content[-num_matched:] -%}
{%- set is_known = ending | length == num_matched and ending in before and ending ~ end not in before -%}
{%- set ns.text = ns.text ~ '\\n' ~ content ~ ('' if is_known else end ~ mark) -%}
{%- elif message['role'] == 'system' -%}
{%- set ns.text = ns.text ~ '\\n' ~ content ~ end -%}
{%- else -%}
{%- set ns.text = ns.text ~ content ~ end -%}
{%- endif -%}
{%- endfor -%}
{{- ns.text -}}
"""
)


def byte_symbols() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary, in the order of the bytes.

    A printable Latin-1 character represents itself, and the n-th of the other bytes is character 256 + n. This is
    GPT-2's table, which the ByteLevel parts of `tokenizers` use.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(NUM_BYTES + others.index(byte)) for byte in range(NUM_BYTES)]


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json in the form that `transformers.AutoTokenizer` reads."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))  # no merges, so every byte is a token
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


# -- the model -------------------------------------------------------------------------------------------------------

VERSION = 2  # version of the checkpoint; part of the cache directory's name
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

CODE_DIM = 16
HEAD_DIM = 128
NUM_HEADS = MATCH_TOKENS  # heads of layer 1; codes in a query of layer 2
NUM_KV_HEADS = 2
NUM_LAYERS = 2
THIS_BLOCK, NEXT_BLOCK = 1, 2 + MATCH_TOKENS  # blocks of the residual stream; block 0 holds the constant
HIDDEN_SIZE = (NEXT_BLOCK + 1) * CODE_DIM
MLP_SIZE = 32  # all zeros
ROPE_THETA = 1e32
NUM_POSITION_PAIRS = 12
FIRST_FREE_PAIR = 16  # this pair and all later pairs do not depend on positions
SHARPNESS = 4.0
LOGIT_GAIN = 32.0


def build_retrieval_model(path: Path | None = None, *, dtype: str = "float32") -> Path:
    """Build the checkpoint if it does not exist, and return its directory (config, weights, tokenizer; 1 to 3 MB).

    path: a directory that is empty, does not exist, or holds this model, or None for a directory in the user's cache
    (nanovllm in $XDG_CACHE_HOME or ~/.cache). dtype: of the weights, "float32" or "bfloat16". Raises ConfigError if the
    dtype is unknown, and CheckpointError if `path` holds something else.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    path = path or user_cache() / f"retrieval-v{VERSION}-{dtype}"
    if _is_built(path, dtype):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write_checkpoint(scratch, dtype)
        _move_into_place(scratch, path, dtype)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("built the retrieval model in %s", path)
    return path


def model_config(dtype: str) -> dict[str, Any]:
    """Return the content of the checkpoint's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": MLP_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 2**20,
        "tie_word_embeddings": False,
        "eos_token_id": END_TOKEN_ID,
        "torch_dtype": dtype,
    }


def token_codes() -> torch.Tensor:
    """Return a code of length 1 per token, fp32 [VOCAB_SIZE, CODE_DIM]. Two codes have a product of at most 1/4."""
    generator = torch.tensor([(3, 1, 2, 1, 0, 0, 0, 1), (0, 3, 1, 2, 1, 0, 0, 1), (0, 0, 3, 1, 2, 1, 0, 1),
                              (0, 0, 0, 3, 1, 2, 1, 1)])  # fmt: skip
    gray = torch.tensor([(1, 1), (1, -1), (-1, -1), (-1, 1)]) / 4
    words = torch.tensor(list(product(range(4), repeat=4))) @ generator % 4
    byte_codes = gray[words].reshape(NUM_BYTES, CODE_DIM)
    return torch.cat((byte_codes, torch.eye(CODE_DIM)[: len(SPECIAL_TOKENS)]))


def model_weights() -> dict[str, torch.Tensor]:
    """Return all weights in fp32, by their names in the checkpoint."""
    codes = token_codes()
    embedding = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    embedding[:, 0] = 1
    embedding[:, _block(THIS_BLOCK)] = codes
    head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    head[:, _block(NEXT_BLOCK)] = LOGIT_GAIN * codes
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": _norm_weight(2 + MATCH_TOKENS + 1),
        "lm_head.weight": head,
    }
    attention = (_look_back_attention(), _induction_attention())
    stream_length_squared = (2, 2 + MATCH_TOKENS)
    for layer in range(NUM_LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": _norm_weight(stream_length_squared[layer]),
                "self_attn.q_norm": torch.full((HEAD_DIM,), SHARPNESS),
                "self_attn.k_norm": torch.full((HEAD_DIM,), SHARPNESS),
                **attention[layer],
                "post_attention_layernorm": torch.ones(HIDDEN_SIZE),
                "mlp.gate_proj": torch.zeros(MLP_SIZE, HIDDEN_SIZE),
                "mlp.up_proj": torch.zeros(MLP_SIZE, HIDDEN_SIZE),
                "mlp.down_proj": torch.zeros(HIDDEN_SIZE, MLP_SIZE),
            }.items()
        }
    return weights


def _look_back_attention() -> dict[str, torch.Tensor]:
    """Return layer 1: head m - 1 attends m tokens back and copies the attended token's code to block 1 + m."""
    q = torch.zeros(NUM_HEADS, HEAD_DIM, HIDDEN_SIZE)
    k = torch.zeros(NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE)
    o = torch.zeros(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM)
    pairs = torch.arange(NUM_POSITION_PAIRS)
    radians_per_token = ROPE_THETA ** (-2 * pairs.double() / HEAD_DIM)
    amplitude = 0.8 ** (pairs / 2)  # the square is the pair's share; q_norm and k_norm normalise the sum
    k[:, pairs, 0] = amplitude
    for head in range(NUM_HEADS):
        angle = (-(head + 1) * radians_per_token).float()
        q[head, pairs, 0] = amplitude * angle.cos()
        q[head, pairs + HEAD_DIM // 2, 0] = amplitude * angle.sin()
        o[_block(THIS_BLOCK + head + 1), head, :CODE_DIM] = torch.eye(CODE_DIM)
    return _projections(q, k, o)


def _induction_attention() -> dict[str, torch.Tensor]:
    """Return layer 2: each head finds the match of the last tokens and copies a part of the next token's code."""
    q = torch.zeros(NUM_HEADS, HEAD_DIM, HIDDEN_SIZE)
    k = torch.zeros(NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE)
    o = torch.zeros(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM)
    pairs = torch.arange(FIRST_FREE_PAIR, HEAD_DIM // 2)
    free_dims = torch.cat((pairs, pairs + HEAD_DIM // 2)).view(MATCH_TOKENS, CODE_DIM)
    channels = torch.arange(HIDDEN_SIZE).view(-1, CODE_DIM)
    for back in range(MATCH_TOKENS):
        q[:, free_dims[back], channels[THIS_BLOCK + back]] = 1
        k[:, free_dims[back], channels[THIS_BLOCK + back + 1]] = 1
    for dim in range(CODE_DIM):
        o[channels[NEXT_BLOCK, dim], dim % NUM_HEADS, dim] = 1
    return _projections(q, k, o)


def _projections(q: torch.Tensor, k: torch.Tensor, o: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the four projections, heads flattened. In both layers, the value is the token's code."""
    v = torch.zeros(NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE)
    v[:, :CODE_DIM, _block(THIS_BLOCK)] = torch.eye(CODE_DIM)
    return {
        "self_attn.q_proj": q.flatten(0, 1),
        "self_attn.k_proj": k.flatten(0, 1),
        "self_attn.v_proj": v.flatten(0, 1),
        "self_attn.o_proj": o.flatten(1, 2),
    }


def _norm_weight(length_squared: int) -> torch.Tensor:
    """Return the weight that makes an RMSNorm leave a vector of this length unchanged."""
    return torch.full((HIDDEN_SIZE,), math.sqrt(length_squared / HIDDEN_SIZE))


def _block(block: int) -> slice:
    """Return the channels of a block of the residual stream."""
    return slice(block * CODE_DIM, (block + 1) * CODE_DIM)


def _is_built(path: Path, dtype: str) -> bool:
    """Return True if `path` holds the model. The model is moved there as a whole, so config.json proves all files."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    config = path / "config.json"
    if config.is_file() and json.loads(config.read_text()) == model_config(dtype):
        return True
    raise CheckpointError(
        f"path={str(path)!r} holds something other than the {dtype} retrieval model; give an empty one"
    )


def _write_checkpoint(directory: Path, dtype: str) -> None:
    weights = {name: weight.to(DTYPES[dtype]).contiguous() for name, weight in model_weights().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(directory)
    # Greedy, because answers are copies. Short, because the model does not end an answer that copies nothing.
    defaults = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": END_TOKEN_ID}
    (directory / "generation_config.json").write_text(json.dumps(defaults, indent=2))
    (directory / "config.json").write_text(json.dumps(model_config(dtype), indent=2))
    directory.chmod(0o755)  # mkdtemp made it private


def _move_into_place(scratch: Path, path: Path, dtype: str) -> None:
    try:
        scratch.rename(path)  # atomic; replaces an empty directory
    except OSError:
        if not _is_built(path, dtype):  # otherwise another process was faster
            raise
