"""The command line: `nanovllm chat`, `serve` and the other commands that `_parser` names.

flags.py makes the flags, their defaults and their help from the fields of Config, SamplingParams, DemoOptions,
ServerOptions, ServiceOptions, BatchOptions, PlanOptions and VerifyOptions. Heavy modules and the packages of an extra
are imported only when a command runs, so that `--help` does not need them. Each of the other modules of this folder
implements a command, or with console.py the commands of a terminal.

Bad input raises ConfigError, RequestError or CheckpointError, which `main` prints as one line. An exception that `main`
does not catch is a bug and keeps its traceback.
"""

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.capacity.fit import USUAL_CONTEXT, choose, fits
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan_check import check_plan
from nanovllm.checkpoint.files import check_tokenizer
from nanovllm.checkpoint.read_config import config_without_weights, load_config
from nanovllm.config import Config
from nanovllm.entrypoints.cli.cache import add_cache_command
from nanovllm.entrypoints.cli.console import (
    chat_request,
    choose_sampling,
    drop_closed_stdout,
    escape_unencodable_output,
    print_answers,
    run_chat,
    stream_answer,
    summary,
)
from nanovllm.entrypoints.cli.demo import DemoOptions, run_demo
from nanovllm.entrypoints.cli.flags import (
    CPU_STEP_TOKENS,
    PYTHON_ONLY,
    Formatter,
    Parser,
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    check_packages,
    engine_options,
    flag_name,
    given_fields,
    name_flags,
)
from nanovllm.entrypoints.cli.launch import add_launch_command
from nanovllm.entrypoints.cli.models import add_list_command, add_pull_command
from nanovllm.entrypoints.cli.ps import add_ps_command
from nanovllm.entrypoints.cli.verify import ENGINE_FLAGS, VerifyOptions, run_verify
from nanovllm.entrypoints.cluster.resources import BatchOptions, ServiceOptions, needs_ray
from nanovllm.entrypoints.documents import before_question, decode_text, read_document
from nanovllm.entrypoints.planner import PlanOptions, fit_table, plan_table
from nanovllm.entrypoints.server.log_lines import set_up_log
from nanovllm.entrypoints.server.options import ServerOptions, bind
from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError
from nanovllm.models.demo_model import DEMO_MODEL, model_path
from nanovllm.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm import AsyncLLM
    from nanovllm.entrypoints.cluster.batch_job import JobSummary
    from nanovllm.llm import LLM

ANSWER_ROOM = 8192  # tokens for questions and answers after long documents
TEXT_ONLY = ("skip_tokenizer_init",)  # options that commands for text do not have
MAX_STEP_MS = 200.0  # a server's default, so that running answers keep their pace while a long prompt is read
EXAMPLE = """\
examples:
  nanovllm demo
  nanovllm chat --model Qwen/Qwen3-0.6B --system "Answer briefly."
  nanovllm generate --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --max-tokens 100
  nanovllm serve --model Qwen/Qwen3-0.6B --enable-cpu-offload
  nanovllm batch --model Qwen/Qwen3-0.6B --input prompts.jsonl --output answers/
  nanovllm plan --model qwen3-0.6b --context 40960 --enable-cpu-offload --num-gpu-blocks 8
"""
REMEDIES = {  # for Ollama's commands that are not ours
    "run": "use nanovllm chat MODEL, or nanovllm serve MODEL for an API",
    "stop": "end a server with kill and the PID that nanovllm ps lists",
    "rm": "remove a downloaded model with hf cache rm model/OWNER/NAME",
    "show": "use nanovllm plan MODEL",
}
GENERATE_EXAMPLE = """\
example, a book whose KV cache does not fit in the GPU's memory:
  nanovllm generate --model path/to/model --prompt-file book.txt \\
      --enable-cpu-offload --num-gpu-blocks 8 --temperature 0 --max-tokens 200
"""
CHAT_EXAMPLE = """\
Each turn reuses the KV of the earlier ones. Type /help for the commands. From a pipe, every line is a message:
  printf 'The passkey is 4711.\\nThe passkey is\\n' | nanovllm chat --model demo
"""

