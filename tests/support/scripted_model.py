"""A model that says what the user's message asks it to say, with the official chat template of Qwen3.5.

The official template renders every conversation, and refuses what it refuses for the real model. The template of this
model adds a script to the rendered text, before the turn that the answer continues: the answer, and then end tokens.
The model has one layer with one head. It attends to the token SCRIPT_TOKENS positions before the next one, where the
script has the next token, so it repeats the script after any prompt.

Marks in a user's message direct the answers:

    <<call NAME|PARAMETER|VALUE|PARAMETER|VALUE...>>   call this tool first
    <<then TEXT>>                                      the answer after the call; by default it quotes the result

The template reads the marks from the rendered text, so they work through any client. A request without tools is
answered with TEXT, or with NO_CALL. A request whose tools lack NAME gets an answer that lists the tools.

In a script, MARK precedes each character, and the pair is one token with the embedding of the character's byte.
So a script has as many tokens as characters, although the rest of the prompt is tokenized with merges. The text of a
script is ASCII; the template replaces other characters with "?".

The template comes from the package trl, which has the models' templates unchanged (Apache-2.0).
"""

import json
import math
import string
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanovllm.models.retrieval_model import byte_symbols

SCRIPT_TOKENS = 1024
MARK = "\ue000"
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n\t"
QUOTED_CHARS = 300  # characters of a tool's result that the answer quotes
THOUGHT = "I follow the script."
NO_CALL = "There is nothing to call."
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
END_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_TOKEN)
MAX_MODEL_LEN = 131072

NUM_MERGED = 4096  # tokens without the added ones
CODE_DIM = 64
HEAD_DIM = 128
HIDDEN_SIZE = 2 * CODE_DIM + 16  # the code of this token, the code of the next one, a constant
CONSTANT = 2 * CODE_DIM
THIS_CODE, NEXT_CODE = slice(0, CODE_DIM), slice(CODE_DIM, 2 * CODE_DIM)
ROPE_THETA = 1e32  # as in the retrieval model: 12 pairs rotate fast enough to tell positions apart
NUM_POSITION_PAIRS = 12

# It follows the official template, whose output is in `rendered`. `endings` are what `rendered` can end with, and the
# number of their tokens
SCRIPT_TEMPLATE = """
{%- set ns = namespace(script='', num_tokens=0, names=[], ending='') -%}
{%- for text, num_tokens in endings if rendered.endswith(text) -%}
    {%- set ns.ending, ns.num_tokens = text, num_tokens -%}
{%- endfor -%}
{%- for tool in tools or [] %}{% set ns.names = ns.names + [tool.function.name] %}{% endfor -%}
{%- set then = rendered.split('<<then ')[-1].split('>>')[0] if '<<then ' in rendered else '' -%}
{%- set asked = rendered.split('<<call ')[-1] if tools and '<<call ' in rendered else '' -%}
{%- set call = asked.split('>>')[0].split('|') -%}
{%- if not asked -%}
    {%- set text = then or no_call -%}
{%- elif '<tool_response>' in asked -%}
    {%- set result = asked.split('<tool_response>')[-1].split('</tool_response>')[0] | trim -%}
    {%- set text = then or 'It says: ' ~ result[:quoted] -%}
{%- elif call[0] not in ns.names -%}
    {%- set text = 'There is no tool ' ~ call[0] ~ ', only ' ~ ns.names | join(', ') -%}
{%- else -%}
    {%- set text = '' -%}
{%- endif -%}
{%- macro say(text) -%}
    {%- for character in text -%}
        {%- set ns.script = ns.script ~ mark ~ (character if character in characters else '?') -%}
    {%- endfor -%}
    {%- set ns.num_tokens = ns.num_tokens + text | length -%}
{%- endmacro -%}
{%- macro tag(name) -%}
    {%- set ns.script, ns.num_tokens = ns.script ~ name, ns.num_tokens + 1 -%}
{%- endmacro -%}
{%- if ns.ending.endswith('<think>\\n') -%}
    {{- say(thought ~ '\\n') ~ tag('</think>') ~ say('\\n\\n') -}}
{%- endif -%}
{%- if text -%}
    {{- say(text) -}}
{%- else -%}
    {{- tag('<tool_call>') ~ say('\\n<function=' ~ call[0] ~ '>\\n') -}}
    {%- for index in range(1, call | length, 2) -%}
        {{- say('<parameter=' ~ call[index] ~ '>\\n' ~ call[index + 1] ~ '\\n</parameter>\\n') -}}
    {%- endfor -%}
    {{- say('</function>\\n') ~ tag('</tool_call>') -}}
{%- endif -%}
{%- if not ns.ending or ns.num_tokens >= num_script_tokens -%}
    {{- raise_exception('the script needs a turn to continue, and fewer tokens') -}}
{%- endif -%}
{%- set before = rendered[:rendered | length - ns.ending | length] -%}
{{- before ~ ns.script ~ end * (num_script_tokens - ns.num_tokens) ~ ns.ending -}}
"""
ENDINGS = ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n")


