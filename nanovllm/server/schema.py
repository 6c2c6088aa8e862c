"""What /openapi.json says about responses. The bodies of requests are described by protocol.py.

FastAPI would describe its own errors, with status 422, which this server never sends.
"""

from typing import Any, TypeAlias

from pydantic import BaseModel

Responses: TypeAlias = dict[int | str, dict[str, Any]]


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None  # the field of the body that is to blame
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI's API sends it."""

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
        404: "There is no such model",
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
