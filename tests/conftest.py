"""Skips tests marked `gpu` or `multi_gpu` where the GPUs are missing. Collection itself asks for no device."""

import pytest

GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [(item, num_gpus) for marker, num_gpus in GPUS_NEEDED.items() for item in items if marker in item.keywords]
    if not marked:
        return
    import torch

    available = torch.cuda.device_count()
    for item, num_gpus in marked:
        if available < num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {num_gpus} CUDA GPU(s), found {available}"))
