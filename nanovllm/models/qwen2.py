"""Qwen2 and Qwen2.5: the plain decoder with biases on q, k and v."""

from typing import ClassVar

from nanovllm.models.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    stacked_names: ClassVar = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
