"""The server's log of requests: one line for each request.

A line has the request's id, which is also in the header x-request-id and in the id of the answer, its method, path,
status and duration, its tokens, and its error. The log has nothing that users wrote: of an error it has the code, and
the field or the limit that caused the error, but not the message, which can quote the request.
"""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.entrypoints.server.log_lines import FIELDS
from nanovllm.plan.outputs import RequestOutput
from nanovllm.plan.sequence import Sequence as PromptSequence

REQUEST_ID = b"x-request-id"
MAX_PATH_CHARS = 200
_RECORD = "request_record"  # the entry of a request's state
_PARAM = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)  # clients choose names of fields

logger = logging.getLogger(__name__)


class RequestRecord:
    """What becomes of one request. `id` is the hexadecimal part of the answer's id, once there is an answer."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(12)
        self.status: int | None = None  # None until the head of a response is sent
        self._start_s = time.monotonic()
        self._first_token_s: float | None = None
        self._prompts: Sequence[PromptSequence] = ()
        self._num_new_tokens = 0
        self._finish_reasons: dict[str, None] = {}
        self._error: dict[str, str] = {}

    def queued(self, prompts: Sequence[PromptSequence]) -> None:
        self._prompts = prompts

    def begun(self) -> None:
        """Note that an answer has its first token."""
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._start_s

    def finished(self, output: RequestOutput) -> None:
        """Note that an answer has ended."""
        self._num_new_tokens += len(output["token_ids"])
        self._finish_reasons[output["finish_reason"]] = None

    def abandoned(self) -> None:
        """Note that answers end early: the client has disconnected, or the server has given up."""
        self._finish_reasons["abort"] = None

    def failed(self, **causes: str | None) -> None:
        """Note the code, the reason or the param of an error."""
        self._error = {name: cause for name, cause in causes.items() if cause and _PARAM.fullmatch(cause)}

    def log(self, scope: Scope) -> None:
        """Log the line. What only reads, such as /metrics, is logged at the level debug unless it fails."""
        method, path = str(scope["method"])[:16], _path_of(scope)
        seconds = round(time.monotonic() - self._start_s, 4)
        fields: dict[str, Any] = {"request_id": self.id, "method": method, "path": path, "status": self.status}
        fields["duration_s"] = seconds
        parts = [f"request {self.id}: {method} {path} {self.status or 'without a response'} in {seconds:.3f} s"]
        if self._error:
            fields["error"] = self._error
            parts.append(", ".join(f"{name} {cause}" for name, cause in self._error.items()))
        if self._prompts:
            num_prompt = sum(prompt.num_prompt_tokens for prompt in self._prompts)
            num_cached = sum(prompt.num_hit_tokens or 0 for prompt in self._prompts)
            reasons = list(self._finish_reasons)
            fields |= {"prompt_tokens": num_prompt, "cached_tokens": num_cached}
            fields |= {"completion_tokens": self._num_new_tokens, "finish_reasons": reasons}
            parts.append(f"prompt {num_prompt} tokens, {num_cached} cached; answer {self._num_new_tokens} tokens")
            if self._first_token_s is not None:
                fields["first_token_s"] = round(self._first_token_s, 4)
                parts[-1] += f", the first after {self._first_token_s:.3f} s"
            parts += [f"finish reason {', '.join(reasons)}"] if reasons else []
        logger.log(self._level(method), "%s", "; ".join(parts), extra={FIELDS: fields})

    def _level(self, method: str) -> int:
        if self.status is not None and self.status >= 500:
            return logging.WARNING
        is_notable = method == "POST" or self._error or self.status is None or self.status >= 400
        return logging.INFO if is_notable else logging.DEBUG


def record_of(scope: Scope) -> RequestRecord:
    """Return the request's record. Without a RequestLog, it is a new one that is never logged."""
    record = scope.get("state", {}).get(_RECORD)
    return record if isinstance(record, RequestRecord) else RequestRecord()


def _path_of(scope: Scope) -> str:
    """Return the path as the client has sent it, without control characters."""
    raw = scope.get("raw_path") or scope["path"].encode("ascii", "backslashreplace")
    path: str = ascii(raw.decode("latin-1").partition("?")[0])[1:-1]
    return path if len(path) <= MAX_PATH_CHARS else f"{path[:MAX_PATH_CHARS]}..."


class RequestLog:
    """Logs each request of an ASGI application when it has ended, and adds the header x-request-id to responses.

    If the response has this header already, because a replica has answered, its id is taken over.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord()
        scope.setdefault("state", {})[_RECORD] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                known = [value for name, value in message["headers"] if name == REQUEST_ID]
                if known:
                    record.id = known[0].decode("latin-1")
                else:
                    message = {**message, "headers": [*message["headers"], (REQUEST_ID, record.id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.log(scope)
