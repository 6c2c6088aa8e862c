"""`nanovllm batch` with one engine, in a child process and without Ray."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import ROOT, DeadlyRows, NoStart, make_job, read_parts, sampled_rows, without_cache_hits, write_lines
from waiting import LIMIT_S, wait_until

from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cluster.batch_engine import BatchEngine
from nanovllm.entrypoints.cluster.batch_job import run_job
from nanovllm.entrypoints.cluster.batch_process import MAX_DEATHS
from nanovllm.errors import ConfigError, EngineError

COMMAND = ("batch", "--model", "demo", "--device", "cpu", "--num-kvcache-blocks", "64", "--max-model-len", "4096")


class NoBeginning(BatchEngine):
    """Its process dies before it counts a try."""

    def __init__(self, job: Any) -> None:
        os._exit(3)


class UnwillingEngine(BatchEngine):
    def _start_engine(self) -> Any:
        raise ConfigError("max_model_len=5 is too small")


@pytest.mark.slow
def test_command_with_one_engine_needs_no_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B: `nanovllm batch` needed Ray even for one engine on one GPU."""
    for package in ("ray", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    text = "The passkey is 4711.\nThe passkey is"
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"id": 7, "prompt": text}, {"prompt": text, "top_p": 9}])
    output = tmp_path / "out"
    assert cli.main([*COMMAND, "--input", str(prompts), "--output", str(output), "--max-tokens", "5"]) == 0
    assert "1 of them with an error; 5 new tokens" in capsys.readouterr().err
    good, bad = read_parts(output)
    assert (good["id"], good["text"], good["error"]) == (7, " 4711", None) and "top_p=9" in bad["error"]
    assert sorted(path.name for path in output.iterdir()) == ["_job.json", "part-00000.jsonl"]


@pytest.mark.slow
def test_job_rows_that_end_their_engine_get_an_error_and_the_others_an_answer(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sampled_rows(800))
    job = make_job([prompts], tmp_path / "out", None)
    assert run_job(replace(job, engine_class=DeadlyRows)).num_errors == 100
    disturbed = read_parts(job.output)
    assert all("3 engines have failed with the rows of this part" in row["error"] for row in disturbed[500:600])
    (job.output / "part-00005.jsonl").unlink()
    assert run_job(job)[:3] == (800, 700, 0)
    alone = make_job([prompts], tmp_path / "alone", None)
    run_job(alone)
    expected = without_cache_hits(read_parts(alone.output))
    assert without_cache_hits(read_parts(job.output)) == expected
    assert without_cache_hits(disturbed[:500] + disturbed[600:]) == expected[:500] + expected[600:]
    assert run_job(job) == (800, 800, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine_class", "error", "message"),
    [
        (NoStart, EngineError, r"3 engines have not started; .*RuntimeError: no engine today"),
        (NoBeginning, EngineError, rf"has ended {MAX_DEATHS} times before it ran a unit, last with status 3"),
        (UnwillingEngine, ConfigError, "max_model_len=5 is too small"),
    ],
)
def test_job_without_an_engine_that_starts_ends(
    tmp_path: Path, engine_class: type[BatchEngine], error: type[Exception], message: str
) -> None:
    job = make_job([write_lines(tmp_path / "prompts.jsonl", sampled_rows(3))], tmp_path / "out", None)
    with pytest.raises(error, match=message):
        run_job(replace(job, engine_class=engine_class))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_command_interrupted_ends_its_engine_and_goes_on_where_it_stopped(tmp_path: Path, signum: int) -> None:
    """Ctrl-C reaches both processes."""
    prompts, output = write_lines(tmp_path / "prompts.jsonl", sampled_rows(1500)), tmp_path / "out"
    flags = [*COMMAND, "--input", str(prompts), "--output", str(output), "--max-tokens", "2"]
    slowly = [sys.executable, str(ROOT / "tests/support/slow_batch.py"), *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    process = subprocess.Popen(slowly, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or list(output.glob("part-*")))
        os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
        _, stderr = process.communicate(timeout=LIMIT_S)  # the engine has the other end of stderr, until it has ended
    finally:
        process.kill()
    assert process.returncode == 128 + signum, stderr
    assert "repeat the command to compute the other parts" in stderr and "Traceback" not in stderr
    num_before = len(read_parts(output))
    assert 0 < num_before < 1500
    done = subprocess.run([sys.executable, "-m", "nanovllm", *flags], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and f"{num_before:,} had been answered before" in done.stderr, done.stderr
    assert [row["id"] for row in read_parts(output)] == list(range(1500))
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