SERVE_EXAMPLE = """\
example, with the built-in model:
  nanovllm serve --model demo &
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "The passkey is 4711.\\nThe passkey is", "max_tokens": 6}'

Exit status: 0 after SIGTERM or Ctrl-C, 1 if the engine has failed, 2 for bad input or a port in use.
"""
BATCH_EXAMPLE = """\
A row has one of the columns prompt, messages and prompt_token_ids. Any field of SamplingParams may be a column, too,
and takes precedence over its flag. The parts of the output have the same rows, with the columns text, token_ids,
finish_reason, num_cached_tokens and error. The same command again resumes a job that was interrupted.

example, with the built-in model:
  printf '{"prompt": "The passkey is 4711.\\\\nThe passkey is", "max_tokens": 6}\\n' > prompts.jsonl
  nanovllm batch --model demo --input prompts.jsonl --output answers/

Exit status: 0 if all rows have run, even if some have an error; 1 if engines fail repeatedly; 2 for bad input.
"""
VERIFY_EXAMPLE = """\
example, with the built-in model:
  nanovllm verify --model demo

Exit status: 0 if all paths agree, 1 if one differs or the engine fails, 2 for bad input.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    1: the plan cannot work, or the request or the engine failed. 2: bad input. 130: Ctrl-C. 141: stdout was closed.
    """
    return run_command(_parser().parse_args(argv))


