"""/openapi.json: valid, complete, and true about errors."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.openapi.models import OpenAPI

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server import ServerOptions, make_app
from nanovllm.entrypoints.server.protocol import ChatRequest, CompletionRequest, Message

ANSWERS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def app(served: tuple[AsyncLLM, str]) -> FastAPI:
    return make_app(served[0], ServerOptions(served_model_name=("tiny",)))


@pytest.fixture(scope="module")
def schema(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects inside a schema."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def test_openapi_is_valid_and_its_references_exist(schema: dict[str, Any]) -> None:
    assert OpenAPI.model_validate(schema).openapi.startswith("3.1")
    references = [part["$ref"] for part in parts(schema) if isinstance(part.get("$ref"), str)]
    names = {reference.removeprefix("#/components/schemas/") for reference in references}
    assert names == set(schema["components"]["schemas"])
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_openapi_describes_errors_in_openais_form(schema: dict[str, Any]) -> None:
    """It named status 422 and FastAPI's own form, which the server never sends, and none of those that it does."""
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            errors = {status: each for status, each in operation["responses"].items() if status != "200"}
            assert {"401", "500", "503", "default"} <= errors.keys() and "422" not in errors
            forms = {each["content"]["application/json"]["schema"]["$ref"] for each in errors.values()}
            assert forms == {"#/components/schemas/ErrorBody"}
            assert "requestBody" not in operation or {"400", "404", "413"} <= errors.keys()
            assert path not in ANSWERS or "429" in errors
    error = schema["components"]["schemas"]["ErrorDetails"]
    assert set(error["required"]) == {"message", "type", "param", "code"}


def test_openapi_names_the_types_of_responses(schema: dict[str, Any]) -> None:
    for path in ANSWERS:
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
    assert schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest, Message])
def test_openapi_has_every_field_that_is_accepted(schema: dict[str, Any], body: Any) -> None:
    """Fields that are accepted with the value that changes nothing were missing, as if they were unknown."""
    described = schema["components"]["schemas"][body.__name__]
    neutral = body._unsupported()
    assert described["properties"].keys() == {
        *(field.alias or name for name, field in body.model_fields.items()),
        *neutral,
    }
    for name in neutral.keys() - body.model_fields.keys():
        assert described["properties"][name]["enum"] == [None, *neutral[name]]


def test_openapi_is_served(web: httpx.Client) -> None:
    assert web.get("/openapi.json").json()["info"]["title"] == "nanovllm"
