"""One server over the demo's model for all tests of the HTTP API. Its greedy answers copy the prompt."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from http_server import http_server, web_client

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server.answers import EventStream
from nanovllm.models.retrieval_model import build_retrieval_model


@pytest.fixture(scope="session", autouse=True)
def _no_events_for_silence() -> Iterator[None]:
    """A machine that stands still for MAX_SILENCE_S would add events to the streams of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventStream.__init__, "__defaults__", (1e6,))
        yield


@pytest.fixture(scope="session")
def retrieval_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_retrieval_model(tmp_path_factory.mktemp("retrieval"))


@pytest.fixture(scope="session")
def served(retrieval_model: Path) -> Iterator[tuple[AsyncLLM, str]]:
    """The engine and the server's URL."""
    engine = AsyncLLM(
        retrieval_model, device="cpu", max_model_len=2048, num_kvcache_blocks=64, max_num_batched_tokens=512
    )
    with http_server(engine) as url:
        yield engine, url
    assert engine.failure is None
    engine.close()


@pytest.fixture(scope="session")
def url(served: tuple[AsyncLLM, str]) -> str:
    return served[1]


@pytest.fixture(scope="session")
def web(url: str) -> Iterator[httpx.Client]:
    with web_client(url) as client:
        yield client


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=web_client()) as client:
        yield client