def run_command(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments, and return its exit status."""
    if getattr(args, "kv_disk_path", ""):  # engines in other processes have other working directories
        args.kv_disk_path = str(Path(args.kv_disk_path).expanduser().absolute())
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    logging.getLogger("nanovllm").addFilter(_log_flags)
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
        return 141  # the status after SIGPIPE
    finally:
        logging.getLogger("nanovllm").removeFilter(_log_flags)


def _log_flags(record: logging.LogRecord) -> bool:
    """Put flags in place of the engine's options in a message of the log."""
    record.msg, record.args = name_flags(record.getMessage(), (Config,)), ()
    return True


def _complain(args: argparse.Namespace, message: str) -> None:
    """Print to stderr, with the command's flags in place of the options that the message mentions."""
    print(f"nanovllm: {name_flags(message, args.option_types)}", file=sys.stderr)


# -- commands ----------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    return run_demo(DemoOptions(**given_fields(args, DemoOptions)))


def _generate(args: argparse.Namespace) -> int:
    """Answer one prompt. The text goes to stdout, everything else to stderr."""
    in_chat = args.chat or bool(args.document)
    if args.system is not None and not in_chat:
        raise RequestError("--system needs the model's chat template; add --chat")
    prompt = args.prompt if args.prompt_file is None else _read_text("--prompt-file", args.prompt_file)
    prompt = before_question(list(map(read_document, args.document)), prompt)
    sampling = given_fields(args, SamplingParams)
    if args.schema is not None:
        sampling["structured_outputs"] = StructuredOutputs(json=_read_text("--schema", args.schema))
    if args.regex is not None:
        sampling["structured_outputs"] = StructuredOutputs(regex=args.regex)
    llm = _open_llm(args, needs_template=in_chat, text=prompt)
    with llm:
        params = choose_sampling(llm, sampling, in_chat=in_chat)
        if in_chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            prompt, params = chat_request(llm, [*system, {"role": "user", "content": prompt}], params)
        outputs = [stream_answer(llm, prompt, params)] if params.n == 1 else print_answers(llm, prompt, params)
    for output in outputs:
        print(summary(output), file=sys.stderr)
        if "error" in output:
            _complain(args, f"the request failed: {output['error']}")
    return 1 if any("error" in output for output in outputs) else 0


def _chat(args: argparse.Namespace) -> int:
    documents = list(map(read_document, args.document))
    llm = _open_llm(args, needs_template=True, text=before_question(documents, ""))
    with llm:
        params = choose_sampling(llm, given_fields(args, SamplingParams), in_chat=True)
        return run_chat(llm, params, args.system, documents)


def _plan(args: argparse.Namespace) -> int:
    """Print a plan to stdout. If the plan cannot work, print the reason to stderr first."""
    options, given = PlanOptions(**given_fields(args, PlanOptions)), given_fields(args, Config)
    given.pop("fit", None)  # PlanOptions has another option of this name
    if args.model is None and not options.fit:
        raise ConfigError("plan needs a model, or --fit for a list of what runs")
    config = Config(model=DEMO_MODEL if args.model is None else args.model, fit=options.fit, **given)
    from nanovllm.llm import find_machine

    machine = find_machine(config, measures_cpu=options.gpu is None and options.cpu_gb_per_s is None)
    machine = options.apply(machine)
    if options.fit:
        if chosen := [flag_name(Config, name) for name in given if name not in ("device", "quantization")]:
            raise ConfigError(f"fit chooses the engine's options; leave out {', '.join(chosen)}")
        models = [] if args.model is None else [model_path(args.model)]
        found = fits(machine, models, config.quantization, options.context)
        print(fit_table(machine, found, config.quantization, options.context))
        return 0 if found else 1
    stored = config_without_weights(model_path(config.model), config.hf_overrides)
    plan, status, context, num_sequences = None, 1, options.context, options.sequences
    text = ""
    try:
        choice = choose(config, given, stored, machine, context=context, num_sequences=num_sequences)
        text = choice.text
        plan = make_plan(choice.config, choice.model, machine, context=context, num_sequences=num_sequences)
        check_plan(plan)
        status = 0
    except ConfigError as error:
        _complain(args, f"this cannot work: {error}")
    if plan is not None:
        print(plan_table(plan))
        if text:
            print(f"  {name_flags(text, (Config,))}")
    return status


def _verify(args: argparse.Namespace) -> int:
    options = VerifyOptions(**given_fields(args, VerifyOptions))
    given = given_fields(args, Config)
    Config(model=args.model, enable_cpu_offload=True, **given)
    logging.getLogger("nanovllm").setLevel(logging.WARNING)  # the report is enough; each path logs an engine's start
    return run_verify(args.model, options, given)


def _config(args: argparse.Namespace) -> Config:
    return Config(model=args.model, **given_fields(args, Config))


def _require_tokenizer(config: Config) -> None:
    """Raise CheckpointError for a model without a tokenizer, unless the command works on token ids alone."""
    if not config.skip_tokenizer_init:
        check_tokenizer(model_path(config.model), "work on token ids alone with skip_tokenizer_init=True")


def _open_llm(args: argparse.Namespace, *, needs_template: bool, text: str = "") -> "LLM":
    """Start the engine with the options of the flags. Invalid flags are refused before torch is loaded.

    text: what is asked. If it is long and the context is not given, the context has room for it and an answer.
    """
    SamplingParams(**given_fields(args, SamplingParams))
    _config(args)
    remedy = "give LLM.generate lists of token ids in Python"
    check_tokenizer(model_path(args.model), remedy, needs_template=needs_template)
    from nanovllm.llm import LLM, Internals

    options = dict(engine_options(args))
    if len(text) > USUAL_CONTEXT and options["fit"] is not False and "max_model_len" not in options:
        least = _context_for(args.model, text, options.get("hf_overrides"))
        options["internals"] = Internals(least_context=least)
    return LLM(args.model, **options)


def _context_for(model: str, text: str, hf_overrides: Mapping[str, Any] | None) -> int:
    """Return the context for this text and an answer."""
    from nanovllm.text.frontend import TextFrontend

    config, directory = load_config(model_path(model), hf_overrides)
    return len(TextFrontend(config, directory).encode_prompt(text)) + ANSWER_ROOM


def _read_text(flag: str, path: Path) -> str:
    """Return the text of a file, or of stdin if the path is "-", without a byte order mark."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise RequestError(f"{flag} {path}: {error.strerror}") from error
    return decode_text(f"{flag} {path}", content)


# -- serve -------------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    """Serve until a signal arrives or the engine fails. Raises ConfigError if the port or a package cannot be used."""
    name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    options = ServerOptions(**{"served_model_name": (name or args.model,), **given_fields(args, ServerOptions)})
    service = ServiceOptions(**given_fields(args, ServiceOptions))
    config = _config(args)
    check_packages("nanovllm serve", ("fastapi", "uvicorn", "prometheus_client", "zstandard"), "server")
    if service.num_replicas is not None:
        check_packages("num_replicas", ("ray.serve",), "ray")
    with bind(options.host, options.port) as bound:  # before torch and the model are loaded
        set_up_log(options.log_level, options.log_format)
        load = partial(load_engine, args)
        if service.num_replicas is None:
            from nanovllm.entrypoints.server.lifecycle import run_server

            return run_server(load, options, bound)
        from nanovllm.entrypoints.cluster.service import run_service

        return run_service(load, config, options, service, bound)


def serve_in_process(args: argparse.Namespace) -> int:
    """Serve with the arguments of another command, in another process."""
    args.run = _serve
    return run_command(args)


def load_engine(args: argparse.Namespace) -> "AsyncLLM":
    """Start the engine in this process. A replica calls this function on its machine, which has the GPUs."""
    _require_tokenizer(_config(args))
    from nanovllm import AsyncLLM

    return AsyncLLM(args.model, **serving_options(args))


def serving_options(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the engine's options, with a bound on the time of steps unless the flags give one. Loads torch.

    Replicas may share a machine, whose CPU memory no replica may plan with alone, so they choose no options.
    """
    options = dict(engine_options(args))
    if given_fields(args, ServiceOptions).get("num_replicas") is not None and options["fit"] is None:
        options["fit"] = False
    return {"max_step_ms": MAX_STEP_MS} | options if options.get("chunked_prefill", True) else options


# -- batch -------------------------------------------------------------------------------------------------------


def _batch(args: argparse.Namespace) -> int:
    """Run the job. Everything is printed to stderr, because the answers are in files."""
    options = BatchOptions(**given_fields(args, BatchOptions))
    sampling = given_fields(args, SamplingParams)
    SamplingParams(**sampling)
    given = given_fields(args, Config)
    config = _config(args)
    _require_tokenizer(config)
    for path in args.input:
        if path.suffix == ".parquet":
            check_packages(f"input {str(path)!r}", ("pyarrow",), "parquet")
    from nanovllm.llm import find_machine, num_gpus

    if reason := needs_ray(options, config, num_gpus()):
        check_packages(reason, ("ray", "pyarrow"), "ray")
        from nanovllm.entrypoints.cluster.batch_ray import units_on_ray as run_units
    else:
        from nanovllm.entrypoints.cluster.batch_process import units_in_process as run_units
    from nanovllm.entrypoints.cluster.batch_job import BatchJob, run_job

    job = BatchJob(
        inputs=args.input,
        output=args.output,
        options=options,
        config=Config(model=_on_every_machine(model_path(args.model)), **given),
        given=given,
        cpu_defaults={"max_num_batched_tokens": CPU_STEP_TOKENS},
        sampling=sampling,
        find_machine=find_machine,
        run_units=run_units,
    )
    start_s = time.perf_counter()
    try:
        summary = run_job(job)
    except (KeyboardInterrupt, SystemExit):  # SIGTERM
        print("\nFinished parts are kept; repeat the command to compute the other parts.", file=sys.stderr)
        raise
    print(_describe(summary, time.perf_counter() - start_s, args.output), file=sys.stderr)
    return 0


def _on_every_machine(model: str) -> str:
    """Return the model's name, or its absolute path because the engines have other working directories."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _describe(summary: "JobSummary", seconds: float, output: Path) -> str:
    num_rows = summary.num_rows - summary.num_rows_before
    before = f"; {summary.num_rows_before:,} had been answered before" if summary.num_rows_before else ""
    return (
        f"{num_rows:,} rows in {seconds:,.0f} s, {summary.num_errors:,} of them with an error; "
        f"{summary.num_tokens:,} new tokens, {summary.num_tokens / seconds:,.0f} tok/s{before}. "
        f"The answers are in {output}"
    )


# -- the parser --------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanovllm",
        description="Long-context LLM inference, with the KV cache on the GPU or offloaded to CPU memory.",
        epilog=EXAMPLE,
        formatter_class=Formatter,
    )
    parser.remedies = REMEDIES
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_serve(commands)
    _add_batch(commands)
    _add_plan(commands)
    _add_verify(commands)
    add_cache_command(commands)
    add_launch_command(commands, serve_in_process)
    add_list_command(commands)
    add_pull_command(commands)
    add_ps_command(commands)
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
    _add_document_flag(required)
    _add_request_flags(parser, max_tokens="no limit")


def _add_generate(commands: Any) -> None:
    about = "answer one prompt and print the text as it is generated"
    parser = add_command(commands, "generate", about, _generate, (Config, SamplingParams), GENERATE_EXAMPLE)
    required = parser.add_argument_group("what to answer")
    add_model_flag(required)
    prompt = required.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", action=_Once, metavar="TEXT", help="the prompt")
    about_file = "a text file with the prompt; - for stdin"
    prompt.add_argument("--prompt-file", action=_Once, type=Path, metavar="FILE", help=about_file)
    _add_document_flag(required)
    required.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    required.add_argument("--system", metavar="TEXT", help="the system prompt; needs --chat or --document")
    constraint = parser.add_argument_group("what the answer must match").add_mutually_exclusive_group()
    constraint.add_argument("--schema", type=Path, metavar="FILE", help="file with a JSON schema; - for stdin")
    constraint.add_argument("--regex", metavar="TEXT", help="regular expression that the whole answer matches")
    max_tokens = f"{SamplingParams.max_tokens}; with --chat or --document, no limit"
    _add_request_flags(parser, max_tokens, without=[name for name in PYTHON_ONLY if name != "n"])


class _Once(argparse.Action):
    """Stores the value of a flag, and refuses a second one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"argument {option_string}: given twice; generate answers one prompt")
        setattr(namespace, self.dest, values)


