"""The server's port. It is bound before anything is loaded, so that a port in use is known at once."""

import socket

from nanovllm.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the port, but does not listen yet. Raises ConfigError if the port cannot be had."""
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
