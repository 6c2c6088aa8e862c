"""`nanovllm batch` as a command, with a Ray of its own: Ctrl-C, the same command again, bad input."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_jobs import ROOT, read_parts, sampled_rows, write_lines
from waiting import LIMIT_S, wait_until

SLOWLY = (str(ROOT / "tests/support/slow_batch.py"),)
ENGINE = "--device cpu --num-engines 2 --num-kvcache-blocks 64 --max-model-len 4096".split()


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    folder = Path(f"/tmp/nvc{os.getpid()}")
    folder.mkdir()
    paths = f"{ROOT}:{ROOT / 'tests/support'}"  # the second one for the actors of slow_batch.py
    yield os.environ | {"RAY_TMPDIR": str(folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    shutil.rmtree(folder, ignore_errors=True)


def command(*args: object, program: tuple[str, ...] = ("-m", "nanovllm")) -> list[str]:
    return [sys.executable, *program, "batch", "--model", "demo", *ENGINE, *map(str, args)]


def test_command_interrupted_goes_on_where_it_stopped(environment: dict[str, str], tmp_path: Path) -> None:
    """Some rows are bad, and the last ones ask about documents of about 1,000 tokens."""
    rows = sampled_rows(3000)
    for row in rows[::300]:
        row["top_p"] = 9
    books = [f"Book {i}. " + f"Sentence {i} of many. " * 50 for i in range(4)]
    rows += [{"book": i, "prompt": f"{book}Question {j}:"} for i, book in enumerate(books) for j in range(5)]
    prompts, output = write_lines(tmp_path / "prompts.jsonl", rows), tmp_path / "out"
    flags = ("--input", prompts, "--output", output, "--document-column", "book", "--max-tokens", 2)
    args = command(*flags)
    process = subprocess.Popen(command(*flags, program=SLOWLY), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or list(output.glob("part-*")))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "repeat the command to compute the other parts" in stderr and "Traceback" not in stderr
    num_before = len(read_parts(output))
    assert 0 < num_before < len(rows)

    done = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert f"{num_before:,} had been answered before" in done.stderr
    written = read_parts(output)
    assert [row["prompt"] for row in written] == [row["prompt"] for row in rows]
    assert [i for i, row in enumerate(written) if row["error"]] == list(range(0, 3000, 300))
    hits = [row["num_cached_tokens"] for row in written[3000:]]
    assert hits[::5] == [0] * 4 and min(hits[i] for i in range(20) if i % 5) >= 768
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
    again = subprocess.run([*args, "--seed", "1"], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 2 and "engine_options was" in again.stderr


def test_command_ended_by_sigterm_says_how_to_go_on_and_shows_no_stack(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """B: Ray's handler printed its own stack, and its warnings and all bars were in the log."""
    prompts = write_lines(tmp_path / "prompts.jsonl", sampled_rows(3000))
    output = tmp_path / "out"
    args = command("--input", prompts, "--output", output, "--max-tokens", 2, program=SLOWLY)
    process = subprocess.Popen(args, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or list(output.glob("part-*")))
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    assert "repeat the command to compute the other parts" in stderr
    for clutter in ("SIGTERM", "Traceback", "Rows:", "Loading weights", "Token authentication"):
        assert clutter not in stderr


def test_command_bad_input_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x", "text": "y"}])
    args = command("--input", prompts, "--output", tmp_path / "out")
    done = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "line 1" in done.stderr and "rename it in the input" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