def _add_document_flag(group: Any) -> None:
    about = "text, PDF, DOCX or HTML file that the question is about; repeat the flag for several"
    group.add_argument("--document", type=Path, action="append", default=[], metavar="FILE", help=about)


def _add_serve(commands: Any) -> None:
    about = "serve a model over HTTP, with OpenAI's API"
    parser = add_command(commands, "serve", about, _serve, (Config, ServerOptions, ServiceOptions), SERVE_EXAMPLE)
    add_model_flag(parser.add_argument_group("what to serve"))
    add_flags(parser, ServerOptions)
    add_flags(parser, ServiceOptions)
    add_engine_flags(parser, {"max_step_ms": f"{MAX_STEP_MS:g}"})


def _add_batch(commands: Any) -> None:
    about = "answer the rows of files, with engines on one machine or many"
    parser = add_command(commands, "batch", about, _batch, (Config, SamplingParams, BatchOptions), BATCH_EXAMPLE)
    required = parser.add_argument_group("what to answer")
    add_model_flag(required)
    required.add_argument(
        "--input", type=Path, nargs="+", required=True, metavar="FILE", help="files of JSON lines, or of Parquet"
    )
    required.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="new folder for the parts, or the folder of the job",
    )
    add_flags(parser, BatchOptions)
    max_tokens = f"{SamplingParams.max_tokens}; for messages, no limit"
    about = "For rows without the column. The model's generation_config.json may change these defaults."
    add_flags(parser, SamplingParams, without=PYTHON_ONLY, defaults={"max_tokens": max_tokens}, about=about)
    add_engine_flags(parser, without=("fit",))


