"""Errors: their responses, their description in /openapi.json, and their traces in the log.

A response has OpenAI's form: {"error": {"message", "type", "param", "code"}}. In the Messages API the object also has
Anthropic's "type": "error", and the error has one of Anthropic's types, from which clients choose the exception to
raise. Bad input is status 400, an unknown model or route 404, an engine that has failed 503, and a bug 500. Messages
say what to change. Messages are sent to the client only, because they can quote the client's request. The log has an
exception's type and where it was raised.
"""

import json
import logging
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from nanovllm.entrypoints.server.request_log import record_of
from nanovllm.errors import EngineError, RequestError
from nanovllm.utils.options import shown

Responses: TypeAlias = dict[int | str, dict[str, Any]]

PART_ITEMS = 100  # list items that are encoded at once
RETRY_CODES = {429: "rate_limit_exceeded", 503: "service_unavailable"}
CONTEXT_EXCEEDED = "context_length_exceeded"
MESSAGES_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CLOSING = (401, 408, 413, 503)  # the rest of the body is not read, or the server is about to end
CLIENT_CLOSED_REQUEST = 499  # only for logs: no client receives this status
UNREADABLE_JSON = (
    "the body cannot be read as JSON: it is not in UTF-8 and does not name another charset, is nested too deeply, "
    "or has a number with too many digits; correct it"
)
_OF_CALLS = "structured_outputs.tagged_json"  # the parameter's name in errors about tool calls
_BRANCH = re.compile(r"str|(list|dict)\[.*\]")  # pydantic adds this to an error's place in a union
_LOGGERS = ("uvicorn.error", "uvicorn.asgi", "asyncio", "concurrent.futures")  # they log exceptions of requests
_PARAM = re.compile(r"SamplingParams\.(\w+)")  # begins the message about a parameter


class ApiError(Exception):
    """A request that is answered with an error. param: the field of the body that caused the error."""

    reason: str | None = None  # see Refusal

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self._headers = headers

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body of the response to a request for `path`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if not path.startswith(MESSAGES_PATH):
            return {"error": error}
        error["type"] = ANTHROPIC_TYPES.get(self.status, kind if self.status < 500 else "api_error")
        return {"type": "error", "error": error}

    def response(self, path: str = "") -> Response:
        return json_response(self.body(path), self.status, self._headers)

    def record(self, scope: Scope) -> None:
        """Note the error for the line of the request in the log."""
        record_of(scope).failed(code=self.code, reason=self.reason, param=self.param)

    def event(self, path: str = "") -> str:
        """Return the event that ends a stream."""
        return sse_error(json.dumps(self.body(path)), path)


class PromptTooLongError(ApiError):
    """A prompt that leaves no room for an answer.

    Agents compact their history when an error has OpenAI's code, or the words of Anthropic's API ("prompt is too
    long") or of vLLM ("maximum context length").
    """

    def __init__(self, num_tokens: int, max_context_tokens: int, param: str) -> None:
        message = too_long_message(f"{num_tokens} tokens > {max_context_tokens - 1} maximum", max_context_tokens)
        super().__init__(message, param=param, code=CONTEXT_EXCEEDED)


def too_long_message(comparison: str, max_context_tokens: int) -> str:
    """Return the message about a prompt that is too long. comparison: the prompt's length and the limit."""
    return (
        f"prompt is too long: {comparison}; this server's maximum context length is {max_context_tokens} tokens, and "
        "an answer needs at least one; shorten the prompt"
    )


class Refusal(ApiError):
    """A request that the server refuses to protect itself. /metrics counts it under `reason`.

    retry_after_s: seconds after which the client may ask again. closes: whether to close the connection, which the
    statuses of CLOSING do in any case.
    """

    reason: str

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        closes: bool = False,
    ) -> None:
        headers = {}
        if retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if closes or status in CLOSING:
            headers["Connection"] = "close"
        super().__init__(message, status=status, param=param, code=code or RETRY_CODES.get(status), headers=headers)
        self.reason = reason


def sse_error(body: str, path: str) -> str:
    """Return the event with this error, given as JSON. Anthropic's clients skip events without a name."""
    name = "event: error\n" if path.startswith(MESSAGES_PATH) else ""
    return f"{name}data: {body}\n\n"


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response of ASCII characters, so that every text of a client can be encoded."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def dumps_in_parts(content: Any) -> str:
    """Dump like json.dumps, but let other threads run: dumping the log-probabilities of a book takes seconds.

    An iterator is written as a list.
    """
    if isinstance(content, dict):
        entries = (f"{json.dumps(name)}: {dumps_in_parts(value)}" for name, value in content.items())
        return f"{{{', '.join(entries)}}}"
    if not isinstance(content, list | Iterator):
        return json.dumps(content)
    if isinstance(content, list) and len(content) <= PART_ITEMS:
        return f"[{', '.join(map(dumps_in_parts, content))}]"
    items = iter(content)
    parts = iter(lambda: list(islice(items, PART_ITEMS)), [])
    return f"[{', '.join(json.dumps(part)[1:-1] for part in parts)}]"


