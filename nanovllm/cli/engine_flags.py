"""What the commands that start an engine share: the flags of the model and the engine, and what they resolve to."""

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.cli.flags import add_flags, flag_help, given_fields
from nanovllm.config import Config

CPU_STEP_TOKENS = 512  # about a second with a small model; the progress bar and Ctrl-C wait for the end of a step


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves room for most flags to have their help on the same line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def add_model_flag(group: Any) -> None:
    group.add_argument("--model", required=True, metavar="MODEL", help=flag_help(Config, "model"))


def add_engine_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, str] = MappingProxyType({})) -> None:
    """defaults: field -> what the help says about its default, where the command has its own."""
    step_tokens = f"{Config.max_num_batched_tokens}; on a CPU, {CPU_STEP_TOKENS}"
    add_flags(parser, Config, without=("model",), defaults={"max_num_batched_tokens": step_tokens, **defaults})


def engine_options(args: argparse.Namespace) -> Mapping[str, Any]:
    """The fields of Config that the flags give, and the command line's own default for a CPU. Loads torch."""
    options = given_fields(args, Config)
    from nanovllm.device.devices import resolve_device

    if resolve_device(Config(model=args.model, **options)).type == "cpu":
        options = {"max_num_batched_tokens": CPU_STEP_TOKENS} | options
    return options
