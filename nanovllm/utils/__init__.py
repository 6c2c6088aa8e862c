"""The package's version, its cache folder, and progress bars."""

import os
import sys
from pathlib import Path
from typing import Any

__version__ = "0.2.0"  # pyproject.toml reads it here


def user_cache() -> Path:
    """Return the folder `nanovllm` in $XDG_CACHE_HOME or ~/.cache. The folder may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


def progress_bar(*args: Any, is_wanted: bool = True, **options: Any) -> Any:
    """Return a tqdm bar on stderr. The bar is shown in terminals and notebooks only, never in a log file."""
    from tqdm.auto import tqdm

    is_shown = is_wanted and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    return tqdm(*args, disable=not is_shown, dynamic_ncols=True, **options)
