"""Qwen3: every head of q and k is normed before rope (`q_norm` and `k_norm`, of one head's size)."""

from typing import ClassVar

from nanovllm.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    stacked_names: ClassVar = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