def official_template() -> str:
    path = distribution("trl").locate_file("trl/chat_templates/qwen3_5_think.jinja")
    return Path(str(path)).read_text(encoding="utf-8")


def chat_template(tokenizer: Tokenizer) -> str:
    constants = {
        "endings": [(text, len(tokenizer.encode(text).ids)) for text in ENDINGS],
        "mark": MARK,
        "characters": CHARACTERS,
        "thought": THOUGHT,
        "no_call": NO_CALL,
        "quoted": QUOTED_CHARS,
        "end": END_TOKEN,
        "num_script_tokens": SCRIPT_TOKENS,
    }
    settings = "".join(f"{{%- set {name} = {value!r} -%}}\n" for name, value in constants.items())
    return f"{settings}{{%- set rendered -%}}{official_template()}{{%- endset -%}}{SCRIPT_TEMPLATE}"


def build_scripted_model(directory: Path, texts: list[str]) -> Path:
    """Write the checkpoint. The tokenizer's merges come from `texts`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer(texts)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": chat_template(tokenizer),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id(END_TOKEN)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": end}))
    num_tokens = tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps(_model_config(num_tokens, end)))
    save_file(_weights(tokenizer), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=NUM_MERGED, initial_alphabet=byte_symbols(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL_TOKENS])
    marked = [MARK + character for character in CHARACTERS]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in (*TAGS, *marked)])
    return tokenizer


def _model_config(num_tokens: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": num_tokens,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def _weights(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """The norms undo the length of their input, so that norm(x) = x, as in the retrieval model."""
    num_tokens = tokenizer.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (num_tokens, CODE_DIM), generator=generator) * 2.0 - 1
    codes /= math.sqrt(CODE_DIM)
    head = torch.zeros(num_tokens, HIDDEN_SIZE)
    head[:, NEXT_CODE] = 32 * codes
    symbols = byte_symbols()
    for character in CHARACTERS:  # embedded as the byte, and never generated
        marked = tokenizer.token_to_id(MARK + character)
        codes[marked] = codes[tokenizer.token_to_id(symbols[ord(character)])]
        head[marked] = 0
    embedding = torch.zeros(num_tokens, HIDDEN_SIZE)
    embedding[:, THIS_CODE], embedding[:, CONSTANT] = codes, 1
    q, k = torch.zeros(HEAD_DIM, HIDDEN_SIZE), torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    v, o = torch.zeros(HEAD_DIM, HIDDEN_SIZE), torch.zeros(HIDDEN_SIZE, HEAD_DIM)
    pairs = torch.arange(NUM_POSITION_PAIRS)
    amplitude = 0.8 ** (pairs / 2)
    angle = -(SCRIPT_TOKENS - 1) * ROPE_THETA ** (-2 * pairs.double() / HEAD_DIM)
    k[pairs, CONSTANT] = amplitude
    q[pairs, CONSTANT] = amplitude * angle.cos().float()
    q[pairs + HEAD_DIM // 2, CONSTANT] = amplitude * angle.sin().float()
    v[:CODE_DIM, THIS_CODE] = o[NEXT_CODE, :CODE_DIM] = torch.eye(CODE_DIM)
    layer = {
        "input_layernorm": _norm(2),
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": o,
        "self_attn.q_norm": torch.full((HEAD_DIM,), 4.0),
        "self_attn.k_norm": torch.full((HEAD_DIM,), 4.0),
        "post_attention_layernorm": torch.ones(HIDDEN_SIZE),
        "mlp.gate_proj": torch.zeros(16, HIDDEN_SIZE),
        "mlp.up_proj": torch.zeros(16, HIDDEN_SIZE),
        "mlp.down_proj": torch.zeros(HIDDEN_SIZE, 16),
    }
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": _norm(3),
        "lm_head.weight": head,
        **{f"model.layers.0.{name}.weight": weight.contiguous() for name, weight in layer.items()},
    }


def _norm(length_squared: int) -> torch.Tensor:
    """The weight that makes an RMSNorm leave a vector of this length unchanged."""
    return torch.full((HIDDEN_SIZE,), math.sqrt(length_squared / HIDDEN_SIZE))
