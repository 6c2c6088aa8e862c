"""The rows of a job: the division into units, the request of a row, and the columns that a row's answers add.

A unit is a list of rows that an engine answers together, and answers again if the engine dies. The rows of a unit are
written to one part of the output. The division into units depends on the input alone, so every run of a job has the
same units, for any number of engines. A unit holds the places of its rows and not their content.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from nanovllm.errors import RequestError
from nanovllm.plan.outputs import RequestOutput, TokenLogprobs
from nanovllm.sampling_params import AnswerTags, SamplingParams, StructuredOutputs, token_id_keys
from nanovllm.text.answer_parts import split_answer

MAX_UNIT_ROWS = 256
MAX_UNIT_BYTES = 2**20  # read from the input; with long prompts, units have few rows, so that all engines get units
NO_DOCUMENT = -1
PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")
MAX_ANSWERS = 1024  # to one row; an engine generates all answers of a row together
SAMPLING_COLUMNS = tuple(field.name for field in fields(SamplingParams))
JSON_COLUMNS = ("messages", "logit_bias", "structured_outputs")  # may also be JSON text, which is easier in Parquet
ADDED_COLUMNS = ("text", "token_ids", "finish_reason", "num_cached_tokens", "error")
# Added column -> the column that asks for it
ADDED_FOR = {
    "reasoning_content": "messages",
    "outputs": "n",
    "token_logprobs": "logprobs",
    "prompt_token_logprobs": "prompt_logprobs",
}
ALL_ADDED_COLUMNS = (*ADDED_COLUMNS, *ADDED_FOR)


class RowPlace(NamedTuple):
    """The place of a row in the input, and its document."""

    file_idx: int
    line: int  # lines of JSON or rows of Parquet before the row in the file
    offset: int  # bytes before the row in a file of JSON lines; 0 for Parquet
    document: int = NO_DOCUMENT  # counted from 0 in the order in which the documents appear in the input


class ScannedRow(NamedTuple):
    file_idx: int
    line: int
    offset: int
    num_bytes: int
    document_key: bytes | None


@dataclass(frozen=True)
class UnitLimits:
    """Limits of a unit. A unit ends before it exceeds a limit, but a document's rows always stay together."""

    max_rows: int = MAX_UNIT_ROWS
    max_bytes: int = MAX_UNIT_BYTES


class Unit:
    """A list of rows, stored as integers: a job of a million rows takes 32 MB."""

    def __init__(self, packed: bytes = b"") -> None:
        """packed: the `packed` of another unit, whose rows `num_bytes` does not count."""
        self._numbers = array("q", packed)
        self.num_bytes = 0  # read from the input

    def add(self, place: RowPlace, num_bytes: int = 0) -> None:
        self._numbers.extend(place)
        self.num_bytes += num_bytes

    def extend(self, unit: "Unit") -> None:
        self._numbers.extend(unit._numbers)
        self.num_bytes += unit.num_bytes

    def __len__(self) -> int:
        return len(self._numbers) // len(RowPlace._fields)

    @property
    def packed(self) -> bytes:
        return self._numbers.tobytes()

    @property
    def places(self) -> list[RowPlace]:
        numbers = iter(self._numbers)
        return [RowPlace(*place) for place in zip(*[numbers] * len(RowPlace._fields), strict=True)]

    def describe(self, names: Sequence[str]) -> str:
        """Describe the place of the rows in the input, for a message. names: the names of the input files."""
        places = self.places
        first, last = places[0], places[-1]
        if len(places) == 1:
            return f"line {first.line + 1} of {names[first.file_idx]}"
        where = f"{len(places)} rows from line {first.line + 1} of {names[first.file_idx]} to line {last.line + 1}"
        return where if first.file_idx == last.file_idx else f"{where} of {names[last.file_idx]}"


def plan_units(rows: Iterable[ScannedRow], limits: UnitLimits = UnitLimits()) -> list[Unit]:
    """Divide the rows into units. Rows keep their order, except that a document's rows follow its first row."""
    units: list[Unit] = []
    for group in _groups(rows):
        last = units[-1] if units else None
        if (
            last is None
            or len(last) + len(group) > limits.max_rows
            or last.num_bytes + group.num_bytes > limits.max_bytes
        ):
            units.append(group)
        else:
            last.extend(group)
    return units


def _groups(rows: Iterable[ScannedRow]) -> Iterator[Unit]:
    """Yield each row without a document and all rows of each document, in the order in which they begin.

    After the first row of a document, groups are collected until the input ends, because the document's last row may be
    the last row of the input.
    """
    collected: list[Unit] = []
    documents: dict[bytes, tuple[int, Unit]] = {}
    for row in rows:
        key = row.document_key
        known = None if key is None else documents.get(key)
        number, group = known or (NO_DOCUMENT if key is None else len(documents), Unit())
        group.add(RowPlace(row.file_idx, row.line, row.offset, number), row.num_bytes)
        if key is not None:
            documents[key] = number, group
        if known is None and documents:
            collected.append(group)
        elif known is None:
            yield group
    yield from collected


def runs_of(places: Sequence[RowPlace]) -> Iterator[list[int]]:
    """Yield the indices of rows that stay together: all rows of a document, or one row without a document."""
    run: list[int] = []
    for i, place in enumerate(places):
        if run and (place.document == NO_DOCUMENT or place.document != places[run[-1]].document):
            yield run
            run = []
        run.append(i)
    if run:
        yield run


