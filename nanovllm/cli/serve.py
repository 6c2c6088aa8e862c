"""`nanovllm serve`: the engine behind an HTTP server with OpenAI's API.

The server's packages are imported only when it runs, because they are an extra and `--help` does not need them. The
port is bound before torch and the model are loaded.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import (
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    check_packages,
    engine_options,
    given_fields,
)
from nanovllm.cluster.options import ServiceOptions
from nanovllm.config import Config
from nanovllm.server.options import ServerOptions, bind

if TYPE_CHECKING:
    from nanovllm import AsyncLLM

MAX_STEP_MS = 200.0  # so that running answers keep their pace while a long prompt is read
EXAMPLE = """\
example, with the built-in model:
  nanovllm serve --model demo &
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "The passkey is 4711.\\nThe passkey is", "max_tokens": 6}'

Exit status: 0 after SIGTERM or Ctrl-C, 1 if the engine has failed, 2 for bad input or a port in use.
"""


def add_serve(commands: Any) -> None:
    about = "serve a model over HTTP, with OpenAI's API"
    parser = add_command(commands, "serve", about, _serve, (Config, ServerOptions, ServiceOptions), EXAMPLE)
    add_model_flag(parser.add_argument_group("what to serve"))
    add_flags(parser, ServerOptions)
    add_flags(parser, ServiceOptions)
    add_engine_flags(parser, {"max_step_ms": f"{MAX_STEP_MS:g}"})


def _serve(args: argparse.Namespace) -> int:
    """Serve until a signal arrives or the engine fails. Raises ConfigError if the port or a package cannot be used."""
    options = ServerOptions(**{"served_model_name": (args.model,), **given_fields(args, ServerOptions)})
    service = ServiceOptions(**given_fields(args, ServiceOptions))
    config = Config(model=args.model, **given_fields(args, Config))
    check_packages("nanovllm serve", ("fastapi", "uvicorn", "prometheus_client"), "server")
    if service.num_replicas is not None:
        return _serve_with_replicas(args, config, options, service)
    with bind(options.host, options.port) as bound:
        from nanovllm.server.lifecycle import run_server

        return run_server(partial(load_engine, args), options, bound)


def _serve_with_replicas(
    args: argparse.Namespace, config: Config, options: ServerOptions, service: ServiceOptions
) -> int:
    check_packages("num_replicas", ("ray.serve",), "ray")
    with bind(options.host, options.port) as bound:
        from nanovllm.cluster.service import run_service

        return run_service(partial(load_engine, args), config, options, service, bound)


def load_engine(args: argparse.Namespace) -> "AsyncLLM":
    """Runs in this process, or in each replica, whose device it then finds."""
    from nanovllm import AsyncLLM

    return AsyncLLM(args.model, **serving_options(args))


def serving_options(args: argparse.Namespace) -> Mapping[str, Any]:
    """The engine's options. Steps are bounded unless the flags say otherwise. Loads torch."""
    options = engine_options(args)
    return {"max_step_ms": MAX_STEP_MS} | dict(options) if options.get("chunked_prefill", True) else options
