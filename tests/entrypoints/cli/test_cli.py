"""The command line: its flags, its exit statuses, and `generate` on the embedded model."""

import argparse
import fcntl
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import LIMIT_S

from nanovllm.checkpoint.read_config import load_config
from nanovllm.config import Config
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.demo import DemoOptions
from nanovllm.entrypoints.cli.flags import add_engine_flags, add_model_flag, engine_options, given_fields, name_flags
from nanovllm.entrypoints.cluster.resources import BatchOptions, ServiceOptions
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.entrypoints.planner import PlanOptions
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.errors import CheckpointError, ConfigError, RequestError
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.options import help_of

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PASSKEY = "q7m2x9kd"
OFFLOAD_FLAGS = "--enable-cpu-offload --kvcache-block-size 256 --num-gpu-blocks 2 --num-cpu-blocks 8".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_retrieval_model(tmp_path_factory.mktemp("model") / "retrieval"))


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(build_haystack(1500, 0.3, PASSKEY))
    return str(path)


def test_usage_names_what_a_command_needs_and_no_flag_that_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: forty flags came before the first line of help."""
    for command, needed in (("serve", "MODEL"), ("generate", "MODEL"), ("cache", "PATH")):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        usage = capsys.readouterr().out.partition("\n\n")[0]
        assert usage.startswith(f"usage: nanovllm {command} ") and needed in usage and len(usage) < 100


def _generate(model: str, *flags: str) -> int:
    pool = [] if "--enable-cpu-offload" in flags else ["--num-kvcache-blocks", "8"]
    return cli.main(["generate", "--model", model, "--device", "cpu", "--max-model-len", "2048", *pool, *flags])


def _parse(*flags: str) -> tuple[Config, SamplingParams]:
    args = cli._parser().parse_args(["generate", "--model", "m", "--prompt", "p", *flags])
    return Config(model=args.model, **given_fields(args, Config)), SamplingParams(**given_fields(args, SamplingParams))


# -- flags -------------------------------------------------------------------------------------------------------


def test_help_any_command_loads_no_torch() -> None:
    code = """
import sys
from nanovllm.entrypoints.cli.main import main
commands = "demo plan chat generate serve batch verify cache launch list pull ps".split()
for argv in (["--help"], *([name, "--help"] for name in commands)):
    try:
        main(argv)
    except SystemExit as leave:
        assert not leave.code, leave.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prompt-file FILE" in done.stdout and "--num-tokens N" in done.stdout


def test_flags_none_given_leave_every_default() -> None:
    assert _parse() == (Config(model="m"), SamplingParams())


def test_flags_of_every_kind_reach_their_field() -> None:
    config, params = _parse(
        *("--enable-cpu-offload", "--num-gpu-blocks", "8", "--cpu-memory-gb", "1.5", "--no-chunked-prefill"),
        *("--enforce-eager", "--dtype", "bfloat16", "--seed", "3", "--hf-overrides", '{"rope_theta": 5}'),
        *("--temperature", "0", "--stop", "a", "b", "--stop", "c", "--stop-token-ids", "1", "2"),
        *("--sampling-seed", "4", "--ignore-eos"),
    )
    assert config == Config(
        model="m",
        enable_cpu_offload=True,
        num_gpu_blocks=8,
        cpu_memory_gb=1.5,
        chunked_prefill=False,
        enforce_eager=True,
        dtype="bfloat16",
        seed=3,
        hf_overrides={"rope_theta": 5},
    )
    assert params == SamplingParams(temperature=0, stop=("a", "b", "c"), stop_token_ids=(1, 2), seed=4, ignore_eos=True)


def test_name_flags_replaces_fields_and_nothing_else() -> None:
    for message, expected in (
        ("num_gpu_blocks=1 must be 2 or more", "--num-gpu-blocks=1 must be 2 or more"),
        ("add enable_cpu_offload=True", "add --enable-cpu-offload"),
        ("use chunked_prefill=False, or raise max_model_len.", "use --no-chunked-prefill, or raise --max-model-len."),
        ("SamplingParams.seed=x, seed=y", "--sampling-seed=x, --seed=y"),
        ("SamplingParams.top_k=-3 of the model's seed", "--top-k=-3 of the model's seed"),
        *(
            (same, same)
            for same in ("a/max_model_len/b model.max_tokens", "'max_model_len', --seed, max_model_len_limit")
        ),
    ):
        assert name_flags(message, (Config, SamplingParams)) == expected


