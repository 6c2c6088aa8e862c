"""The command line: `nanovllm demo`, `nanovllm generate` and `nanovllm plan`.

Flags are made from the fields of Config, SamplingParams, DemoOptions and PlanOptions, whose defaults and checks hold
here too; only a line of meaning for each is written below. Nothing heavy is imported before a command runs.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args

from nanovllm import __version__
from nanovllm.config import Config
from nanovllm.console import BadInputError, gate, stream_answer, summary
from nanovllm.demo.command import DemoOptions, run_demo
from nanovllm.errors import EngineError
from nanovllm.model_config import ModelConfig
from nanovllm.plan_check import check_plan
from nanovllm.planner import PlanOptions, make_plan
from nanovllm.sampling_params import SamplingParams

MODEL_HELP = "a directory, a hub name (owner/name), or a preset with --load-format dummy"
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model and device": {
        "device": "auto, cpu, cuda or cuda:N",
        "dtype": "of weights and KV: auto (the model's own), float32, bfloat16 or float16",
        "load_format": "auto, safetensors, or dummy (random weights, for benchmarks)",
        "hf_overrides": "entries that replace those of the model's config.json, as a JSON object",
        "attn_backend": "attention kernels: auto (the fastest here), flash, cudnn, triton or torch",
        "enforce_eager": "no CUDA graphs",
        "tensor_parallel_size": "processes the model is spread over, one device each, 1 to 8",
        "seed": "seed for random weights and for requests that set no seed",
    },
    "KV cache": {
        "max_model_len": "most tokens of prompt and answer together; unset: the model's own limit",
        "kvcache_block_size": "tokens per block, a multiple of 256; unset: 256, or 4096 with offload",
        "enable_prefix_caching": "reuse the KV of earlier prompts that begin the same way",
        "gpu_memory_utilization": "share of the GPU's memory the engine may use",
        "num_kvcache_blocks": "blocks on the GPU without offload; -1: what fits",
    },
    "CPU offload": {
        "enable_cpu_offload": "keep all KV in CPU memory and only some blocks on the GPU",
        "num_gpu_blocks": "slots on the GPU, 2 or more; unset: what fits",
        "num_cpu_blocks": "blocks in CPU memory; unset: room for two sequences of max_model_len",
        "cpu_memory_gb": "the same as a size in GiB",
    },
    "scheduling": {
        "max_num_batched_tokens": "most new tokens in one step; longer prompts are split",
        "max_num_seqs": "most sequences running at once",
        "chunked_prefill": "prompts and decodes share steps; off: prompts first",
    },
}
SAMPLING_HELP: dict[str, dict[str, str]] = {
    "sampling": {
        "temperature": "0 always takes the likeliest token",
        "max_tokens": "most new tokens",
        "top_k": "only the K likeliest tokens; 0: all",
        "top_p": "only the likeliest tokens that together reach this probability",
        "min_p": "only tokens at least this many times as likely as the likeliest",
        "stop": "end the text before any of these strings",
        "stop_token_ids": "end at any of these tokens too",
        "ignore_eos": "go on past the model's end token",
        "seed": "the same seed gives the same tokens",
    }
}
DEMO_HELP: dict[str, dict[str, str]] = {
    "the text": {
        "num_tokens": "length of the prompt",
        "depth": "where the passkey stands: 0 the start, 1 the end",
        "passkey": "what to hide; unset: drawn from the seed",
        "seed": "seed from which the passkey is drawn",
    },
    "the engine": {
        "num_gpu_blocks": "slots, 2 or more; unset: a fifth of the prompt's blocks",
        "device": "auto, cpu, cuda or cuda:N",
        "dtype": "float32 or bfloat16",
    },
}
PLAN_HELP: dict[str, dict[str, str]] = {
    "the work": {
        "context": "tokens of each sequence; unset: max_model_len",
        "sequences": "sequences that run together",
    },
    "the machine, where it is not this one": {
        "gpu": "name of a GPU, such as 'RTX 4090'; unset: the one here, else an H200",
        "gpu_memory_gb": "memory of one GPU in GiB; unset: the GPU's own",
        "host_memory_gb": "CPU memory available in GiB; unset: what is available here",
        "link_gb_per_s": "CPU memory to GPU in GB/s; unset: the GPU's, measured or projected",
    },
}
RENAMED: dict[tuple[type, str], str] = {(SamplingParams, "seed"): "sampling_seed"}  # Config has the plain name

EXAMPLE = """\
examples:
  nanovllm demo
  nanovllm generate --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --max-tokens 100
  nanovllm plan --model qwen3-0.6b --context 40960 --enable-cpu-offload --num-gpu-blocks 8
