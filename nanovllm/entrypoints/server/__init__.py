"""An HTTP server with OpenAI's API on top of AsyncLLM. The server needs the packages of the extra `server`.

    app = make_app(engine, ServerOptions(served_model_name=("my-model",)))

Importing this package loads none of these packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.errors import ConfigError, install_command

if TYPE_CHECKING:
    from nanovllm.entrypoints.server.app import make_app

__all__ = ["ServerOptions", "make_app"]


def __getattr__(name: str) -> object:
    if name != "make_app":
        raise AttributeError(f"module 'nanovllm.entrypoints.server' has no attribute {name!r}")
    try:
        import_module("fastapi")
        import_module("uvicorn")
    except ImportError as error:
        raise ConfigError(f"the server cannot start ({error}); run: {install_command('server')}") from error
    return import_module("nanovllm.entrypoints.server.app").make_app
