"""Why a file could not be had from the hub."""

from collections.abc import Iterator
from socket import gaierror


def hub_fault(error: Exception) -> str:
    """Return the text of an error of huggingface_hub or, where no connection came about, the reason and what to do."""
    for each in _causes(error):
        if isinstance(each, ConnectionError | TimeoutError | gaierror):
            return (
                f"the hub cannot be reached ({each}); check the network, set HF_ENDPOINT to a mirror, or give a local "
                "directory or a file in GGUF"
            )
    return str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
