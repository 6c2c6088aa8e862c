r"""Where a text may be cut, so that its parts encode to the tokens of the whole.

Tokenizers in the style of GPT-2 split a text into words with a regular expression, and each word has its own tokens. A
cut is allowed where, whatever the text around it, one word ends and another begins, and where no word before it would
end differently if the text ended there:

- before a space, unless white space precedes it. In all patterns below, a space either starts a word or belongs to a
  word that consists of white space.
- before a full stop or comma of Chinese or Japanese that follows a letter of theirs.
- in GPT-2's pattern, before a line feed that follows no white space; in the others, where a line feed may belong to
  the punctuation before it, after the last line feed. o200k lets slashes follow there, too.

The patterns are known ones because each needs this proof: one with `\b` or a look behind would depend on what is before
the cut. NFC changes nothing across these cuts: space and line feed combine with nothing, and the punctuation with
nothing before it.
"""

import json
import re
from typing import Any

_ANY_CUT = r"(?<=\S)(?= )|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff0c])"
# Python's white space includes that of the tokenizers' regular expressions, so \S is safe in both
_GPT2_CUT = re.compile(_ANY_CUT + r"|(?<=\S)(?=\n)")
_CUT = re.compile(_ANY_CUT + r"|(?<=\n)(?=[^\s/])")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_UPPER, _O200K_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "Qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END,
    "Qwen3.5": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END,
    "Llama 3": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END,
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}*{_O200K_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}+{_O200K_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
    ),
}


def find_cuts(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern that matches, with no characters, where texts may be cut. None if this is not such a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if any(
        getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("encode", "_encode_plus")
    ):
        return None
    backend = tokenizer.backend_tokenizer
    is_known = (
        _has_only_plain_tokens(backend)
        and _state(backend.normalizer).get("type") in (None, "NFC")
        and type(backend.model).__name__ == "BPE"
        and not backend.model.dropout
        and _adds_only_special_tokens(_state(backend.post_processor))
    )
    return _cuts_of(_state(backend.pre_tokenizer)) if is_known else None


def _state(component: Any) -> dict[str, Any]:
    """A part of a tokenizer as tokenizer.json describes it; empty if there is none."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _has_only_plain_tokens(backend: Any) -> bool:
    """Whether no token that is found in texts before they are split into words has a cut inside, or takes the white
    space around it.
    """
    return not any(
        token.lstrip or token.rstrip or token.single_word or re.search(r"[\s\u3001\u3002\uff0c]", token.content)
        for token in backend.get_added_tokens_decoder().values()
    )


def _adds_only_special_tokens(processor: dict[str, Any]) -> bool:
    if processor.get("type") == "Sequence":
        return all(map(_adds_only_special_tokens, processor["processors"]))
    return processor.get("type") in (None, "ByteLevel", "TemplateProcessing")


def _cuts_of(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return _GPT2_CUT if last["use_regex"] else None
    split = splits[0]
    is_known = (
        len(splits) == 1
        and not last["use_regex"]
        and split["type"] == "Split"
        and (split["behavior"], split["invert"]) == ("Isolated", False)
        and split["pattern"].get("Regex") in PATTERNS.values()
    )
    return _CUT if is_known else None
