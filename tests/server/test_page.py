"""The page's files: which are served, and how. What they do in a browser: tests/browser/."""

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from nanovllm.server.page import DIRECTORY, page_paths, page_router

POLICY = {
    *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
    *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    *("require-trusted-types-for 'script'", "trusted-types 'none'"),
}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


def test_every_file_is_served_with_the_policy(client: TestClient) -> None:
    assert "/" in page_paths() and len(page_paths()) == 7
    for path in page_paths():
        response = client.get(path)
        assert response.status_code == 200
        assert set(response.headers["content-security-policy"].split("; ")) == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get("/page/chat.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/").headers["etag"]
    assert client.get("/", headers={"If-None-Match": tag}).status_code == 304
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "../page.py"])
def test_other_paths_are_not_found(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_files_name_no_other_host_and_only_files_that_exist() -> None:
    for path in DIRECTORY.iterdir():
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\"' )]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{path.name} names {addresses}"
        for name in re.findall(r"from \"\./([\w.]+)\"|\"page/([\w.]+)\"", text):
            assert (DIRECTORY / (name[0] or name[1])).is_file(), f"{path.name} loads {name}"


def test_every_id_that_a_script_asks_for_is_in_the_page() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', (DIRECTORY / "index.html").read_text()))
    for path in DIRECTORY.glob("*.js"):
        asked = set(re.findall(r'(?:byId|getElementById)\("([\w-]+)"\)', path.read_text()))
        assert asked <= ids, f"{path.name} asks for {asked - ids}"
