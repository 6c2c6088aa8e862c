"""Refusal: why the server does not take a request that another time, or another server, might answer."""

import math
from collections.abc import Mapping

from starlette.responses import Response

from nanovllm.server.errors import ApiError

_CODES = {429: "rate_limit_exceeded", 503: "service_unavailable"}
_CLOSES = (401, 408, 413, 503)  # the rest of the body is not read, or the server is about to end


class Refusal(ApiError):
    """`reason` is what /metrics counts it under. A client may ask again after `retry_after_s`."""

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
        super().__init__(message, status=status, param=param, code=code or _CODES.get(status))
        self.reason, self.retry_after_s = reason, retry_after_s
        self._closes = closes or status in _CLOSES

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        added = dict(headers or {})
        if self.retry_after_s is not None:
            added["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            added["WWW-Authenticate"] = "Bearer"
        if self._closes:
            added["Connection"] = "close"
        return super().response(added)
