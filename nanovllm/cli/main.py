"""The command line: `nanovllm demo`, `nanovllm chat`, `nanovllm generate` and `nanovllm plan`.

Flags are made from the fields of Config, SamplingParams, DemoOptions and PlanOptions, whose defaults and checks hold
here too (flags.py); flag_help.py has a line of meaning for each. Nothing heavy is imported before a command runs.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.capacity.plan_check import check_plan
from nanovllm.capacity.plan_table import plan_table
from nanovllm.capacity.planner import PlanOptions, make_plan
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.cli.chat import run_chat
from nanovllm.cli.console import (
    BadInputError,
    choose_sampling,
    drop_closed_stdout,
    escape_unencodable_output,
    gate,
    stream_answer,
    summary,
)
from nanovllm.cli.demo import DemoOptions, run_demo
from nanovllm.cli.flag_help import DEMO_HELP, ENGINE_HELP, MODEL_HELP, PLAN_HELP, SAMPLING_HELP
from nanovllm.cli.flags import add_flags, given_fields, name_flags
from nanovllm.config import Config
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.llm import LLM

DEMO_MODEL = "demo"
WITHOUT_TEXT = ("detokenize",)  # these commands print the text
CPU_STEP_TOKENS = 512  # about a second of a small model: Ctrl-C waits for the step, and the bar moves after it
EXAMPLE = """\
examples:
  nanovllm demo
  nanovllm chat --model Qwen/Qwen3-0.6B --system "Answer briefly."
  nanovllm generate --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --max-tokens 100
  nanovllm plan --model qwen3-0.6b --context 40960 --enable-cpu-offload --num-gpu-blocks 8
"""
GENERATE_EXAMPLE = """\
example, a book longer than the GPU's memory holds:
  nanovllm generate --model path/to/model --prompt-file book.txt \\
      --enable-cpu-offload --num-gpu-blocks 8 --temperature 0 --max-tokens 200
