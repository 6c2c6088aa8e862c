"""The page at /: a chat, a document to ask about, and the KV cache live. The files are in page/.

The page has no build step and loads nothing from other hosts; the Content-Security-Policy enforces the latter. Its own
files (`page_paths`) must be served without an API key, because a browser cannot send one when it opens a page. The
scripts send the key that the user types with their requests to the API and to /kvcache.
"""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

DIRECTORY = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text can become HTML, whatever a model writes
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time whether the file has changed (ETag)
}


def page_paths() -> list[str]:
    """The paths that `page_router` answers. They hold nothing secret."""
    return ["/", *(f"/page/{path.name}" for path in _files())]


def page_router() -> APIRouter:
    """GET / and GET /page/{file name}. The files are read once, so no path in a request reaches the file system."""
    files = {path.name: path.read_bytes() for path in _files()}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}
    router = APIRouter(include_in_schema=False)

    def answer(name: str, request: Request) -> Response:
        if name not in files:
            return Response("The page has no such file.", 404, HEADERS, "text/plain")
        headers = HEADERS | {"ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], 200, headers, f"{MEDIA_TYPES[Path(name).suffix]}; charset=utf-8")

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return answer("index.html", request)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str, request: Request) -> Response:
        return answer(name, request)

    return router


def _files() -> list[Path]:
    return sorted(path for path in DIRECTORY.iterdir() if path.suffix in MEDIA_TYPES)