def test_help_field_with_choices_names_them_all() -> None:
    choices = {field.name: field.metadata["choices"] for field in fields(Config) if "choices" in field.metadata}
    expected = {"attn_backend", "dtype", "load_format", "generation_config", "cpu_attention", "speculation"}
    expected |= {"quantization", "quantize_head", "embedding_on_cpu"}
    assert set(choices) == expected
    assert all(str(choice) in help_of(Config, name) for name in choices for choice in choices[name])


def test_options_every_field_has_help_and_a_group() -> None:
    for options in (Config, SamplingParams, DemoOptions, PlanOptions, BatchOptions, ServiceOptions, ServerOptions):
        assert all(field.metadata["help"] and field.metadata["group"] for field in fields(options))
        groups = [title for title, _ in groupby(fields(options), key=lambda field: field.metadata["group"])]
        assert len(groups) == len(set(groups)), "the fields of a group are beside each other"


def test_help_of_a_command_says_what_every_field_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    for command, own in (("generate", SamplingParams), ("serve", ServerOptions), ("batch", BatchOptions)):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        out = capsys.readouterr().out
        for options in (Config, own):
            hidden = (*cli.PYTHON_ONLY, *(cli.TEXT_ONLY if command == "generate" else ()))
            hidden += ("fit",) if command == "batch" else ()
            shown = [field for field in fields(options) if field.name not in hidden]
            assert all(name_flags(field.metadata["help"], (options, Config)) in out for field in shown)
        assert "by default 256, or 4096 if --num-gpu-blocks is given" in out and "70% of" in out
        assert "(default: 16384; on a CPU, 512)" in out
        assert command != "generate" or "(default: 64; with --chat or --document, no limit)" in out


# -- bad input ---------------------------------------------------------------------------------------------------


def test_main_bad_flags_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("", ""),
        ("serve", ""),
        ("generate --prompt x", ""),
        ("generate --model m", ""),
        ("generate --model m --prompt x --prompt-file y", ""),
        ("generate --model m --prompt x --max-tokens many", ""),
        ("generate --model m --prompt x --no-such-option", ""),
        ("generate --model m --prompt x --max-tok 3", "unknown flag --max-tok, did you mean --max-tokens?"),
        ("chat --model m --n 3", "unknown flag --n;"),
        ("generate --model m --promt hi", "unknown flag --promt, did you mean --prompt?"),
        ("generate --modle m --prompt hi", "unknown flag --modle, did you mean --model?"),
        ("serve --model m --enable_cpu_offload", "unknown flag --enable_cpu_offload, did you mean --enable-cpu-"),
        ("serve --model=m --prot=80", "unknown flag --prot, did you mean --port?"),
        ("cache list --pth x", "unknown flag --pth"),
        ("run x", "unknown command run; use nanovllm chat MODEL, or nanovllm serve MODEL for an API;"),
        ("stop x", "unknown command stop; end a server with kill and the PID that nanovllm ps lists;"),
        ("rm x", "unknown command rm; remove a downloaded model with hf cache rm model/OWNER/NAME;"),
        ("show x --verbose", "unknown command show; use nanovllm plan MODEL;"),
        ("genrate x", "unknown command genrate, did you mean generate?"),
        ("create x", "unknown command create; nanovllm --help lists"),
        ("generate --model m --prompt", "expected one argument"),
        ("generate --model m --prompt x --regex a --schema b", "not allowed with"),
        ("generate --model m --prompt x --hf-overrides {", "not JSON"),
        ("generate --model m --prompt x --hf-overrides [1]", "not a JSON object: [1]"),
        ("plan --model m --context long", "not an integer, such as 131072, 131k or 1m: 'long'"),
    ):
        with pytest.raises(SystemExit) as leave:
            cli.main(line.split())
        err = capsys.readouterr().err
        assert leave.value.code == 2 and message in err
        assert err.startswith("nanovllm") and err.count("\n") == 1 and "--help lists what there is" in err


