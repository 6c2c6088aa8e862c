"""`nanovllm serve`: the engine behind an HTTP server with OpenAI's API.

The server's packages are imported only when it runs, because they are an extra and `--help` does not need them.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run_serve(model: str, shown_name: str, options: ServerOptions, engine_options: Mapping[str, Any]) -> int:
    """Serve until a signal arrives or the engine fails, and return the exit status.

    shown_name: what clients call the model, unless the options name it. Raises ConfigError if the extra is missing.
    """
    check_server_packages()
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.server.lifecycle import run_server

    return run_server(partial(AsyncLLM, model, **engine_options), options, shown_name)


def check_server_packages() -> None:
    """Raise ConfigError if a package of the extra `server` is missing."""
    for name in _NEEDED:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"nanovllm serve needs {error.name}; run: pip install 'nanovllm[server]'") from error
