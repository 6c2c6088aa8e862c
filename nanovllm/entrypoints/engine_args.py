"""EngineArgs: how scripts for vLLM gather the arguments of LLM and AsyncLLM, also from the command line."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from nanovllm.config import Config
from nanovllm.entrypoints.cli.flags import add_flags, given_fields

Container = TypeVar("Container", bound=argparse._ActionsContainer)


class EngineArgs(dict[str, Any]):
    """The arguments of LLM: `LLM.from_engine_args(args)` and `LLM(**args)` are the same."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model=model, **options)

    def __getattr__(self, name: str) -> Any:
        """Return an argument, or the default of an argument that was not given."""
        return self[name] if name in self else getattr(Config, name)

    @staticmethod
    def add_cli_args(parser: Container) -> Container:
        """Add a flag for each field of Config. Flags that are not given are absent from the parsed arguments."""
        add_flags(parser, Config)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        return cls(args.model, **given_fields(args, Config))


AsyncEngineArgs = EngineArgs


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes flags with underscores, too, as vLLM's parser does."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given: Sequence[str] = sys.argv[1:] if args is None else args
        dashed = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), each) for each in given]
        return super().parse_known_args(dashed, namespace)