def api_error(error: Exception) -> ApiError:
    """Return the error that tells a client about an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        found = _PARAM.match(str(error))
        message = str(error).replace("SamplingParams.", "").replace(_OF_CALLS, "the parameters of a tool")
        return ApiError(message, param=found[1] if found else None)
    if isinstance(error, EngineError):
        return ApiError(str(error), status=503, code="engine_unavailable")
    return ApiError("internal error; the server's log has the details", status=500, code="internal_error")


def model_not_found(name: str, names: Iterable[str]) -> ApiError:
    """Return the error for a model that does not exist. names: the names of the models that do."""
    message = f"the model {shown(name)} does not exist; this server has {' and '.join(map(repr, names))}"
    return ApiError(message, status=404, param="model", code="model_not_found")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception in the API's form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnectedError):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if isinstance(error, RequestValidationError):
            error = _invalid_field(error.errors()[0])
        if isinstance(error, HTTPException):
            message = str(error.detail)
            if error.status_code in (404, 405):
                message = f"{message}: {request.method} {shown(request.url.path)}"
            elif error.status_code == 400:  # FastAPI's error about a body that json.loads cannot read
                message = UNREADABLE_JSON
            error = ApiError(message, status=error.status_code, headers=error.headers)
        error = api_error(error)
        error.record(request.scope)
        return error.response(request.url.path)

    answered = (ApiError, RequestError, EngineError, RequestValidationError, HTTPException, ClientDisconnectedError)
    for kind in (*answered, Exception):
        app.add_exception_handler(kind, answer)


def _invalid_field(error: Mapping[str, Any]) -> ApiError:
    """Return the error that tells a client the first problem that pydantic has found in a body."""
    kind, context = error["type"], error.get("ctx") or {}
    path = ""  # such as messages[0].role
    for part in error["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _BRANCH.fullmatch(part):
            path += f".{part}"
    path = path.removeprefix(".")
    if kind == "json_invalid":
        return ApiError(f"the body is not valid JSON: {context.get('error')} at character {error['loc'][-1]}")
    if "param" in context:
        return ApiError(error["msg"], param=f"{path}.{context['param']}".removeprefix("."))
    if not path:
        return ApiError("the body must be a JSON object, sent with Content-Type: application/json")
    if kind == "missing":
        return ApiError(f"the field {shown(path)} is missing", param=path)
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return ApiError(f"{path}={shown(error['input'])}: {message}", param=path)


# -- /openapi.json. FastAPI would describe its own errors, with status 422, which this server never sends --------------


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None  # the field of the body that caused the error
    code: str | None


class ErrorBody(BaseModel):
    """An error, as OpenAI's API sends it."""

    error: ErrorDetails


def _errors(about: dict[int | str, str]) -> Responses:
    return {status: {"model": ErrorBody, "description": text} for status, text in about.items()}


ANY_ERRORS = _errors(
    {
        401: "The API key is missing or wrong",
        500: "The server has a bug",
        503: "The engine has failed, or the server is stopping",
        "default": "Any other error",
    }
)
BODY_ERRORS = _errors(
    {
        400: "The body is malformed, or a value is out of range",
        404: "The model does not exist",
        413: "The body is too large",
    }
)
ANSWERS: Responses = BODY_ERRORS | {
    200: {"description": "The answer; with stream=true, in chunks", "content": {"text/event-stream": {}}},
    **_errors(
        {
            429: "Too many answers wait; Retry-After says when to ask again",
            500: "The request failed, or the server has a bug",
            503: "The engine has failed, the server is stopping, or the request has waited for too long",
        }
    ),
}


# -- the log -----------------------------------------------------------------------------------------------------------


def keep_messages_out(*more: str) -> None:
    """Leave exceptions' messages out of this process's log. more: further loggers' names. May be called twice."""
    for name in (*_LOGGERS, *more):
        logging.getLogger(name).addFilter(_strip_message)


def _strip_message(record: logging.LogRecord) -> bool:
    """Replace an exception's message in the record, and return True, with which a filter lets the record pass."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        frames = "".join(traceback.format_tb(error.__traceback__))
        record.exc_info, record.exc_text = None, f"{frames}{type(error).__qualname__} (its message is not logged)"
    return True
