"""Llama 3.x: the plain decoder. Biases only where the checkpoint's `attention_bias` and `mlp_bias` say so."""

from typing import ClassVar

from nanovllm.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    stacked_names: ClassVar = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