def test_generate_bad_input_says_why_and_exits_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"abc\x00d")
    cases: tuple[tuple[list[str], str], ...] = (
        (["--prompt", "x", "--num-gpu-blocks", "8"], "applies only to CPU offload; add --enable-cpu-offload\n"),
        (["--prompt", "x", "--kvcache-block-size", "300"], "multiple of 256"),
        (["--prompt", "x", "--temperature", "-1"], "error: --temperature=-1.0 must be 0"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 2048], "leaves no room for an answer in --max-model-len=2048; shorten the prompt or raise"),
        (["--prompt", "x", "--temperature", "1e39"], "must be 0 (greedy), or from 1e-10 to 1e+10"),
        (["--prompt", "x", "--num-kvcache-blocks", "100000000"], "lower --num-kvcache-blocks to"),
        (["--prompt", "x", "--enable-cpu-offload", "--num-gpu-blocks", "100000000"], "lower --num-gpu-blocks to"),
        (["--prompt", "x", "--device", "cuda:abc"], "error: --device='cuda:abc' is unknown"),
        (["--prompt-file", "no/such/file"], "no/such/file: No such file"),
        (["--prompt-file", str(ROOT)], "Is a directory"),
        (["--prompt-file", str(tmp_path / "binary")], "binary is not text; documents"),
        (["--prompt", "x", "--system", "y"], "--system needs the model's chat template; add --chat"),
        (["--prompt", "x", "--model", "./no/such/model"], "'./no/such/model' does not exist"),
    )
    for flags, message in cases:
        assert _generate(model, *flags) == 2
        captured = capsys.readouterr()
        assert "nanovllm: error: " in captured.err and message in captured.err
        assert captured.out == ""


