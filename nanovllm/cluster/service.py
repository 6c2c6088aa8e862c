"""`nanovllm serve --num-replicas`: this process has the HTTP server, and Ray Serve runs the engines.

    this process    the port, connections, the gate (API keys, limits), the choice of a replica, the drain
    Ray Serve       places the replicas, asks for their health, replaces them, scales them
    replicas        an engine each, with the same HTTP application as a server of one engine

Serve's own HTTP proxies are switched off. Behind them, the limits on connections and slow clients would not hold, and
each part of an answer would pass through one more process.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray import serve

from nanovllm.async_llm import AsyncLLM
from nanovllm.cluster.front import Front
from nanovllm.cluster.ray_connection import connected
from nanovllm.cluster.serve_replicas import DEPLOYMENT, ServeReplicas
from nanovllm.cluster.service_options import ServiceOptions, check_engine
from nanovllm.cluster.service_plan import check_room, deployment_options, replica_resources
from nanovllm.cluster.service_replica import EngineReplica
from nanovllm.cluster.service_site import ServiceSite
from nanovllm.config import Config
from nanovllm.errors import EngineError
from nanovllm.server.errors import keep_messages_out
from nanovllm.server.gate import Gate, load_keys
from nanovllm.server.lifecycle import ended_by_sigterm, raise_file_limit, serve_until_stopped
from nanovllm.server.options import ServerOptions

LOCAL_OBJECT_STORE_BYTES = 512 << 20  # bodies and parts of answers above 100 KB pass through it


def run_service(
    load: Callable[[], AsyncLLM],
    config: Config,
    options: ServerOptions,
    service: ServiceOptions,
    bound: socket.socket,
) -> int:
    """Serve with replicas until a signal arrives, and return the exit status. Call it in the main thread.

    load: makes an engine; it is called in each replica, so it must be importable there. The other arguments are those
    of lifecycle.run_server. Raises ConfigError for what the cluster cannot run, EngineError if no replica starts.
    """
    check_engine(config)
    keep_messages_out("ray.serve")
    num_files = raise_file_limit()
    keys = load_keys(options)
    # Connecting sets Ray's own handler of SIGTERM
    with connected(service.ray_address, LOCAL_OBJECT_STORE_BYTES), ended_by_sigterm():
        app = _application(load, config, options, service)
        name = f"nanovllm-{socket.gethostname()}-{bound.getsockname()[1]}"
        with _deployed(app, name, outlives_process=service.ray_address is not None) as handle:
            replicas = ServeReplicas(handle, name, options.max_wait_s)
            front = Front(replicas, options.served_model_name[0])
            gate = Gate(front, options, keys, front.refused)
            site = ServiceSite(gate, front, replicas, partial(_replace_replicas, app, name))
            return serve_until_stopped(site, options, bound, num_files)


@contextmanager
def _deployed(app: serve.Application, name: str, outlives_process: bool) -> Iterator[Any]:
    """The application's handle, once its replicas are ready. It is deleted in the end, or ends with its cluster."""
    serve.start(proxy_location="Disabled")
    try:
        yield _run(app, name)
    finally:
        if outlives_process:
            serve.delete(name)


def _run(app: serve.Application, name: str) -> Any:
    try:
        return serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:  # what Serve raises if an application does not start
        raise EngineError(f"the replicas have not started: {_reason(name) or error}") from error


def _reason(app_name: str) -> str:
    """Why a replica has not started, as far as Serve knows: the last line of its traceback."""
    app = serve.status().applications.get(app_name)
    lines = app.deployments[DEPLOYMENT].message.strip().splitlines() if app is not None else []
    return lines[-1] if lines else ""


def _replace_replicas(app: serve.Application, name: str) -> None:
    """Begin a rolling update to the same application: Serve starts all replicas anew, some at a time."""
    target = serve.RunTarget(target=app, name=name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _application(
    load: Callable[[], AsyncLLM], config: Config, options: ServerOptions, service: ServiceOptions
) -> serve.Application:
    resources = replica_resources(config, service, int(ray.cluster_resources().get("GPU", 0)))
    check_room(service, resources, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    deployment = serve.deployment(EngineReplica, name=DEPLOYMENT, **deployment_options(config, options, service))
    return deployment.options(ray_actor_options=resources).bind(load, options)
