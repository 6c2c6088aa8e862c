"""Models that answer in the chat formats of others: the built-in model with their templates and special tokens.

The model copies what follows its newest tokens earlier in the prompt, so a user's message directs the answer: for a
message from SAID, the model says what follows the message's first word.
"""

from pathlib import Path

from model_files import copy_with_template
from tokenizer_kinds import add_tokens

from nanovllm.models.retrieval_model import END_TOKEN

TEMPLATES = Path(__file__).parent / "templates"
TOKENS = {
    "gpt-oss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    "gemma4": (
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        *("<|tool_response>", "<tool_response|>"),
    ),
    "qwen3": ("<think>", "</think>"),
}
ANALYSIS, FINAL, CALL = (
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
)
RAIN = CALL.replace("weather", "rain")
SAID: dict[str, dict[str, str]] = {  # reasoning and a text, or reasoning and a call
    "gpt-oss": {
        "text": f"assistant{ANALYSIS}I think 1.<|end|>{FINAL}It rains.<|return|>",
        "call": f'assistant{ANALYSIS}I ask.<|end|>{RAIN}{{"city": "Uri"}}<|call|>',
    },
    "gemma4": {
        "text": "model\n<|channel>thought\nI think 1.\n<channel|>It rains.<turn|>",
        "call": 'model\n<|channel>thought\nI ask.\n<channel|><|tool_call>call:rain{city:<|"|>Uri<|"|>}<tool_call|>'
        "<|tool_response>",
    },
    "qwen3": {"text": f"assistant\n<think>I think 1.</think>It rains.{END_TOKEN}"},
}


def write_chat_model(model: Path, directory: Path, name: str) -> Path:
    """Copy the built-in model `model` to a new folder, with the template and the tokens of a key of TOKENS."""
    copy_with_template(model, directory, (TEMPLATES / f"{name}.jinja").read_text())
    ids = [*range(0xF5, 0x100), 0xC0, 0xC1][: len(TOKENS[name])]  # bytes that UTF-8 has no use for
    add_tokens(directory, dict(zip(TOKENS[name], ids, strict=True)), special=True)
    return directory
