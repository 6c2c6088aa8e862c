"""The sampling parameters that the sampler reads, as tensors."""

from typing import NamedTuple

import torch

GROUP_SIZE = 2048  # vocabulary entries; changing it changes which tokens a seed draws


class SamplingTensors(NamedTuple):
    """One value per row, [S], on the device of the logits."""

    temperature: torch.Tensor  # float32, 0: greedy
    top_k: torch.Tensor  # int64, 0: off
    top_p: torch.Tensor  # float32, 1: off
    min_p: torch.Tensor  # float32, 0: off
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64
