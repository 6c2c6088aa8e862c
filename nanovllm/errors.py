"""Errors of a running engine. Bad user input is a ValueError instead, raised before anything is touched."""


class EngineError(RuntimeError):
    """The engine cannot go on."""


class WorkerDiedError(EngineError):
    """A tensor-parallel worker process is gone or reported an exception."""
