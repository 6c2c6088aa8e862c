"""The rule for the fields of request bodies, in all APIs and for every object inside a body.

- A field that is null is the same as a field that is missing.
- A field of `UNSUPPORTED` would change the answer, but is not implemented. The server refuses such a field by name,
  unless the value changes nothing.
- A field with nearly the name of a known field, such as "temprature", is refused with the known name.
- Every other unknown field is ignored, and the log names it once.

A body can have millions of errors, and collecting all would take minutes and gigabytes. So a check ends at the first
error.
"""

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import combinations
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

MAX_NAME_CHARS = 100  # of an unknown field's name, in a message
MAX_KNOWN_CHARS = 40  # a longer name is not compared with the known names
MAX_BODY_VALUES = 1 << 17  # checking this many values takes a third of a second
MAX_LOGGED_NAMES = 200  # clients choose the names, so the number of names has no other limit
TWO_EDIT_CHARS = 8  # too many unrelated names shorter than this differ in two characters
ONE_EDIT_CHARS = 4  # too many unrelated names shorter than this differ in one character

logger = logging.getLogger(__name__)

# Values that change nothing, besides null -> the fields of any API that change the answer and are not implemented.
# A field that an API implements is not looked up here. The openai package puts the entries of extra_body into the body.
_BY_NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "add_special_tokens allowed_token_ids audio chat_template container conversation ebnf enable_thinking "
        "guided_json input json_schema lora_path max_completion_tokens max_new_tokens max_output_tokens max_tokens "
        "messages output_format prediction previous_response_id prompt prompt_embeds prompt_logprobs reasoning_effort "
        "seed structural_tag structured_outputs think thinking thinking_budget thinking_token_budget "
        "truncate_prompt_tokens web_search_options",
    ),
    (
        (False,),
        "background continue_final_message early_stopping echo ignore_eos include_stop_str_in_output logprobs raw "
        "return_hidden_states return_token_ids return_tokens_as_token_ids use_beam_search",
    ),
    (
        (0,),
        "dry_multiplier dynatemp_range frequency_penalty min_p min_tokens mirostat n_probs presence_penalty priority "
        "top_a top_logprobs xtc_probability",
    ),
    (
        ([],),
        "bad_words documents functions guided_choice images logits_processors lora mcp_servers stop_sequences "
        "stop_token_ids tools",
    ),
    ((1,), "best_of length_penalty n num_beams repeat_penalty repetition_penalty tfs_z typical_p"),
    (("",), "format grammar guided_grammar guided_regex instructions regex suffix template"),
    (({},), "chat_template_kwargs extra_body logit_bias mm_processor_kwargs options output_config reasoning"),
    (
        (True,),
        "add_generation_prompt do_sample include_reasoning separate_reasoning skip_special_tokens "
        "spaces_between_special_tokens",
    ),
    ((-1,), "n_predict num_predict reasoning_budget top_n_sigma"),
    (("none", "auto"), "function_call tool_choice"),
    ((["text"],), "modalities"),
    (("", []), "system"),
    (({}, {"format": {"type": "text"}}), "text"),
    (("disabled",), "truncation"),
    (("medium",), "verbosity"),
    (({"type": "text"},), "response_format"),
    (([], ""), "stop"),
    ((0, -1), "top_k"),
)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {name: neutral for neutral, names in _BY_NEUTRAL for name in names.split()}
_LENGTH, _STOP = ("max_tokens", "max_output_tokens"), ("stop", "stop_sequences")
_FORM, _SYSTEM = ("response_format", "text", "output_config"), ("instructions", "system", "messages")
_THINKING = ("thinking", "reasoning", "chat_template_kwargs", "reasoning_effort")
# Field that is not supported -> the fields with the same meaning; an object has at most one of these fields
INSTEAD: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LENGTH, "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"), _LENGTH),
    **dict.fromkeys(_STOP, _STOP),
    **dict.fromkeys((*_FORM, "format", "output_format"), _FORM),
    **dict.fromkeys(("json_schema", "schema"), ("json_schema", "schema", *_FORM)),
    **dict.fromkeys(("parameters", "input_schema"), ("parameters", "input_schema")),
    **dict.fromkeys(("regex", "guided_choice", "guided_json", "guided_regex"), ("structured_outputs",)),
    **dict.fromkeys(("system", "instructions"), _SYSTEM),
    **dict.fromkeys(("think", "thinking", "enable_thinking", "chat_template_kwargs"), _THINKING),
    **dict.fromkeys(("input", "messages", "prompt"), ("input", "messages", "prompt")),
    **dict.fromkeys(("reasoning", "reasoning_effort"), ("reasoning_effort", "reasoning", "output_config")),
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "repeat_penalty": ("repetition_penalty",),
}


class _FirstError(FailFast):
    """Ends the check of a list at its first error. Hashable, because `|` between types needs hashable metadata."""

    __hash__ = object.__hash__


Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], _FirstError()]


def refuse(param: str, message: str) -> PydanticCustomError:
    """Return the error that a validator raises about the field `param`."""
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})


def printable(name: str) -> str:
    """Return a name that a client chose in a form that an error message can repeat."""
    return name[:MAX_NAME_CHARS].encode(errors="backslashreplace").decode()