def _add_plan(commands: Any) -> None:
    about = (
        "show the memory that a run needs, the bounds of its speed, and whether the run can work; "
        "reads only the model's config.json"
    )
    parser = add_command(commands, "plan", about, _plan, (Config, PlanOptions))
    required = parser.add_argument_group("what to plan for")
    about = "directory, GGUF file, hub name, preset, or demo (built in); with --fit, all presets by default"
    required.add_argument("--model", metavar="MODEL", help=about)
    add_flags(parser, PlanOptions)
    add_flags(parser, Config, without=("model", "fit", *TEXT_ONLY))


def _add_verify(commands: Any) -> None:
    about = "check that offload, CPU attention and draft tokens do not change answers on this machine"
    parser = add_command(commands, "verify", about, _verify, (Config, VerifyOptions), VERIFY_EXAMPLE)
    add_model_flag(parser.add_argument_group("what to check"))
    add_flags(parser, VerifyOptions)
    add_flags(parser, Config, without=[field.name for field in fields(Config) if field.name not in ENGINE_FLAGS])


def _add_request_flags(parser: argparse.ArgumentParser, max_tokens: str, without: Sequence[str] = PYTHON_ONLY) -> None:
    """Add the flags of the sampling parameters and of the engine.

    max_tokens: the help's text about the default of max_tokens.
    """
    about = "The model's generation_config.json may change these defaults."
    add_flags(parser, SamplingParams, without=without, defaults={"max_tokens": max_tokens}, about=about)
    add_engine_flags(parser, without=TEXT_ONLY)
