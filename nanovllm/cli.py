"""The command line: `nanovllm demo`, `nanovllm chat`, `nanovllm generate` and `nanovllm plan`.

Flags are made from the fields of Config, SamplingParams, DemoOptions and PlanOptions, whose defaults and checks hold
here too (flags.py); only a line of meaning for each is written below. Nothing heavy is imported before a command runs.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.chat import run_chat
from nanovllm.config import Config
from nanovllm.console import (
    BadInputError,
    choose_sampling,
    drop_closed_stdout,
    escape_unencodable_output,
    gate,
    stream_answer,
    summary,
)
from nanovllm.demo.command import DemoOptions, run_demo
from nanovllm.errors import EngineError
from nanovllm.flags import add_flags, given_fields, name_flags
from nanovllm.model_config import ModelConfig
from nanovllm.plan_check import check_plan
from nanovllm.planner import PlanOptions, make_plan
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.llm import LLM

DEMO_MODEL = "demo"
MODEL_HELP = "a directory, a hub name (owner/name), demo (built in), or a preset with --load-format dummy"
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model and device": {
        "device": "auto, cpu, cuda or cuda:N",
        "dtype": "of weights and KV: auto (the model's own), float32, bfloat16 or float16",
        "load_format": "auto, safetensors, or dummy (random weights, for benchmarks)",
        "hf_overrides": "entries that replace those of the model's config.json, as a JSON object",
        "attn_backend": "attention kernels: auto (the fastest here), flash, cudnn, triton or torch",
        "enforce_eager": "no CUDA graphs",
        "tensor_parallel_size": "processes the model is spread over, one device each, 1 to 8",
        "generation_config": "sampling defaults of the model's generation_config.json: auto (use them) or none",
        "seed": "seed for random weights and for requests that set no seed",
    },
    "KV cache": {
        "max_model_len": "most tokens of prompt and answer together; unset: the model's own limit",
        "kvcache_block_size": "tokens per block, a multiple of 256; unset: 256, or 4096 where num_gpu_blocks is given",
        "enable_prefix_caching": "reuse the KV of earlier prompts that begin the same way",
        "gpu_memory_utilization": "share of the GPU's memory the engine may use",
        "num_kvcache_blocks": "blocks on the GPU without offload; -1: what fits",
    },
    "CPU offload": {
        "enable_cpu_offload": "keep all KV in CPU memory and only some blocks on the GPU",
        "num_gpu_blocks": "slots on the GPU, 2 or more; unset: what fits",
        "num_cpu_blocks": "blocks in CPU memory; unset: two sequences of max_model_len, or as many as slots if more",
        "cpu_memory_gb": "the same as a size in GiB",
    },
    "scheduling": {
        "max_num_batched_tokens": "most new tokens in one step (default: 16384; generate and chat on a CPU: 512)",
        "max_num_seqs": "most sequences running at once",
        "chunked_prefill": "prompts and decodes share steps; off: prompts first",
    },
}
SAMPLING_HELP: dict[str, dict[str, str]] = {
    "sampling (what the model's generation_config.json names has its defaults from there)": {
        "temperature": "0 always takes the likeliest token",
        "max_tokens": "most new tokens (default: 64; in a chat, as many as the context has room for)",
        "top_k": "only the K likeliest tokens; 0: all",
        "top_p": "only the likeliest tokens that together reach this probability",
        "min_p": "only tokens at least this many times as likely as the likeliest",
        "stop": "end the text before any of these strings",
        "stop_token_ids": "end at any of these tokens too",
        "ignore_eos": "go on past the model's end token",
        "seed": "the same seed gives the same tokens",
        "skip_special_tokens": "leave special tokens out of the text",
        "include_stop_str_in_output": "show the stop string or end token that ended the text",
    }
}
WITHOUT_TEXT = ("detokenize",)  # these commands print the text
CPU_STEP_TOKENS = 512  # about a second of a small model: Ctrl-C waits for the step, and the bar moves after it
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
    from nanovllm.engine.startup import find_machine

    with gate():
        machine = options.apply(find_machine(config))
    try:
        plan = make_plan(config, model, machine, context=options.context, num_sequences=options.sequences)
        print(plan)
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
    from nanovllm.engine.startup import resolve_device
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