def test_model_empty_name_is_not_the_current_directory(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it was."""
    monkeypatch.chdir(model)
    assert cli.main(["generate", "--model", "", "--prompt", "x", "--device", "cpu"]) == 2
    assert cli.main(["plan", "--model", "", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("nanovllm: error: --model='' must be a directory") == 2
    with pytest.raises(CheckpointError, match="model directory '' does not exist"):
        load_config("")


@pytest.mark.parametrize("place", ["nanovllm.engine.setup.make_plan", "nanovllm.llm.LLM.step"])
def test_value_error_past_the_gates_is_not_hidden(model: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("a bug, not the user")

    monkeypatch.setattr(place, fail)
    with pytest.raises(ValueError, match="a bug"):
        _generate(model, "--prompt", "x")


def test_main_bad_input_of_any_kind_is_one_line_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (ConfigError, RequestError, CheckpointError):

        def fail(options: object, kind: type[ValueError] = kind) -> int:
            raise kind("num_tokens=1 is too few")

        monkeypatch.setattr(cli, "run_demo", fail)
        assert cli.main(["demo"]) == 2
        assert capsys.readouterr().err == "nanovllm: error: --num-tokens=1 is too few\n"


# -- generate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine_flags", [[], OFFLOAD_FLAGS], ids=["resident", "offload"])
def test_generate_prompt_file_prints_the_answer_and_at_a_terminal_the_progress(
    model: str,
    prompt_file: str,
    engine_flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: not engine_flags)
    flags = ["--prompt-file", prompt_file, "--temperature", "0", "--max-tokens", "12", "--stop", "."]
    assert _generate(model, *flags, *engine_flags) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{PASSKEY}\n"
    is_shown = "Prefill: 100%" in captured.err and "1500/1500" in captured.err
    assert is_shown != ("tok/s]" not in captured.err and "Loading" not in captured.err)
    assert is_shown == (not engine_flags)
    assert "1,500 prompt tokens (0 cached), 9 new" in captured.err and "finish reason: stop" in captured.err


def test_generate_on_a_cpu_runs_short_steps_unless_told_otherwise(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R3: a prompt of 14,517 tokens was one step, for which Ctrl-C waited 11 s with the bar at 0%."""
    argv = ["generate", "--model", model, "--prompt", "x", "--num-kvcache-blocks", "8"]
    steps = {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for flags in ((), ("--device", "cpu"), ("--max-num-batched-tokens", "4096")):
        with cli._open_llm(cli._parser().parse_args([*argv, *flags]), needs_template=False) as llm:
            steps[flags] = llm.config.max_num_batched_tokens
    assert list(steps.values()) == [512, 512, 4096]


@pytest.mark.slow
def test_generate_output_that_is_closed_ends_it_quietly(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B5: a traceback of BrokenPipeError, as of `generate ... | head -c 20`."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    argv = ["generate", "--model", model, "--prompt", "one two three one two three", "--device", "cpu"]
    # More than a pipe holds, so that it has not ended when the pipe is closed
    flags = ["--max-model-len", "81920", "--num-kvcache-blocks", "320", "--max-tokens", "80000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", *argv, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(20) == b" one two three one t"
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=LIMIT_S) == 141, errors
    assert "Traceback" not in errors and "Exception" not in errors


def test_output_that_is_closed_is_status_141(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(QWEN) == 141


@pytest.mark.slow
def test_plan_output_that_is_closed_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the output is written when the program ends."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "nanovllm", *QWEN], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert process.returncode == 141, process.stderr
    assert "Traceback" not in process.stderr and "Exception" not in process.stderr


@pytest.mark.slow
def test_generate_output_of_a_narrow_encoding_escapes_what_it_lacks(model: str) -> None:
    """B5: UnicodeEncodeError in the middle of an answer."""
    prompt = "The price is 5 \u20ac, cheap.\nThe price is"
    argv = ["generate", "--model", model, "--prompt", prompt, "--device", "cpu", "--num-kvcache-blocks", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", *argv, "--stop", ".", "--temperature", "0"],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b" 5 \\u20ac, cheap\n"


# -- plan --------------------------------------------------------------------------------------------------------

QWEN = ["plan", "--model", "qwen3-0.6b", "--enable-cpu-offload", "--host-memory-gb", "64"]


def test_plan_prints_memory_and_bounds_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--context", "40960", "--num-gpu-blocks", "8", "--gpu-memory-gb", "24", "--link-gb-per-s", "50"]
    assert cli.main([*QWEN, *flags]) == 0
    out = capsys.readouterr().out
    for text in (
        "448.00 MiB each",
        "112.00 KiB a token",
        "2  of 40,960 tokens at once, limited by the CPU pool; 8 of up to 4,096, by the slots",
        "9  full",
        "2 missing",
        "50.0 GB/s  given",
        "4.30 TB/s  measured on an H200",
        "125.0 GB/s  measured on an H200",
        "<= 133.0  tok/s: 133.0 by the link and the CPU, 73",
        "53.2 by the link alone",
        "first token",
        "8.75 GiB",
    ):
        assert text in out


def test_plan_in_the_docs_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.main([*QWEN, "--context", "40960", "--num-gpu-blocks", "8"]) == 0
    assert capsys.readouterr().out.strip() in (DOCS / "planning.md").read_text()


def test_plan_parts_of_the_gpus_memory_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QWEN, "--num-gpu-blocks", "8"]) == 0
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    lines = re.findall(r"^  (\w[\w ]*?) +~?([\d.]+) (KiB|MiB|GiB)", capsys.readouterr().out, re.MULTILINE)
    parts = {name: float(number) * units[unit] for name, number, unit in lines}
    assert [*parts] == [
        *("weights", "slots", "shadow", "staging", "logits", "inputs", "activations", "graphs", "workspaces", "CUDA"),
        *("GPU memory", "CPU pool"),
    ]
    total = parts.pop("GPU memory")
    del parts["CPU pool"]
    assert sum(parts.values()) == pytest.approx(total, abs=0.01 * 2**30)


def test_plan_for_another_gpu_has_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """R1: a plan for a GPU of 24 GiB was "on an H200", with the H200's rates."""
    assert cli.main([*QWEN, "--gpu", "RTX 4090"]) == 0
    out = capsys.readouterr().out
    assert "of qwen3-0.6b on RTX 4090" in out and "H200" not in out
    assert "1.01 TB/s  data sheet" in out and "165 TFLOP/s  data sheet" in out
    assert "27.3 GB/s  PCIe 4 x16, projected" in out


def test_plan_that_cannot_work_says_why_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        ("--num-gpu-blocks 60 --gpu-memory-gb 24", "lower --num-gpu-blocks to 46"),
        ("--cpu-memory-gb 65", "lower --cpu-memory-gb to 44.79"),
        ("--context 40960 --sequences 11", "pool's 1638 blocks allow 9; set --num-cpu-blocks to 1814"),
        ("--context 41000", "exceeds --max-model-len=40960"),
        ("--max-model-len 41000", "more than the 40960 tokens"),
    ):
        assert cli.main([*QWEN, *flags.split()]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_plan_that_cannot_work_says_so_before_the_table() -> None:
    """B: the reason came after a table that looked as if all was well."""
    argv = [sys.executable, "-m", "nanovllm", *QWEN, "--context", "40960", "--num-gpu-blocks", "300", "--gpu", "L4"]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 1 and done.stdout.startswith("nanovllm: this cannot work: ")
    assert "\nplan for 1 x 40,960 tokens of qwen3-0.6b on L4" in done.stdout


def test_plan_takes_thousands_and_millions_and_shows_the_built_in_model_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B: `--context 131k` was not an integer, and the built-in model had the path of its cache."""
    for context, shown in (("131k", "131,000"), ("1M", "1,000,000"), ("4_096", "4,096")):
        assert cli.main(["plan", "--model", "demo", "--context", context, "--host-memory-gb", "64"]) == 0
        assert f"plan for 1 x {shown} tokens of demo on" in capsys.readouterr().out


def test_plan_of_a_quantized_model_has_packed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "qwen3-8b", "--gpu", "RTX 4090", "--context", "32768", "--quantization", "int4"]
    assert cli.main(argv) == 0
    assert "weights        6.09 GiB" in capsys.readouterr().out
    for format, remark in (
        ("fp8", "fp8_dynamic is for long prompts"),
        ("fp8_dynamic", "fp8 has smaller errors"),
    ):
        assert cli.main([*argv[:-1], format]) == 0
        assert remark in capsys.readouterr().out
    assert cli.main([*argv[:-1], "fp8", "--gpu", "RTX 3090"]) == 0
    assert "fp8_dynamic" not in capsys.readouterr().out  # it has no products in fp8
    assert cli.main([*argv[:-1], "int3"]) == 2
    assert (
        "--quantization='int3' is unknown; choose one of int8, int6, int5, int4, fp8, fp8_dynamic"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_plan_for_the_gpu_here_measures_cpu_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_memory=24 * 2**30, major=8, minor=9)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    argv = [*QWEN, "--num-gpu-blocks", "8"]
    for flags, source in (([], "measured"), (["--gpu", "RTX 4090"], "desktop"), (["--cpu-gb-per-s", "50"], "given")):
        assert cli.main([*argv, *flags]) == 0
        assert re.search(rf"CPU memory .* GB/s  .*{source}", capsys.readouterr().out)


@pytest.mark.slow
def test_plan_fit_lists_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--fit", "--gpu", "4090", "--host-memory-gb", "64", "--context", "32768"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert re.search(r"qwen3-8b +bfloat16 +as is +32,768 +4.50 GiB +GPU +<= 50.5/s +>= 4.5 s", out)
    assert cli.main([*argv, "--model", "qwen3-8b", "--quantization", "int4"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nrecommended: nanovllm chat Qwen/Qwen3-8B --quantization int4 --max-model-len 32768\n")
    assert len(out.splitlines()) == 5
    for flags, message in (
        (["--num-gpu-blocks", "8", "--enable-cpu-offload"], "leave out --enable-cpu-offload, --num-gpu-blocks"),
        (["--context", "0"], "--context=0 must be above 0"),
    ):
        assert cli.main([*argv, *flags]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["plan", "--fit", "--device", "cpu"]) == 2
    assert "lists what runs on a GPU; leave out --device='cpu'" in capsys.readouterr().err


def test_plan_too_large_by_the_estimates_alone_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    """B2: "~17.93 GiB of 16.00 GiB that may be used (!)" and exit status 0."""
    argv = ["plan", "--model", "llama-3.1-8b", "--context", "8192", "--max-model-len", "8192", "--gpu-memory-gb", "16"]
    argv += ["--host-memory-gb", "64", "--link-gb-per-s", "25", "--gpu-memory-utilization", "1"]
    assert cli.main([*argv, "--enable-cpu-offload", "--kvcache-block-size", "256", "--no-fit"]) == 1
    captured = capsys.readouterr()
    assert "of 16.00 GiB that may be used (!)" in captured.out and "estimated" in captured.err


def test_plan_context_beyond_the_rope_offers_what_then_works_and_is_in_the_docs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """M8: the message ended in "extend the rope"."""
    argv = ["plan", "--model", "qwen3-8b", "--context", "131072", "--enable-cpu-offload", "--host-memory-gb", "64"]
    assert cli.main(argv) == 1
    offered = re.search(r"--hf-overrides '(.*)'", capsys.readouterr().err)
    assert offered is not None and f"'{offered[1]}'" in (DOCS / "planning.md").read_text()
    assert cli.main([*argv, "--hf-overrides", offered[1]]) == 0
    assert "plan for 1 x 131,072 tokens" in capsys.readouterr().out


def test_plan_bad_options_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: OverflowError, and a context of 10^12 tokens was added up chunk by chunk, for hours."""
    for flag, value, message in (
        ("--sequences", "0", ""),
        ("--num-gpu-blocks", "1", ""),
        ("--gpu", "V100", ""),
        ("--hf-overrides", '{"rope": 1}', ""),
        ("--model", "./no/such/model", ""),
        ("--context", "1000000000001", f"above 0 and at most {10**9}"),
        ("--sequences", "-1", f"above 0 and at most {2**31 - 1}"),
        ("--gpu-memory-gb", "nan", f"above 0 and at most {10**9}"),
        ("--gpu-memory-gb", "1e305", f"above 0 and at most {10**9}"),
        ("--host-memory-gb", "inf", f"above 0 and at most {10**9}"),
        ("--link-gb-per-s", "1e300", f"above 0 and at most {10**9}"),
    ):
        assert cli.main([*QWEN, flag, value]) == 2
        err = capsys.readouterr().err
        assert "nanovllm: error: " in err and message in err


def test_plan_on_the_cpu_has_no_bounds(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", model, "--device", "cpu", "--max-model-len", "2048", *OFFLOAD_FLAGS]) == 0
    out = capsys.readouterr().out
    assert "tok/s" not in out and "7  full" in out and "6 missing" in out


@pytest.mark.slow
def test_generate_interrupted_exits_130_without_traceback(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(build_haystack(100_000, 0.3, PASSKEY))  # which would take minutes
    argv = ["generate", "--model", model, "--prompt-file", str(path), "--device", "cpu", "--max-model-len", "102400"]
    flags = ["--num-kvcache-blocks", "400", "--max-num-batched-tokens", "1024"]
    terminal, stderr = pty.openpty()  # nothing else is shown progress
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 25, 100, 0, 0))
    process = subprocess.Popen([sys.executable, "-m", "nanovllm", *argv, *flags], cwd=ROOT, stderr=stderr)
    os.close(stderr)
    seen = b""
    while not re.search(rb"[1-9]\d*/100000", seen):
        seen += os.read(terminal, 1000)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the end of a terminal
        while piece := os.read(terminal, 1000):
            seen += piece
    os.close(terminal)
    assert process.wait(timeout=LIMIT_S) == 130, seen.decode()
    assert b"interrupted" in seen and b"Traceback" not in seen


# -- serve and batch ---------------------------------------------------------------------------------------------

BATCH = ("batch", "--model", "demo", "--input", "x.jsonl", "--output", "out")


def test_serve_steps_are_bounded_unless_the_flags_say_otherwise() -> None:
    for flags, max_step_ms in (
        ([], cli.MAX_STEP_MS),
        (["--max-step-ms", "50"], 50.0),
        (["--no-chunked-prefill"], None),
    ):
        parser = argparse.ArgumentParser()
        add_model_flag(parser)
        add_engine_flags(parser)
        options = cli.serving_options(parser.parse_args(["--model", "demo", "--device", "cpu", *flags]))
        assert options.get("max_step_ms") == max_step_ms and options["device"] == "cpu"


def test_serve_chooses_options_unless_replicas_may_share_a_machine() -> None:
    for flags, fit in (([], None), (["--fit"], True), (["--no-fit"], False), (["--num-replicas", "2"], False)):
        args = cli._parser().parse_args(["serve", "demo", "--device", "cpu", *flags])
        assert cli.serving_options(args)["fit"] is fit


def test_experts_leave_the_gpu_by_themselves_unless_a_flag_decides() -> None:
    """For serve, chat and generate, which start their engines with these options."""
    for flags, choice in (
        ([], None),
        (["--enable-expert-offload"], True),
        (["--no-enable-expert-offload"], False),
        (["--enable-expert-offload", "--num-gpu-expert-layers", "4"], True),
    ):
        parser = argparse.ArgumentParser()
        add_model_flag(parser)
        add_engine_flags(parser)
        options = engine_options(parser.parse_args(["--model", "demo", "--device", "cpu", *flags]))
        assert options["enable_expert_offload"] is choice
        assert options.get("num_gpu_expert_layers") == (4 if len(flags) > 2 else None)
    message = "add enable_expert_offload=True, or use enable_expert_offload=False"
    assert name_flags(message, (Config,)) == "add --enable-expert-offload, or use --no-enable-expert-offload"


def test_serve_a_directory_is_known_by_its_last_part(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B: the id of the model was the whole path."""
    served: list[ServerOptions] = []

    def run_server(load: object, options: ServerOptions, bound: object) -> int:
        served.append(options)
        return 0

    monkeypatch.setattr("nanovllm.entrypoints.server.lifecycle.run_server", run_server)
    monkeypatch.chdir(Path(model).parent)
    for argv in (["--model", model], ["--model", f"{model}/"], ["--model", "./retrieval"], ["--model", "Qwen/Qwen3"]):
        assert cli.main(["serve", "--port", "0", *argv]) == 0
    assert cli.main(["serve", "--port", "0", "--model", model, "--served-model-name", "a", "b"]) == 0
    assert [tuple(options.served_model_name) for options in served] == [
        *[("retrieval",)] * 3,
        ("Qwen/Qwen3",),
        ("a", "b"),
    ]


def test_batch_bad_flag_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, message in (
        ("--num-engines", "0", "--num-engines=0 must be between"),
        ("--top-p", "9", "--top-p=9.0 must be"),
        ("--ray-address", "ray://head:10001", "--ray-address='ray://head:10001' must be host:port"),
        ("--num-gpu-blocks", "8", "--num-gpu-blocks applies only to CPU offload"),
    ):
        assert cli.main([*BATCH, flag, value]) == 2
        assert message in capsys.readouterr().err


def test_batch_without_ray_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for package, flags, message in (
        (
            "ray",
            ["--num-engines", "2"],
            "--num-engines=2 needs ray; run: pip install --constraint constraints.txt '.[ray]",
        ),
        ("ray", ["--ray-address", "auto"], "--ray-address='auto' needs ray; run: pip install"),
        ("pyarrow", ["--input", "a.parquet"], "input 'a.parquet' needs pyarrow; run: pip install --constraint "),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert cli.main([*BATCH, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_log_names_flags_instead_of_options(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The line about chosen options is to be copied into a command."""
    logger = logging.getLogger("nanovllm")

    def run(args: object) -> int:
        logger.info("chose %s", "enable_cpu_offload=True max_num_seqs=16")
        return 0

    monkeypatch.setattr(cli, "_generate", run)
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert cli.main(["generate", "--prompt", "x", "demo"]) == 0
        logger.info("max_num_seqs=16")
    assert [record.getMessage() for record in caplog.records] == [
        "chose --enable-cpu-offload --max-num-seqs=16",
        "max_num_seqs=16",
    ]


def test_short_help_has_the_most_used_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat", "serve", "plan", "launch", "batch"):
        sizes = []
        for flag in ("-h", "--help"):
            with pytest.raises(SystemExit) as ended:
                cli.main([command, flag])
            text = capsys.readouterr().out
            assert ended.value.code == 0 and text.startswith(f"usage: nanovllm {command}")
            sizes.append(len(text.splitlines()))
        assert sizes[0] <= 60 < sizes[1], (command, sizes)
    with pytest.raises(SystemExit):
        cli.main(["serve", "-h"])
    text = capsys.readouterr().out
    assert "--fit" in text and "--port" in text and "--kvcache-block-size" not in text
    assert re.search(r"nanovllm serve --help lists all \d+ flags\.", text)


def test_model_may_be_given_without_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--gpu", "H200", "--host-memory-gb", "64"]
    for argv in (["demo", *plan[1:]], [*plan[1:], "demo"], ["--gpu", "H200", "demo", "--host-memory-gb", "64"]):
        assert cli.main(["plan", *argv]) == 0 and "tokens of demo on H200" in capsys.readouterr().out
    for argv, message in (
        (["demo", "other"], "unexpected argument other: the model is given already"),
        (["demo", "--model", "other"], "unexpected argument demo: the model is given already"),
        ([], "the following arguments are required: --model"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["chat", *argv])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["generate", "demo", "--prompt", "x", "--prompt", "y"])
    assert "argument --prompt: given twice; generate answers one prompt" in capsys.readouterr().err
