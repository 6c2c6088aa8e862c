"""How well a small model predicts held-out text, also after contexts that are longer than any it was trained on."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.python_sources import TokenArray

ROPE_THETA = 1e6
JUDGED_BYTES = 1024  # at the end of each held-out sequence


def yarn(trained_context: int, context: int) -> dict[str, Any]:
    """The entries of config.json with which YaRN extends the rope to `context` tokens."""
    factor = math.ceil(context / trained_context)
    parameters: dict[str, Any] = {"rope_type": "yarn", "rope_theta": ROPE_THETA, "factor": float(factor)}
    parameters["original_max_position_embeddings"] = trained_context
    return {"rope_parameters": parameters, "max_position_embeddings": factor * trained_context}


def autocast(device: str) -> torch.autocast:
    """Products in bf16, but not on a CPU, which is only for tests and may lack bf16 instructions."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu")


class HeldOut:
    """Bits per byte of the same held-out bytes, whatever the context before them."""

    def __init__(self, tokens: TokenArray, max_context: int, num_samples: int, device: str) -> None:
        assert max_context < len(tokens), f"{len(tokens)} held-out tokens are too few for a context of {max_context}"
        self._ends = [int(end) for end in np.linspace(max_context, len(tokens), num_samples)]
        self._tokens, self._device = torch.from_numpy(tokens), device

    def after_contexts(self, model: Any, contexts: Iterable[int]) -> dict[int, float]:
        return {context: self.bits_per_byte(model, context) for context in contexts}

    @torch.no_grad()
    def bits_per_byte(self, model: Any, context: int) -> float:
        nats = []
        with torch.compiler.set_stance("force_eager"), autocast(self._device):  # compiling would take longer than this
            for end in self._ends:
                token_ids = self._tokens[end - context : end].to(self._device).long()
                hidden = model.model(token_ids[None], use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[0, -JUDGED_BYTES - 1 : -1])
                nats.append(F.cross_entropy(logits.float(), token_ids[-len(logits) :]).item())
        return sum(nats) / len(nats) / math.log(2)
