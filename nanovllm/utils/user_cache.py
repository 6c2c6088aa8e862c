"""The folder for what the package makes once and keeps."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return `nanovllm` in $XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
