"""`nanovllm batch`: answers the rows of files with one engine or many, on Ray Data.

Ray and what belongs to it are imported only when the command runs, because they are an extra and `--help` does not need
them.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import (
    CPU_STEP_TOKENS,
    PYTHON_ONLY,
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    check_packages,
    given_fields,
)
from nanovllm.cluster.options import BatchOptions
from nanovllm.config import Config
from nanovllm.demo import model_path
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.cluster.batch_job import JobSummary

EXAMPLE = """\
A row has one of the columns prompt, messages and prompt_token_ids. Any field of SamplingParams may be a column, too,
and goes ahead of its flag. The parts of the output have the same rows, with the columns text, token_ids, finish_reason,
num_cached_tokens and error. The same command again resumes a job that was interrupted.

example, with the built-in model:
  printf '{"prompt": "The passkey is 4711.\\\\nThe passkey is", "max_tokens": 6}\\n' > prompts.jsonl
  nanovllm batch --model demo --input prompts.jsonl --output answers/

Exit status: 0 if all rows have run, also if some have an error; 1 if engines fail again and again; 2 for bad input.
"""


def add_batch(commands: Any) -> None:
    about = "answer the rows of files, with engines on one machine or many"
    parser = add_command(commands, "batch", about, _batch, (Config, SamplingParams, BatchOptions), EXAMPLE)
    required = parser.add_argument_group("what to answer")
    add_model_flag(required)
    required.add_argument(
        "--input", type=Path, nargs="+", required=True, metavar="FILE", help="files of JSON lines, or of Parquet"
    )
    required.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder for the parts; a new one, or the job's own"
    )
    add_flags(parser, BatchOptions)
    max_tokens = f"{SamplingParams.max_tokens}; for messages, no limit"
    about = "For rows without such a column. The model's generation_config.json may change these defaults."
    add_flags(parser, SamplingParams, without=PYTHON_ONLY, defaults={"max_tokens": max_tokens}, about=about)
    add_engine_flags(parser)


def _batch(args: argparse.Namespace) -> int:
    """Run the job. Everything is printed to stderr, because the answers are in files."""
    options = BatchOptions(**given_fields(args, BatchOptions))
    sampling = given_fields(args, SamplingParams)
    SamplingParams(**sampling)
    given = given_fields(args, Config)
    Config(model=args.model, **given)
    check_packages("nanovllm batch", ("ray", "pyarrow"), "ray")
    from nanovllm.cluster.batch_job import BatchJob, run_job
    from nanovllm.engine.setup import find_machine

    job = BatchJob(
        inputs=args.input,
        output=args.output,
        options=options,
        config=Config(model=_on_every_machine(model_path(args.model)), **given),
        given=given,
        cpu_defaults={"max_num_batched_tokens": CPU_STEP_TOKENS},
        sampling=sampling,
        find_machine=find_machine,
    )
    start_s = time.perf_counter()
    try:
        summary = run_job(job)
    except KeyboardInterrupt:
        print("\nThe parts that are finished stay; repeat the command to go on from there.", file=sys.stderr)
        raise
    print(_describe(summary, time.perf_counter() - start_s, args.output), file=sys.stderr)
    return 0


def _on_every_machine(model: str) -> str:
    """The model's name, or its whole path: the engines run in other folders."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _describe(summary: "JobSummary", seconds: float, output: Path) -> str:
    num_rows = summary.num_rows - summary.num_rows_before
    before = f"; {summary.num_rows_before:,} had been answered before" if summary.num_rows_before else ""
    return (
        f"{num_rows:,} rows in {seconds:,.0f} s, {summary.num_errors:,} of them with an error; "
        f"{summary.num_tokens:,} new tokens, {summary.num_tokens / seconds:,.0f} tok/s{before}. "
        f"The answers are in {output}"
    )
