"""Keeps what users send out of the log: an exception is logged by its type and where it was raised, not its message.

The message of an exception can quote any value, such as a prompt. Our own messages in the log never do.
"""

import logging
import traceback

_LOGGERS = ("uvicorn.error", "uvicorn.asgi", "asyncio", "concurrent.futures")  # they log exceptions of requests


def keep_messages_out(*more: str) -> None:
    """Change how exceptions are logged in this process, also by the loggers `more`. Doing so twice changes nothing."""
    for name in (*_LOGGERS, *more):
        logging.getLogger(name).addFilter(_strip_message)


def _strip_message(record: logging.LogRecord) -> bool:
    """A filter that lets every record pass."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        frames = "".join(traceback.format_tb(error.__traceback__))
        record.exc_info, record.exc_text = None, f"{frames}{type(error).__qualname__} (its message is not logged)"
    return True
