"""What the sampler reads of each row, on the device of the logits."""

from typing import NamedTuple

import torch

GROUP_SIZE = 2048  # entries; it decides which tokens a seed draws


class SamplingTensors(NamedTuple):
    """One entry per row, [S], on the device of the logits."""

    temperature: torch.Tensor  # float32, 0: greedy
    top_k: torch.Tensor  # int64, 0: all
    top_p: torch.Tensor  # float32, 1: all
    min_p: torch.Tensor  # float32, 0: all
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64
