"""nanovllm: a long-context LLM inference engine. Importing the package loads neither torch nor CUDA."""

from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.utils import __version__

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError, WorkerDiedError
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.sampling_params import ReasoningTags, RequestOutputKind, SamplingParams, StructuredOutputs
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
    "ReasoningTags",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "WorkerDiedError",
    "__version__",
]
_MODULES = {
    "LLM": "nanovllm.llm",
    "AsyncLLM": "nanovllm.async_llm",
    **dict.fromkeys(("CompletionOutput", "RequestOutput"), "nanovllm.outputs"),
    **dict.fromkeys(("TextPrompt", "TokensPrompt"), "nanovllm.text.frontend"),
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"), "nanovllm.entrypoints.engine_args"),
    "RequestOutputKind": "nanovllm.sampling_params",
    "ReasoningTags": "nanovllm.sampling_params",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutputs": "nanovllm.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        from nanovllm.compat import IMPORTS

        if name in IMPORTS:  # `from nanovllm import name` would hide the message of an AttributeError
            raise ImportError(f"nanovllm has no {name}; {IMPORTS[name]}", name=name)
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "nanovllm.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
