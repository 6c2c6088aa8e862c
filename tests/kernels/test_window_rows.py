"""Where graphs find the tokens of layers with a window: in Triton's interpreter on a CPU, and on a GPU."""

import numpy as np
import pytest
import torch
from interpreter import needs_triton, on_device

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.capabilities.windows.memory import Row, WindowMemory
from nanovllm.plan.kv_spec import WindowSpec

pytestmark = needs_triton
PADDING = Row(0, 0, 0, ())


@on_device
@pytest.mark.parametrize(("window", "page_tokens", "num_more"), [(128, 128, 3), (13, 4, 0), (40, 8, 5)])
def test_kernel_finds_what_the_host_finds(device: str, window: int, page_tokens: int, num_more: int) -> None:
    """Rows with one or more new tokens, at the beginning of a text, within and after the first window; padding."""
    from nanovllm.kernels.window_rows import window_rows

    sizes = {"num_layers": 2, "window": window, "num_kv_heads": 1, "head_dim": 8, "scale": 1.0, "itemsize": 4}
    spec = WindowSpec(**sizes, page_tokens=page_tokens, max_guesses=7)
    memory = WindowMemory(spec, TorchBackend(), torch.float32, torch.device("cpu"), 9, 0)
    starts = (0, 1, window - 1, window, window + 1, 5 * window + 3, 1000)
    rows = [Row(1 + i, start, start + 1 + i % (1 + num_more), ()) for i, start in enumerate(starts)]
    num_tokens = sum(row.num_tokens for row in rows)
    size = num_tokens + 3
    lens = [row.num_tokens for row in rows] + [1] * 3
    cu_seqlens = np.minimum(np.cumsum([0, *lens, *[0] * (size - len(lens))]), size)
    padded = rows + [PADDING] * (size - len(rows))
    given = [cu_seqlens, [row.slot for row in padded], [row.end for row in padded]]
    tensors = [torch.as_tensor(np.array(each, np.int32), device=device) for each in given]
    shape = window, page_tokens, spec.num_pages, memory.slot_pages
    context_lens, tables, cells = (each.cpu() for each in window_rows(*tensors, *shape))
    expected_cells = np.concatenate([memory.cells(row.slot, np.arange(row.start, row.end)) for row in rows])
    assert cells.tolist() == [*expected_cells.tolist(), -1, -1, -1]
    for i, row in enumerate(rows):
        pages, num_keys = memory.table(row)
        assert context_lens[i] == num_keys and tables[i, : len(pages)].tolist() == pages.tolist()
        assert len(pages) <= tables.shape[1]
    assert not context_lens[len(rows) :].any() and ((tables >= 0) & (tables < 9 * memory.slot_pages)).all()
