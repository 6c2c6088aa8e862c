"""Progress bars, which logs do not get."""

import sys
from typing import Any

from tqdm.auto import tqdm


def progress_bar(*args: Any, is_wanted: bool = True, **options: Any) -> Any:
    """A tqdm bar on stderr, or an invisible one if nobody could watch it: only terminals and notebooks show bars."""
    is_shown = is_wanted and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    return tqdm(*args, disable=not is_shown, dynamic_ncols=True, **options)
