"""The command line: `nanovllm demo`, `chat`, `generate`, `serve`, `batch` and `plan`.

flags.py makes the flags, their defaults and their help from the fields of Config, SamplingParams, DemoOptions,
ServerOptions, ServiceOptions, BatchOptions and PlanOptions. Nothing heavy is imported before a command runs.

Bad input raises ConfigError, RequestError or CheckpointError, which `main` prints as one line. An exception that `main`
does not catch is a bug and keeps its traceback.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.capacity.plan import PlanOptions, make_plan, plan_table
from nanovllm.capacity.plan_check import check_plan
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.cli.batch import add_batch
from nanovllm.cli.console import (
    choose_sampling,
    drop_closed_stdout,
    escape_unencodable_output,
    run_chat,
    stream_answer,
    summary,
)
from nanovllm.cli.demo import DemoOptions, run_demo
from nanovllm.cli.flags import (
    PYTHON_ONLY,
    Formatter,
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    engine_options,
    given_fields,
    name_flags,
)
from nanovllm.cli.serve import add_serve
from nanovllm.config import Config
from nanovllm.demo import model_path
from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.llm import LLM

EXAMPLE = """\
examples:
  nanovllm demo
  nanovllm chat --model Qwen/Qwen3-0.6B --system "Answer briefly."
  nanovllm generate --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --max-tokens 100
  nanovllm serve --model Qwen/Qwen3-0.6B --enable-cpu-offload
  nanovllm batch --model Qwen/Qwen3-0.6B --input prompts.jsonl --output answers/
  nanovllm plan --model qwen3-0.6b --context 40960 --enable-cpu-offload --num-gpu-blocks 8
"""
GENERATE_EXAMPLE = """\
example, a book whose KV cache does not fit in the GPU's memory:
  nanovllm generate --model path/to/model --prompt-file book.txt \\
      --enable-cpu-offload --num-gpu-blocks 8 --temperature 0 --max-tokens 200
"""
CHAT_EXAMPLE = """\
Each turn reuses the KV of the earlier ones. Type /help for the commands. From a pipe, every line is a message:
  printf 'The passkey is 4711.\\nThe passkey is\\n' | nanovllm chat --model demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    1: the plan cannot work, or the request or the engine failed. 2: bad input. 130: Ctrl-C. 141: stdout was closed.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    escape_unencodable_output()
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except (ConfigError, RequestError, CheckpointError) as error:
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
    """Print to stderr, with the command's flags in place of the options that the message mentions."""
    print(f"nanovllm: {name_flags(message, args.option_types)}", file=sys.stderr)


# -- commands ----------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    return run_demo(DemoOptions(**given_fields(args, DemoOptions)))


def _generate(args: argparse.Namespace) -> int:
    """The text goes to stdout, everything else to stderr."""
    if args.system is not None and not args.chat:
        raise RequestError("--system needs the model's chat template; add --chat")
    prompt = args.prompt if args.prompt_file is None else _read_prompt(args.prompt_file)
    llm = _open_llm(args)
    with llm:
        params = choose_sampling(llm, given_fields(args, SamplingParams), in_chat=args.chat)
        if args.chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            prompt = llm.chat_token_ids([*system, {"role": "user", "content": prompt}])[0]
        output = stream_answer(llm, prompt, params)
    print(summary(output), file=sys.stderr)
    if "error" in output:
        _complain(args, f"the request failed: {output['error']}")
    return 1 if "error" in output else 0


def _chat(args: argparse.Namespace) -> int:
    llm = _open_llm(args)
    with llm:
        llm.check_chat_template()
        params = choose_sampling(llm, given_fields(args, SamplingParams), in_chat=True)
        return run_chat(llm, params, args.system)


def _plan(args: argparse.Namespace) -> int:
    """The plan goes to stdout. If it cannot work, the reason goes to stderr."""
    options = PlanOptions(**given_fields(args, PlanOptions))
    config = Config(model=model_path(args.model), **given_fields(args, Config))
    model = ModelConfig.without_weights(config.model, config.hf_overrides)
    from nanovllm.engine.setup import find_machine

    machine = options.apply(find_machine(config))
    try:
        plan = make_plan(config, model, machine, context=options.context, num_sequences=options.sequences)
        print(plan_table(plan))
        check_plan(plan)
    except ConfigError as error:
        _complain(args, f"this cannot work: {error}")
        return 1
    return 0


def _open_llm(args: argparse.Namespace) -> "LLM":
    """Start the engine that the flags ask for. Invalid flags are refused before torch is loaded."""
    SamplingParams(**given_fields(args, SamplingParams))
    Config(model=args.model, **given_fields(args, Config))
    from nanovllm.llm import LLM

    return LLM(args.model, **engine_options(args))


def _read_prompt(path: Path) -> str:
    """The content of a file, or of stdin if the path is "-"."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise RequestError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt-file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


# -- the parser --------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm",
        description="Long-context LLM inference, with the KV cache on the GPU or offloaded to CPU memory.",
        epilog=EXAMPLE,
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_chat(commands)
    _add_generate(commands)
    add_serve(commands)
    add_batch(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: Any) -> None:
    about = "find a passkey in a long text whose KV is mostly in CPU memory; needs no download"
    add_flags(add_command(commands, "demo", about, _demo, (DemoOptions,)), DemoOptions)


def _add_chat(commands: Any) -> None:
    about = "chat with a model; Ctrl-C stops an answer, Ctrl-D ends the program"
    parser = add_command(commands, "chat", about, _chat, (Config, SamplingParams), CHAT_EXAMPLE)
    required = parser.add_argument_group("the conversation")
    add_model_flag(required)
    required.add_argument("--system", metavar="TEXT", help="the system prompt")
    _add_request_flags(parser, max_tokens="no limit")


def _add_generate(commands: Any) -> None:
    about = "answer one prompt and print the text as it is generated"
    parser = add_command(commands, "generate", about, _generate, (Config, SamplingParams), GENERATE_EXAMPLE)
    required = parser.add_argument_group("what to answer")
    add_model_flag(required)
    prompt = required.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file with the prompt; - for stdin")
    required.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    required.add_argument("--system", metavar="TEXT", help="the system prompt; needs --chat")
    _add_request_flags(parser, max_tokens=f"{SamplingParams.max_tokens}; with --chat, no limit")


def _add_plan(commands: Any) -> None:
    about = (
        "show how much memory a run needs, how fast it can be at most, and whether it can work; "
        "reads only the model's config.json"
    )
    parser = add_command(commands, "plan", about, _plan, (Config, PlanOptions))
    required = parser.add_argument_group("what to plan for")
    required.add_argument(
        "--model", required=True, metavar="MODEL", help="directory, hub name, preset, or demo (built in)"
    )
    add_flags(parser, PlanOptions)
    add_flags(parser, Config, without=("model",))


def _add_request_flags(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """Flags for the sampling parameters and the engine.

    max_tokens: what the command's help says about its default.
    """
    about = "The model's generation_config.json may change these defaults."
    add_flags(parser, SamplingParams, without=PYTHON_ONLY, defaults={"max_tokens": max_tokens}, about=about)
    add_engine_flags(parser)