class Body(BaseModel):
    """A JSON object. The module's docstring says how unknown fields are treated.

    NEUTRAL: field that is not implemented -> values that change nothing. NEUTRAL may also name fields of the class,
    whose neutral values count as null. KINDS: supported value of `type` -> the fields that an object of this type
    needs. A message about another type begins with `NOUN` and ends with `WHY_NOT`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    KINDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    NOUN: ClassVar[str] = ""
    WHY_NOT: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if cls.KINDS:
            cls._check_kind(body)
        own, unsupported = own_names(cls), cls._unsupported()
        kept = {}
        for name, value in body.items():
            if value is None or (name in unsupported and any(_is_same(value, each) for each in unsupported[name])):
                continue
            if name in own:
                kept[name] = value
            elif name in unsupported:
                raise refuse(name, cls._message_about(name, unsupported[name]))
            elif (meant := _meant_name(cls, name)) is not None:
                raise refuse(printable(name), f"the field {printable(name)!r} is unknown; {meant!r} may be meant")
            else:
                log_once(name, "the field %r of requests is unknown and ignored")
        return kept

    @classmethod
    def _unsupported(cls) -> Mapping[str, tuple[Any, ...]]:
        return cls.NEUTRAL

    @classmethod
    def _message_about(cls, name: str, neutral: tuple[Any, ...]) -> str:
        instead = next((each for each in INSTEAD.get(name, ()) if each in own_names(cls)), None)
        remedy = "leave it out" if instead is None else f"use {instead!r}"
        values = f", except as {' or '.join(map(repr, neutral))}" if neutral else ""
        return f"the field {name!r} is not supported{values}; {remedy}"

    @classmethod
    def _check_kind(cls, body: Mapping[str, Any]) -> None:
        kind = body.get("type", cls.model_fields["type"].default)
        if isinstance(kind, str) and kind not in cls.KINDS:
            raise refuse("type", f"{cls.NOUN} of type {printable(kind)!r} is not supported{cls.WHY_NOT}; leave it out")
        for name in cls.KINDS[kind] if isinstance(kind, str) else ():
            if body.get(name) is None:
                raise refuse(name, f"{cls.NOUN} of type {kind!r} needs {name!r}")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe the fields of `NEUTRAL`, too."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).setdefault("properties", {})
        neutral = cls._unsupported().items()
        properties.update({name: {"enum": [None, *values]} for name, values in neutral if name not in properties})
        return described


class WholeBody(Body):
    """The body of a request, with a limit on the number of values: all other requests wait during the check."""

    @classmethod
    def _unsupported(cls) -> Mapping[str, tuple[Any, ...]]:
        return _unsupported_by(cls)

    @model_validator(mode="before")
    @classmethod
    def _limit_values(cls, body: Any) -> Any:
        num_left = MAX_BODY_VALUES
        for name, value in body.items() if isinstance(body, dict) else ():
            num_left -= _num_values(value, num_left)
            if num_left < 0:
                message = f"the body has more than {MAX_BODY_VALUES} values; send the text in fewer and longer parts"
                raise refuse(printable(name), message)
        return body


@lru_cache
def own_names(kind: type[Body]) -> frozenset[str]:
    """Return the names that the class's fields have in JSON."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@lru_cache
def _unsupported_by(kind: type[Body]) -> Mapping[str, tuple[Any, ...]]:
    own = own_names(kind)
    return {name: values for name, values in UNSUPPORTED.items() if name not in own} | dict(kind.NEUTRAL)


def _is_same(value: Any, neutral: Any) -> bool:
    """Compare as JSON does: 1 is 1.0, but not true."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _num_values(value: Any, limit: int) -> int:
    """Count the objects, lists and other values in a JSON value, except token ids. Stop counting at `limit` + 1."""
    found, rest = 0, [value]
    while rest and found <= limit:
        found += 1
        each = rest.pop()
        if isinstance(each, dict):
            rest.extend(each.values())
        elif isinstance(each, list) and not (each and isinstance(each[0], int)):
            rest.extend(each)
    return found


# -- misspelt names. difflib would take seconds for a body with 100,000 of them ----------------------------------------


def _meant_name(kind: type[Body], name: str) -> str | None:
    """Return the field whose name differs only in one or two characters, in case or in underscores, or None."""
    if len(name) > MAX_KNOWN_CHARS:
        return None
    plain, known = _plain(name), _shortened_names(kind)
    if plain in known:
        return known[plain]
    shorter = (plain[:place] + plain[place + 1 :] for place in range(len(plain)))
    return next((known[each] for each in shorter if len(each) >= ONE_EDIT_CHARS - 1 and each in known), None)


@lru_cache
def _shortened_names(kind: type[Body]) -> Mapping[str, str]:
    """Return a map to each field's name from the name itself and from the name without one or two characters."""
    found: dict[str, str] = {}
    for name in sorted(own_names(kind)):
        plain = _plain(name)
        most = 2 if len(plain) >= TWO_EDIT_CHARS else 1 if len(plain) >= ONE_EDIT_CHARS else 0
        for num_left_out in range(most + 1):
            for places in combinations(range(len(plain)), num_left_out):
                found.setdefault("".join(char for place, char in enumerate(plain) if place not in places), name)
    return found


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


# -- the log -----------------------------------------------------------------------------------------------------------

_logged: set[tuple[str, str]] = set()


def log_once(name: str, message: str) -> None:
    """Log once that `name` is ignored. message: a format with one %r for the name.

    Clients choose the names, so only names that an API could have are logged, up to a limited number.
    """
    if (message, name) in _logged or len(_logged) >= MAX_LOGGED_NAMES or not re.fullmatch(r"[\w.-]{1,64}", name, re.A):
        return
    _logged.add((message, name))
    logger.info(f"nanovllm: {message}", name)