"""
GENERATE_EXAMPLE = """\
example, a book longer than the GPU's memory holds:
  nanovllm generate --model path/to/model --prompt-file book.txt \\
      --enable-cpu-offload --num-gpu-blocks 8 --temperature 0 --max-tokens 200
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for bad input, 130 after Ctrl-C, 1 for a plan that cannot work."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    try:
        status: int = args.run(args)
        return status
    except BadInputError as error:
        print(f"nanovllm: error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"nanovllm: the engine stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnanovllm: interrupted", file=sys.stderr)
        return 130


# -- commands ----------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    return run_demo(DemoOptions(**_given(args, DemoOptions)))


def _generate(args: argparse.Namespace) -> int:
    """The text goes to stdout, everything else to stderr."""
    with gate():
        prompt = args.prompt if args.prompt_file is None else _read_prompt(args.prompt_file)
        params = SamplingParams(**_given(args, SamplingParams))
        Config(model=args.model, **_given(args, Config))  # refuses bad options before torch is loaded
    from nanovllm.llm import LLM

    with gate():
        llm = LLM(args.model, **_given(args, Config))
    with llm:
        output = stream_answer(llm, prompt, params)
    print(summary(output), file=sys.stderr)
    return 0


def _plan(args: argparse.Namespace) -> int:
    """The plan goes to stdout; why it cannot work, if it cannot, to stderr."""
    with gate():
        options = PlanOptions(**_given(args, PlanOptions))
        config = Config(model=args.model, **_given(args, Config))
        model = ModelConfig.without_weights(config.model, config.hf_overrides)
    from nanovllm.engine.startup import find_machine

    with gate():
        machine = options.apply(find_machine(config))
    try:
        plan = make_plan(config, model, machine, context=options.context, num_sequences=options.sequences)
        print(plan)
        check_plan(plan)
    except ValueError as error:
        print(f"nanovllm: this cannot work: {error}", file=sys.stderr)
        return 1
    return 0


def _read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


# -- the parser --------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm",
        description="Long-context LLM inference: the KV cache lives in CPU memory, the GPU holds what it needs.",
        epilog=EXAMPLE,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_generate(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: Any) -> None:
    about = "find a passkey in a long text with most of its KV outside the slots; needs no download"
    parser = commands.add_parser("demo", help=about, description=about, formatter_class=_Formatter)
    parser.set_defaults(run=_demo)
    _add_flags(parser, DemoOptions, DEMO_HELP)


def _add_generate(commands: Any) -> None:
    about = "answer one prompt, printing the text as it comes"
    parser = commands.add_parser(
        "generate", help=about, description=about, epilog=GENERATE_EXAMPLE, formatter_class=_Formatter
    )
    parser.set_defaults(run=_generate)
    required = parser.add_argument_group("what to answer")
    required.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    prompt = required.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file that holds the prompt")
    _add_flags(parser, SamplingParams, SAMPLING_HELP)
    _add_flags(parser, Config, ENGINE_HELP, without=("model",))


def _add_plan(commands: Any) -> None:
    about = (
        "say what memory a run takes, how fast it can be at most and whether it can work; "
        "reads the model's config.json and nothing else"
    )
    parser = commands.add_parser("plan", help=about, description=about, formatter_class=_Formatter)
    parser.set_defaults(run=_plan)
    required = parser.add_argument_group("what to plan for")
    required.add_argument("--model", required=True, metavar="MODEL", help="a directory, a hub name, or a preset")
    _add_flags(parser, PlanOptions, PLAN_HELP)
    _add_flags(parser, Config, ENGINE_HELP, without=("model",))


def _add_flags(
    parser: argparse.ArgumentParser, options: type, groups: Mapping[str, Mapping[str, str]], without: Sequence[str] = ()
) -> None:
    """A flag for every field of the dataclass `options`. A flag that is not given leaves its field's default alone."""
    by_name = {field.name: field for field in fields(options) if field.name not in without}
    explained = [name for meanings in groups.values() for name in meanings]
    assert sorted(explained) == sorted(by_name), f"fields and help lines differ: {set(explained) ^ set(by_name)}"
    for title, meanings in groups.items():
        group = parser.add_argument_group(title)
        for name, meaning in meanings.items():
            group.add_argument(_flag(options, name), **_flag_settings(by_name[name], meaning))


def _flag_settings(field: Field[Any], meaning: str) -> dict[str, Any]:
    """Arguments of `add_argument` for a field, from its type and default."""
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": meaning}
    if field.type is bool:
        return settings | {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    kind = _scalar_type(field.type)
    settings |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT", _json_object: "JSON"}[kind]}
    if isinstance(field.default, tuple):
        return settings | {"action": "extend", "nargs": "+"}
    if field.default is not None:
        settings["help"] = f"{meaning} (default: {field.default})"
    return settings


def _scalar_type(annotation: Any) -> Any:
    """int, float, str or a parser of JSON, also out of `int | None` or `tuple[int, ...] | list[int]`."""
    if annotation in (int, float, str):
        return annotation
    if annotation is dict:
        return _json_object
    return next(kind for member in get_args(annotation) if (kind := _scalar_type(member)))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def _flag(options: type, name: str) -> str:
    return "--" + RENAMED.get((options, name), name).replace("_", "-")


def _given(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The fields of `options` whose flags were given."""
    by_dest = {RENAMED.get((options, field.name), field.name): field.name for field in fields(options)}
    return {name: getattr(args, dest) for dest, name in by_dest.items() if name != "model" and hasattr(args, dest)}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Room for the usual flag, so that the lines of meaning stand in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
