"""A folder for a Ray that a test starts on this machine. All of its files are gone at the end."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def temporary_ray() -> Iterator[Path]:
    """Give Ray a short folder for its files, and hide every other Ray of this machine from it."""
    directory = Path(tempfile.mkdtemp(prefix="nvr", dir="/tmp"))  # the names of sockets have at most 107 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(directory))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # otherwise one process for each CPU that is claimed
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