# -- requests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowDefaults:
    """Settings for rows without the columns of these settings."""

    sampling: Mapping[str, Any]  # fields of SamplingParams that the flags gave
    recommended: Mapping[str, Any]  # from the model's generation_config.json; the flags take precedence
    seed: int  # the rows' seeds are derived from this seed


class RowRequest(NamedTuple):
    """A row's request: either `messages`, a conversation, or `prompt`, as LLM.generate takes it, is not None."""

    prompt: dict[str, Any] | None
    messages: list[Any] | None
    params: SamplingParams


def make_request(row: Mapping[str, Any], place: RowPlace, defaults: RowDefaults) -> RowRequest:
    """Return the request of a row. A null column counts as missing. Raises RequestError for a row that cannot run."""
    given = {name: value for name, value in row.items() if value is not None}
    prompts = [name for name in PROMPT_COLUMNS if name in given]
    if len(prompts) != 1:
        found = " and ".join(prompts) or "none of them"
        raise RequestError(f"the row has {found}; give one of {', '.join(PROMPT_COLUMNS)}")
    for name in JSON_COLUMNS:
        if isinstance(given.get(name), str):
            given[name] = _parse_json(name, given[name])
    in_chat = prompts[0] == "messages"
    sampling: dict[str, Any] = {"max_tokens": None} if in_chat else {}  # in a chat, the model ends answers
    sampling |= {**defaults.recommended, **defaults.sampling}
    sampling |= {name: given[name] for name in SAMPLING_COLUMNS if name in given}
    if sampling.get("seed") is None:
        sampling["seed"] = row_seed(defaults.seed, place)
    if "logit_bias" in given:
        sampling["logit_bias"] = _logit_bias(given["logit_bias"])
    if "structured_outputs" in given:
        sampling["structured_outputs"] = _structured_outputs(given["structured_outputs"])
    params = SamplingParams(**sampling)
    if params.n > MAX_ANSWERS:
        raise RequestError(f"n={params.n} must be at most {MAX_ANSWERS} in a job; give several rows with the prompt")
    if in_chat:
        return RowRequest(None, _conversation(given["messages"]), params)
    return RowRequest({prompts[0]: given[prompts[0]]}, None, params)


def row_seed(seed: int, place: RowPlace) -> int:
    """Return a seed for a row without a seed. Seeds are hashed because a row's answers use consecutive seeds."""
    digest = hashlib.blake2b(f"{seed} {place.file_idx} {place.line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is a string that is not JSON ({error})") from error


def _conversation(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or (messages and isinstance(messages[0], list)):
        raise RequestError('messages must be one conversation, a list of {"role", "content"}')
    return [_without_nulls(each) if isinstance(each, dict) else each for each in messages]


def _without_nulls(struct: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null fields. In Parquet all structs of a column have the same fields, and absent fields are null."""
    return {name: value for name, value in struct.items() if value is not None}


def _logit_bias(biases: Any) -> Any:
    """Convert the string keys of JSON, or Parquet's list of pairs. SamplingParams checks the rest."""
    if isinstance(biases, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in biases):
        biases = dict(biases)
    return token_id_keys(_without_nulls(biases) if isinstance(biases, Mapping) else biases)


def _structured_outputs(wanted: Any) -> Any:
    if not isinstance(wanted, Mapping):
        return wanted
    given = _without_nulls(wanted)
    known = [field.name for field in fields(StructuredOutputs)]
    if unknown := [name for name in given if name not in known]:
        raise RequestError(f"structured_outputs has {', '.join(unknown)}; give one of {', '.join(known)}")
    return StructuredOutputs(**given)


# -- answers -------------------------------------------------------------------------------------------------------


def answer_columns(outputs: Sequence[RequestOutput], params: SamplingParams) -> dict[str, Any]:
    """Return the columns of a row with these answers: ADDED_COLUMNS, and the columns of ADDED_FOR that the row asks
    for. If an answer failed, return the columns of a row with an error.
    """
    for output in outputs:
        if output["finish_reason"] == "error":
            return error_columns(output["error"])
    first = outputs[0]
    tags = params.reasoning_tags
    columns: dict[str, Any] = {**_answer(first, tags), "num_cached_tokens": first["num_cached_tokens"], "error": None}
    if params.n > 1:
        columns["outputs"] = [_answer(output, tags) for output in outputs]
    if params.logprobs is not None:
        columns["token_logprobs"] = [_position(entry) for entry in first["logprobs"]]
    if params.prompt_logprobs is not None:
        columns["prompt_token_logprobs"] = [_position(entry) for entry in first["prompt_logprobs"]]
    return columns


def error_columns(message: str) -> dict[str, Any]:
    """Return the columns of a row that could not run."""
    return dict.fromkeys(ADDED_COLUMNS) | {"error": message}


def _answer(output: RequestOutput, tags: AnswerTags | None) -> dict[str, Any]:
    """Return the columns of one answer. tags: of the reasoning, or None if the whole text is the answer."""
    answer = {"text": output["text"], "token_ids": output["token_ids"], "finish_reason": output["finish_reason"]}
    if tags is not None and output["text"] is not None:
        reasoning, answer["text"] = split_answer(output["text"], tags)
        answer["reasoning_content"] = reasoning or None
    return answer


def _position(entry: TokenLogprobs | None) -> list[dict[str, Any]] | None:
    """Return the token at a position, then the most likely tokens, or None for the first token of a prompt."""
    if entry is None:
        return None
    return [{"token_id": token_id, **each._asdict()} for token_id, each in entry.items()]
