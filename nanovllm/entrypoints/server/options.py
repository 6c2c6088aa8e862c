"""ServerOptions, the options of a server apart from the engine's options, and `bind`, which binds the server's port.

The port is bound before anything is loaded, so that a port in use is known at once.
"""

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from nanovllm.entrypoints.server.log_lines import FORMATS, LEVELS
from nanovllm.errors import ConfigError
from nanovllm.utils.options import MAX_INT32, check_options, option

_SERVER, _ACCESS, _LIMITS = "the server", "who may ask", "how much clients may ask for"  # groups


def _limit(default: float, help: str) -> Any:
    return option(default, help=help, group=_LIMITS, above=0, most=MAX_INT32)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The flags of `nanovllm serve`. The `help` of each field says what it means. A bad value raises ConfigError."""

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 or :: for all networks", group=_SERVER)
    port: int = option(8000, help="port to listen on, or 0 for any free port", group=_SERVER, least=0, most=65535)
    served_model_name: tuple[str, ...] = option(
        (),
        help="names by which clients may call the model; answers carry the first name; by default, the model's name, "
        "or the last part of a directory's path",
        group=_SERVER,
    )
    drain_s: float = option(
        30.0,
        help="seconds after SIGTERM in which open requests may finish; unfinished requests are then aborted",
        group=_SERVER,
        least=0,
        most=MAX_INT32,
    )

    log_level: str = option(
        "info",
        help="lowest level of the lines in the log: debug, info, warning or error; debug has requests that only read, "
        "such as those for /metrics, too",
        group=_SERVER,
        choices=LEVELS,
    )
    log_format: str = option(
        "text",
        help="form of the lines in the log: text, or json with one object per line",
        group=_SERVER,
        choices=FORMATS,
    )
    verify_share: float = option(
        0.0,
        help="share of the greedy answers, from 0 to 1, that are recomputed as prompts while the server is idle; "
        "/metrics counts these checks and the answers that differ",
        group=_SERVER,
        least=0,
        most=1,
    )

    api_key_file: str | None = option(
        None,
        help="file with one API key per line; lines that begin with # are comments. The environment variable "
        "NANOVLLM_API_KEY can hold one more. Without any API key, everyone may send requests",
        group=_ACCESS,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        help="origins whose pages may send requests from a browser, such as https://example.org, or * for all",
        group=_ACCESS,
    )
    cache_salt_per_key: bool = option(
        True,
        help="with several API keys, reuse KV only between requests with the same key, so that neither timing nor "
        "usage reveals the prompts of other keys",
        group=_ACCESS,
    )

    max_queue: int = option(
        1024,
        help="maximum number of answers that wait for their first token; further requests get status 429",
        group=_LIMITS,
        least=1,
    )
    max_wait_s: float = _limit(600.0, "seconds that a request may wait for its first token before status 503")
    max_receive_s: float = _limit(60.0, "seconds that a client may take to send a request's head, and its body")
    max_unread_s: float = _limit(300.0, "seconds after which a client that stops reading its answer is cut off")
    max_body_mb: float = _limit(32.0, "maximum size of a body in MiB")
    max_prompt_chars: int | None = option(
        None,
        help="maximum number of characters in a prompt, checked before the prompt is tokenized; by default, 16 for "
        "each token of max_model_len",
        group=_LIMITS,
        least=1,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if not self.host:
            raise ConfigError("host='' must be an address; 0.0.0.0 for all networks")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name='' must not be empty")
        for origin in self.allowed_origins:
            parts = urlsplit(origin)
            if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
                raise ConfigError(f"allowed_origins={origin!r} must be scheme://host or scheme://host:port, or *")

    @property
    def is_local(self) -> bool:
        """Return True if only this machine can connect."""
        return _is_loopback(self.host)

    def is_known_host(self, host: str) -> bool:
        """Return True if a browser that sends this Host header shows a page of this server or of an allowed origin.

        Another site can let the name of its host resolve to 127.0.0.1, so that a browser lets the site's page send
        requests to a local server (DNS rebinding). Only the Host header shows that the page is from another site.
        """
        if not self.is_local or "*" in self.allowed_origins:
            return True
        names = {self.host.lower(), *(_host_name(urlsplit(origin).netloc) for origin in self.allowed_origins)}
        name = _host_name(host)
        return name in names or _is_loopback(name)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)


def _host_name(host: str) -> str:
    """Return the name or address in a Host header, without the port, or "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that owns the port, but does not listen yet. Raises ConfigError if the port cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier server's connections linger
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise port_error(host, port, error) from error
    return bound


def port_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"port={port} of host={host} cannot be used: {error.strerror or error}; choose another")


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
