"""The exceptions of this package.

Bad input raises one of three kinds of ValueError, whose message names the value, the limit and the remedy. A plain
ValueError is a bug in the engine.
"""


class ConfigError(ValueError):
    """An engine option is invalid, options contradict each other, or the engine cannot run on this machine."""


class RequestError(ValueError):
    """A prompt, a message or a sampling parameter is invalid, or the engine could never run the request."""


class CheckpointError(ValueError):
    """A model was not found, or one of its files is missing, damaged or unsupported."""


def install_command(extra: str) -> str:
    """Return the commands that install the packages of an extra, for the message of an error. PyPI has no release."""
    checkout = f"pip install --constraint constraints.txt '.[{extra}]' in nanovllm's checkout"
    return f"{checkout}, or pip install 'WHEEL[{extra}]' with the path of nanovllm's wheel"


class EngineError(RuntimeError):
    """The engine has failed or has been closed. The message says why. Create a new engine to continue."""


class WorkerDiedError(EngineError):
    """A tensor-parallel worker exited or raised an exception. The message says which one and why."""
