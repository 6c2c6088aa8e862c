"""The folder of an engine's files, and the options of a plain engine that uses it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checked_engine import ALL_GPU, Reference


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def options(path: Path) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "kv_disk_path": str(path), **ALL_GPU}


@pytest.fixture(params=["reference", "hybrid"])
def model(request: pytest.FixtureRequest) -> Reference:
    """A model with attention alone, and one with recurrent layers, too."""
    reference: Reference = request.getfixturevalue(request.param)
    return reference


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A slow disk: no file is finished before the event is set."""
    event, sync = threading.Event(), os.fdatasync

    def slow_sync(fd: int) -> None:
        event.wait()
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    yield event
    event.set()
