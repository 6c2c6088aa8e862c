"""Errors that are not about input; bad input raises ValueError."""


class EngineError(RuntimeError):
    """The engine cannot go on, or has been closed. The message says why; a new engine can be made."""


class WorkerDiedError(EngineError):
    """A tensor-parallel worker has ended or raised an exception. The message says which one and why."""
