"""A user's cache for one test or module, with the kernels of CPU attention that other tests have compiled."""

from pathlib import Path

import pytest

from nanovllm.utils import user_cache


def use_private_cache(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Compiling a kernel takes seconds, so link those that are there."""
    compiled = list(user_cache().glob("attention_*.so"))
    patch.setenv("XDG_CACHE_HOME", str(directory))
    user_cache().mkdir(parents=True)
    for library in compiled:
        (user_cache() / library.name).symlink_to(library)
