"""Joining Ray and leaving it. Ray is one per process, and an engine may find it running or have to start it.

An engine uses the Ray that its process is connected to. If there is none, it calls `ray.init`, which connects to the
cluster that RAY_ADDRESS or `ray start` name, or starts Ray on this machine. The namespace tells later who called
`ray.init`: the last engine of the process disconnects what an engine has connected, and never what the caller has. If
an engine started Ray, Ray ends with that.
"""

import signal
import threading

import ray

_NAMESPACE = "nanovllm"


def join_ray() -> None:
    """Make sure that this process uses Ray.

    Ray's handler of SIGTERM is taken back, because what a signal does is the caller's choice.
    """
    if ray.is_initialized():
        return
    if threading.current_thread() is not threading.main_thread():
        _join_from_lasting_thread()
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _init()
    finally:
        signal.signal(signal.SIGTERM, handler)


def leave_ray() -> None:
    """Disconnect from Ray if an engine connected this process. Called by its last engine."""
    context = ray.get_runtime_context()
    if context.namespace == _NAMESPACE and not is_actor():
        ray.shutdown()


def is_actor() -> bool:
    """Whether this process belongs to Ray, rather than being a script that uses it."""
    return ray.get_runtime_context().get_actor_id() is not None


def _init() -> None:
    ray.init(namespace=_NAMESPACE, include_dashboard=False)


def _join_from_lasting_thread() -> None:
    """Linux ends the processes of a Ray that was started here with the thread that started them, so that must stay."""
    done = threading.Event()
    errors: list[BaseException] = []

    def init_and_stay() -> None:
        try:
            _init()
        except BaseException as error:
            errors.append(error)
        done.set()
        if not errors:
            threading.Event().wait()

    threading.Thread(target=init_and_stay, name="nanovllm-ray", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]