"""
CHAT_EXAMPLE = """\
Each turn finds the earlier ones in the prefix cache. Type /help for the commands. From a pipe, every line is a
message:
  printf 'The passkey is 4711.\\nThe passkey is\\n' | nanovllm chat --model demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for bad input, 130 after Ctrl-C, 141 where nobody reads stdout any
    more, 1 for a plan that cannot work.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    escape_unencodable_output()
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BadInputError as error:
        _complain(args, f"error: {error}")
        return 2
    except EngineError as error:
        _complain(args, f"the engine stopped: {error}")
        return 1
    except KeyboardInterrupt:
        print("\nnanovllm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not drop_closed_stdout():
            raise
        return 141  # as after SIGPIPE


def _complain(args: argparse.Namespace, message: str) -> None:
    """On stderr, with the command's flags where the message names options."""
    print(f"nanovllm: {name_flags(message, args.option_types)}", file=sys.stderr)


# -- commands ----------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    return run_demo(DemoOptions(**given_fields(args, DemoOptions)))


def _generate(args: argparse.Namespace) -> int:
    """The text goes to stdout, everything else to stderr."""
    with gate():
        if args.system is not None and not args.chat:
            raise ValueError("--system is written by the model's chat template; add --chat")
        prompt = args.prompt if args.prompt_file is None else _read_prompt(args.prompt_file)
    llm = _open_llm(args)
    with llm:
        params = choose_sampling(llm, given_fields(args, SamplingParams), in_chat=args.chat)
        if args.chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            with gate():
                prompt = llm.chat_token_ids([*system, {"role": "user", "content": prompt}])[0]
        output = stream_answer(llm, prompt, params)
    print(summary(output), file=sys.stderr)
    if "error" in output:
        _complain(args, f"the request failed: {output['error']}")
    return 1 if "error" in output else 0


def _chat(args: argparse.Namespace) -> int:
    llm = _open_llm(args)
    with llm:
        with gate():
            llm.check_chat_template()
        params = choose_sampling(llm, given_fields(args, SamplingParams), in_chat=True)
        return run_chat(llm, params, args.system)


def _plan(args: argparse.Namespace) -> int:
    """The plan goes to stdout; why it cannot work, if it cannot, to stderr."""
    with gate():
        options = PlanOptions(**given_fields(args, PlanOptions))
        config = Config(model=_model(args.model), **given_fields(args, Config))
        model = ModelConfig.without_weights(config.model, config.hf_overrides)
    from nanovllm.engine.setup import find_machine

    with gate():
        machine = options.apply(find_machine(config))
    try:
        plan = make_plan(config, model, machine, context=options.context, num_sequences=options.sequences)
        print(plan_table(plan))
        check_plan(plan)
    except ValueError as error:
        _complain(args, f"this cannot work: {error}")
        return 1
    return 0


def _open_llm(args: argparse.Namespace) -> "LLM":
    """The engine that the flags ask for. Bad flags are refused before torch is loaded."""
    options = given_fields(args, Config)
    with gate():
        SamplingParams(**given_fields(args, SamplingParams))
        config = Config(model=args.model, **options)
        model = _model(args.model)
    from nanovllm.device.devices import resolve_device
    from nanovllm.llm import LLM

    with gate():
        if resolve_device(config).type == "cpu":
            options = {"max_num_batched_tokens": CPU_STEP_TOKENS} | options
        return LLM(model, **options)


def _model(name: str) -> str:
    """The model's name, or the directory of the built-in one, which is written there first."""
    if name != DEMO_MODEL or Path(name).is_dir():
        return name
    from nanovllm.demo.retrieval_model import build_retrieval_model

    try:
        return str(build_retrieval_model())
    except OSError as error:
        raise ValueError(
            f"the built-in model cannot be written ({error}); set XDG_CACHE_HOME to a directory"
        ) from error


def _read_prompt(path: Path) -> str:
    """The content of a file, or of stdin for "-"."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
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
    _add_chat(commands)
    _add_generate(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: Any) -> None:
    about = "find a passkey in a long text with most of its KV outside the slots; needs no download"
    parser = commands.add_parser("demo", help=about, description=about, formatter_class=_Formatter)
    parser.set_defaults(run=_demo, option_types=(DemoOptions,))
    add_flags(parser, DemoOptions, DEMO_HELP)


def _add_chat(commands: Any) -> None:
    about = "hold a conversation with the model's chat template; Ctrl-C stops an answer, Ctrl-D ends"
    parser = commands.add_parser("chat", help=about, description=about, epilog=CHAT_EXAMPLE, formatter_class=_Formatter)
    parser.set_defaults(run=_chat, option_types=(Config, SamplingParams))
    required = parser.add_argument_group("the conversation")
    required.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    required.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_flags(parser, SamplingParams, SAMPLING_HELP, without=WITHOUT_TEXT)
    add_flags(parser, Config, ENGINE_HELP, without=("model",))


def _add_generate(commands: Any) -> None:
    about = "answer one prompt, printing the text as it comes"
    parser = commands.add_parser(
        "generate", help=about, description=about, epilog=GENERATE_EXAMPLE, formatter_class=_Formatter
    )
    parser.set_defaults(run=_generate, option_types=(Config, SamplingParams))
    required = parser.add_argument_group("what to answer")
    required.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    prompt = required.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file that holds the prompt; -: stdin")
    required.add_argument("--chat", action="store_true", help="the prompt is a message for the model's chat template")
    required.add_argument("--system", metavar="TEXT", help="with --chat: the system prompt")
    add_flags(parser, SamplingParams, SAMPLING_HELP, without=WITHOUT_TEXT)
    add_flags(parser, Config, ENGINE_HELP, without=("model",))


def _add_plan(commands: Any) -> None:
    about = (
        "say what memory a run takes, how fast it can be at most and whether it can work; "
        "reads the model's config.json and nothing else"
    )
    parser = commands.add_parser("plan", help=about, description=about, formatter_class=_Formatter)
    parser.set_defaults(run=_plan, option_types=(Config, PlanOptions))
    required = parser.add_argument_group("what to plan for")
    required.add_argument("--model", required=True, metavar="MODEL", help="a directory, a hub name, demo, or a preset")
    add_flags(parser, PlanOptions, PLAN_HELP)
    add_flags(parser, Config, ENGINE_HELP, without=("model",))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Room for the usual flag, so that the lines of meaning stand in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
