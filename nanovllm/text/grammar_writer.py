"""GrammarWriter: writes structured_outputs as a grammar in llguidance's Lark language.

The writer refuses requests that can be refused without compiling, and limits what llguidance does not limit: the size
of the text, and the depth of nested references in a schema.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import (
    AnswerTags,
    HarmonyTags,
    ReasoningTags,
    StructuredOutputs,
    TaggedJson,
    TaggedValue,
)
from nanovllm.text.answer_scan import JsonPlaces
from nanovllm.text.harmony import ANALYSIS, CHANNEL, CONSTRAIN, END, ENDS, FUNCTIONS, MESSAGE, START
from nanovllm.text.json_schema import Fault, find_faults, remove_faults, remove_neutral_keywords
from nanovllm.text.quoted_grammar import QuotedGrammar

MAX_CHARS = 200_000  # limit of a schema, a regex, or all choices together
# llguidance follows references by recursion. Each reference is followed at most once on the way down, through no more
# levels than the schema has, so the product of the two bounds the depth.
MAX_REFERENCE_DEPTH = 6000
MAX_WHITESPACE = 64  # around reasoning; without a limit, some models emit whitespace and never stop
MAX_REASON_CHARS = 300
MAX_FAULTS = 5  # in a message

# With forcing, if only one text can follow, the text is tokenized by the tokenizer. llguidance would write out the
# whole text first: gigabytes for ((a{1000}){1000}){1000}. Without forcing, masks hold every allowed token.
HEADER = '%llguidance {"no_forcing": true}\nstart: '
# Between two parts of JSON: spaces, or up to two line ends and an indentation (10 levels of 4 spaces)
_WHITESPACE = r"[ \t]{1,16}|[ \t]{0,2}(\r?\n){1,2}[ \t]{0,40}"
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write tool calls


class GrammarWriter:
    """Writes the grammar of one request in the Lark language.

    added_tokens: the tokenizer's added tokens. A tag that is an added token is matched as a token, because an added
    token never matches a text, and the model would write the tag as a token. special_ids: added tokens that no free
    text contains.
    relaxed: returns the rule of a schema, given its place in the request and its JSON text, without what a grammar
    cannot express. report: logs the parts that were left out of a schema, given its place in the request.
    """

    def __init__(
        self,
        added_tokens: Mapping[str, int],
        special_ids: Collection[int],
        relaxed: Callable[[str, str], str],
        report: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self._added_tokens, self._special_ids = added_tokens, special_ids
        self._relaxed, self._report = relaxed, report
        self._rules = {"TEXT": r"/(.|\n)*/"}  # by name
        self.schemas: list[Any] = []  # schemas that the answer must match exactly

    def write(self, outputs: StructuredOutputs, reasoning: AnswerTags | None) -> tuple[str, str, JsonPlaces | None]:
        """Return the name of the given field, the grammar, and the places of JSON in the answer or None without JSON.

        Raises RequestError for a request that can be refused without compiling the grammar.
        """
        kind, form = self._form(outputs)
        tagged = outputs.tagged_json
        has_free_text = False
        if tagged is not None:
            kind = "tagged_json"
        if isinstance(reasoning, HarmonyTags):
            form = self._messages(reasoning, tagged, form)
        elif tagged is not None:
            has_free_text = not (tagged.is_required or form) and bool(tagged.trigger)
            form = self._tagged(tagged, form, reasoning)
        before = self._reasoning(reasoning, has_free_text) if isinstance(reasoning, ReasoningTags) else ""
        rules = [f"{name}: {rule}" for name, rule in self._rules.items()]
        grammar = "\n".join([f"{HEADER}{f'{before}({form})' if before else form}", *rules])
        if tagged is not None:
            _check_size("tagged_json", len(grammar))
        return kind, grammar, _json_places(outputs, reasoning)

    def _form(self, outputs: StructuredOutputs) -> tuple[str, str]:
        """Return the name and the rule of the given field other than tagged_json, or "" and "" without such a field."""
        if outputs.json_object:
            return "json_object", self._json({"type": "object"}, whitespace_pattern=_WHITESPACE)
        if outputs.json is not None:
            return "json", self._json(outputs.json, whitespace_pattern=_WHITESPACE)
        if outputs.regex is not None:
            _check_size("regex", len(outputs.regex))
            return "regex", _regex(outputs.regex)
        if outputs.choice is not None:
            _check_size("choice", sum(map(len, outputs.choice)))
            self._rules["CHOICE"] = " | ".join(map(json.dumps, outputs.choice))
            return "choice", "CHOICE"
        return "", ""

    def _reasoning(self, tags: ReasoningTags, has_free_text: bool) -> str:
        """Return a rule for the reasoning and the white space after it.

        has_free_text: any text may follow the reasoning. Tags that are not tokens belong to this text.
        """
        if has_free_text and not {_first_tag(tags.begin), tags.end} <= self._added_tokens.keys():
            return ""
        self._rules["THOUGHT"] = _terminal(text_without([tags.end]))
        thoughts = self._any_text("THOUGHT", (tags.end,))
        if tags.end in self._added_tokens:
            thoughts += f" THOUGHT {self._literal(tags.end)}"
        else:
            self._rules["thought[lazy]"] = f"THOUGHT {json.dumps(tags.end)}"
            thoughts += " thought "
        if not has_free_text:
            self._rules["SPACE"] = f"/[ \\t\\r\\n]{{0,{MAX_WHITESPACE}}}/"
            thoughts += "SPACE "
        if tags.has_begun:
            return thoughts
        self._rules["LEADING_SPACE"] = f"/[ \\t\\r\\n]{{0,{MAX_WHITESPACE}}}/"
        return f"(LEADING_SPACE {self._literal(tags.begin)}{thoughts})? "

    def _any_text(self, text: str, without: tuple[str, ...]) -> str:
        """Return a rule for texts between added tokens, such as </think>, up to the next text."""
        named = {self._added_tokens.get(token) for token in without}
        others = sorted({*self._added_tokens.values()} - {*named, *self._special_ids})
        return f"({text} <[{_ranges(others)}]>)*" if others else '""'

    def _tagged(self, tagged: TaggedJson, form: str, reasoning: ReasoningTags | None) -> str:
        """Return the rule of an answer with tags, with one rule for each tag. form: the rule of an answer without tags.

        The lexer takes the shortest text that ends in the trigger, so free text contains no trigger. After a trigger
        that the model has spelled in letters, a tag must follow, too.
        """
        is_alternative = tagged.is_required or bool(form)
        start = "" if is_alternative else tagged.trigger
        names = tagged.names or [""] * len(tagged.tags)
        for i, ((begin, schema, end), name) in enumerate(zip(tagged.tags, names, strict=True)):
            values = schema if isinstance(schema, tuple) else [TaggedValue("", schema, "", True)]
            if tagged.quote:
                body = self._quoted(schema, str(i), name, tagged.quote)
            else:
                parts = (self._value(value, f"{i}_{j}", name, tagged.value_pattern) for j, value in enumerate(values))
                body = "".join(parts)
            self._rules[f"tag_{i}"] = f"{self._literal(begin.removeprefix(start))}{body}{self._literal(end)}"
        self._rules["tag"] = " | ".join(f"tag_{i}" for i in range(len(tagged.tags)))
        tags = "tag" if tagged.is_single else f"tag ({self._literal(tagged.separator)}tag)*"
        if is_alternative:
            return f"{tags} | {form}" if form else tags
        if not tagged.trigger:
            self._rules["FREE"] = _terminal(tagged.text_pattern or r"([ \t\r\n]*[^ \t\r\n{](.|\n)*)?")
            return f"FREE | {tags}"
        self._rules["FREE"] = _terminal(tagged.text_pattern)
        self._rules["SPELLED"] = f"FREE {json.dumps(tagged.trigger)}"
        self._rules["spelled[lazy]"] = "SPELLED"
        is_token = tagged.trigger in self._added_tokens
        self._rules["free"] = self._any_text(
            "FREE", (tagged.trigger, *([_first_tag(reasoning.begin)] if reasoning else []))
        )
        self._rules["trigger"] = f"free (spelled{f' | FREE {self._literal(tagged.trigger)}' if is_token else ''})"
        return "free FREE | trigger tag" if tagged.is_single else "(trigger tag)* free FREE"

    def _messages(self, tags: HarmonyTags, tagged: TaggedJson | None, form: str) -> str:
        """Return the rule of an answer in the harmony format. form: the rule of the text of its message to the user.

        What comes before the call or the answer is reasoning and, if neither a call nor a form is required, text to the
        user.
        """
        self._need_tokens(START, END, CHANNEL, MESSAGE, *([CONSTRAIN] if tagged else []))
        begin = f"{START}assistant"
        if not begin.startswith(tags.begun):
            raise RequestError(
                f"structured_outputs needs a prompt that ends before a message or with {begin!r}, not with "
                f"{shortened(tags.begun)!r}; leave add_generation_prompt on"
            )
        after = f"{self._literal(END)}{self._literal(begin)}"
        self._rules["MESSAGE"] = _terminal(text_without(ENDS))
        before = [f"{self._literal(f'{CHANNEL}{ANALYSIS}{MESSAGE}')}MESSAGE {after}"]
        if tagged is not None and not (tagged.is_required or form):
            before.append(f"{self._literal(f'{CHANNEL}commentary{MESSAGE}')}MESSAGE {after}")
        self._rules["before"] = f"({' | '.join(before)})*"
        endings = []
        if tagged is not None:
            for i, (name, schema, _) in enumerate(tagged.tags):
                to = f" to={FUNCTIONS}{name}"
                heads = [self._literal(each) for each in (f"{to}{CHANNEL}commentary", f"{CHANNEL}commentary{to}")]
                kinds = [self._literal(each) for each in (f" {CONSTRAIN}json", f"{CONSTRAIN}json", " json")]
                head = f"({' | '.join(heads)}) ({' | '.join(kinds)}) {self._literal(MESSAGE)}"
                self._rules[f"tag_{i}"] = f"{head}{self._json(schema, name, **_ONE_LINE)}"
            self._rules["tag"] = " | ".join(f"tag_{i}" for i in range(len(tagged.tags)))
            endings.append("tag" if tagged.is_single else f"tag ({after}before tag)*")
        if tagged is None or not tagged.is_required:
            endings.append(f"{self._literal(f'{CHANNEL}final{MESSAGE}')}({form or 'MESSAGE'})")
        return f"{self._literal(begin.removeprefix(tags.begun))}before ({' | '.join(endings)})"

    def _need_tokens(self, *tokens: str) -> None:
        if missing := [token for token in tokens if token not in self._added_tokens]:
            raise RequestError(
                f"structured_outputs cannot be used with this model's tokenizer: {missing[0]!r} is not a token; use "
                "the tokenizer that belongs to the chat template"
            )

    def _quoted(self, schema: Any, number: str, place: str, quote: str) -> str:
        """Return the rule of an object in the notation of quoted_grammar.py."""
        self._need_tokens(quote)
        schema = _parse_schema(schema)
        options = schema.pop("x-guidance", {}) if isinstance(schema, dict) else {}
        is_lenient = isinstance(options, dict) and options.get("lenient") is True
        remove_neutral_keywords(schema)
        faults = remove_faults(schema, lambda pattern: None) if is_lenient else find_faults(schema)
        if not is_lenient:
            refuse(faults)
        self._rules["QUOTED"] = _terminal(text_without([quote]))
        grammar = QuotedGrammar(self._rules, number, quote, self._literal, "QUOTED")
        rule = grammar.write(schema)
        if not is_lenient:
            refuse(grammar.faults)
        elif left_out := (*faults, *grammar.faults):
            self._report(place, tuple(map(str, left_out)))
        return rule

    def _value(self, value: TaggedValue, number: str, name: str, value_pattern: str) -> str:
        if value.choices:
            choices = " | ".join(self._literal(choice) or '""' for choice in value.choices)
            rule = f"{self._literal(value.begin)}({choices}) {self._literal(value.end)}"
        elif value.schema is None:
            # The text may not contain added tokens, so the closing tag is in letters, too
            self._rules["VALUE"] = _terminal(value_pattern)
            self._rules[f"VALUE_{number}"] = f"VALUE {json.dumps(value.end)}"
            self._rules[f"value_{number}[lazy]"] = f"VALUE_{number}"
            rule = f"{self._literal(value.begin)}value_{number} "
        else:
            place = f"{name} {value.begin.strip()}".strip()
            rule = f"{self._literal(value.begin)}{self._json(value.schema, place, **_ONE_LINE)} "
            rule += self._literal(value.end)
        return rule if value.is_required else f"({rule})? "

    def _literal(self, text: str) -> str:
        """Return strings of a grammar, each followed by a space: added tokens as tokens, all other parts as texts."""
        tokens = [token for token in sorted(self._added_tokens, key=len, reverse=True) if token in text]
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return "".join(
            f"<[{self._added_tokens[each]}]> " if each in tokens else f"{json.dumps(each)} " for each in pieces if each
        )

    def _json(self, schema: Any, place: str = "", **defaults: Any) -> str:
        """Return the rule of a JSON schema. place: the schema's place, for the log. defaults: options of llguidance.

        The options in the schema itself, under "x-guidance", take precedence. With the option "lenient", the parts of
        the schema that a grammar cannot express are left out. Otherwise such parts raise RequestError.
        """
        schema = _parse_schema(schema)
        if isinstance(schema, dict):
            options = schema.get("x-guidance", {})
            if isinstance(options, dict):
                schema["x-guidance"] = defaults | options
                if options.get("lenient") is True:
                    return self._relaxed(place, json.dumps(schema))
            remove_neutral_keywords(schema)
            refuse(find_faults(schema))
            self.schemas.append(schema)
        return f"%json {json.dumps(schema)}"


def _json_places(outputs: StructuredOutputs, reasoning: AnswerTags | None) -> JsonPlaces | None:
    """Return the places of JSON in an answer, or None without JSON. Other text must not be mistaken for JSON."""
    at_start = outputs.json is not None or outputs.json_object
    if isinstance(reasoning, HarmonyTags):
        headers = [f"final{MESSAGE}"] * at_start + [f"json{MESSAGE}"] * (outputs.tagged_json is not None)
        return JsonPlaces(False, None, tuple(map(str.encode, headers)), (END.encode(),)) if headers else None
    begins, ends = [], []
    tags = outputs.tagged_json.tags if outputs.tagged_json is not None else ()
    for begin, schema, end in tags:
        values = schema if isinstance(schema, tuple) else [TaggedValue(begin, schema, end, True)]
        begins += [value.begin for value in values if value.schema is not None]
        ends += [value.end for value in values if value.schema is not None]
    if not at_start and not begins:
        return None

    def encoded(texts: list[str]) -> tuple[bytes, ...]:
        return tuple({text.encode(errors="replace"): None for text in texts if text.strip()})

    quote = outputs.tagged_json.quote if outputs.tagged_json is not None else ""
    ends = [end for end in ends if len(end) > 1]
    return JsonPlaces(at_start, reasoning, encoded(begins), encoded(ends), quote.encode())


def refuse(faults: list[Fault]) -> None:
    """Raise RequestError for parts of a schema that a grammar cannot express."""
    if faults:
        raise RequestError(f"structured_outputs.json cannot be used: {shown_faults(faults)}; correct or simplify it")


def shown_faults(faults: list[Fault]) -> str:
    """Return a description of the first faults of a schema, for a message."""
    first = "; ".join(shortened(str(fault)) for fault in faults[:MAX_FAULTS])
    return f"{first}; and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else first


def _ranges(token_ids: list[int]) -> str:
    """Return ascending ids as ranges. Gemma's tokenizers have thousands of unused tokens, one after the other."""
    runs = [
        [token_id for _, token_id in group]
        for _, group in groupby(enumerate(token_ids), key=lambda each: each[1] - each[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _first_tag(text: str) -> str:
    """Return the text up to the end of its first tag."""
    return text[: text.index(">") + 1] if ">" in text else text


def _terminal(pattern: str) -> str:
    """Return a terminal that matches a regular expression, or any text for an empty expression."""
    return f"/{pattern.replace('/', chr(92) + '/')}/" if pattern else "TEXT"


def text_without(
    texts: Iterable[str], start: str = "[^<]*", continuations: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a regular expression, in Rust's syntax, of texts that do not contain any of `texts`.

    Each of `texts` begins with "<" and has no other "<". start: an expression for the text before the first "<".
    continuations: text -> an expression for the characters that must follow the text up to the next "<". The result is
    spelled out letter by letter, because the complement of a regular expression takes llguidance a hundred times
    longer.
    """
    words = dict.fromkeys((text[1:] for text in texts), "") | {text[1:]: then for text, then in continuations.items()}

    def rest(begun: str) -> str:
        """Return an expression for the characters that may follow "<" and `begun`."""
        if begun in words:
            return words[begun]
        following = {word[len(begun)]: None for word in words if word.startswith(begun) and word != begun}
        chars = "".join(re.escape(char) for char in following)
        branches = [re.escape(char) + after for char in following if (after := rest(begun + char))]
        return f"(?:{'|'.join(['', f'[^<{chars}][^<]*', *branches])})"

    return f"{start}(?:<{rest('')})*" if words else r"(?:.|\n)*"


def _check_size(kind: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise RequestError(
            f"structured_outputs.{kind} has {num_chars} characters, at most {MAX_CHARS}; make it smaller"
        )


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # regex_to_lark would drop an incomplete escape
        raise RequestError("structured_outputs.regex cannot be used: incomplete escape at its end; correct it")
    try:
        return f"/{regex_to_lark(regex, 'd')}/"  # \d matches only 0 to 9, not every digit of Unicode
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.regex is not valid Unicode text; remove {error.object[error.start]!r}"
        ) from error


def _parse_schema(schema: Any) -> Any:
    """Return a copy of the schema, given as text or as a dict, as plain JSON values."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        parsed = json.loads(text) if len(text) <= MAX_CHARS else None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not a JSON schema: {error}; correct it") from error
    _check_size("json", len(text))
    height, num_references = _measure(parsed)
    if (1 + num_references) * height > MAX_REFERENCE_DEPTH:
        raise RequestError(
            f"structured_outputs.json has {num_references} references in {height} levels, which can nest "
            f"{(1 + num_references) * height} deep, at most {MAX_REFERENCE_DEPTH}; make it smaller"
        )
    return parsed


def _measure(schema: Any) -> tuple[int, int]:
    """Return the number of levels of a schema, and its number of references."""
    height = num_references = 0
    pending = [(schema, 1)]
    while pending:
        value, level = pending.pop()
        height = max(height, level)
        if isinstance(value, dict):
            num_references += "$ref" in value
            value = value.values()
        elif not isinstance(value, list):
            continue
        pending.extend((child, level + 1) for child in value)
    return height, num_references


def shortened(line: str) -> str:
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."
