"""nanovllm: a long-context LLM inference engine. Importing the package loads neither torch nor CUDA."""

from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.utils import __version__

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.compat import cleanup_dist_env_and_memory
    from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError, WorkerDiedError
    from nanovllm.llm import LLM
    from nanovllm.llm_engine import LLMEngine
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.sampling_params import (
        GuidedDecodingParams,
        HarmonyTags,
        ReasoningTags,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from nanovllm.text.frontend import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineError",
    "FlexibleArgumentParser",
    "GuidedDecodingParams",
    "HarmonyTags",
    "LLMEngine",
    "ReasoningTags",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WorkerDiedError",
    "__version__",
    "cleanup_dist_env_and_memory",
]
_NAMES = {
    "async_llm": ("AsyncLLM",),
    "compat": ("cleanup_dist_env_and_memory",),
    "entrypoints.engine_args": ("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"),
    "llm": ("LLM",),
    "llm_engine": ("LLMEngine",),
    "outputs": ("CompletionOutput", "RequestOutput"),
    "sampling_params": (
        *("GuidedDecodingParams", "HarmonyTags", "ReasoningTags", "RequestOutputKind", "SamplingParams"),
        *("StructuredOutputs", "StructuredOutputsParams"),
    ),
    "text.frontend": ("TextPrompt", "TokensPrompt"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        from nanovllm.compat import IMPORTS

        if name in IMPORTS:  # `from nanovllm import name` would hide the message of an AttributeError
            raise ImportError(f"nanovllm has no {name}; {IMPORTS[name]}", name=name)
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    return getattr(import_module(f"nanovllm.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
