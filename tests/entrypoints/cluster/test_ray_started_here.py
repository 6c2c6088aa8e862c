"""A script that has no Ray: its engines start one and end it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import is_gone, wait_until
from ray_cluster import temporary_ray

SCRIPT = """
import os, signal, threading, time
from nanovllm.engine.startup import rank_devices
from nanovllm.errors import ConfigError
from nanovllm.executor.processes import ProcessExecutor
from test_executor import EchoRunner
import ray

def make_executor(size=2):
    return ProcessExecutor(EchoRunner, rank_devices("ray", "cpu", size))

def stop(signum, frame):
    pass

def main():
    executors = []
    thread = threading.Thread(target=lambda: executors.append(make_executor()))
    thread.start()
    thread.join()  # Linux would end a Ray that this thread has started
    executors.append(make_executor())
    executors[0].close()
    assert ray.is_initialized() and executors[1].call(EchoRunner.collectives)[0] == [3.0]
    executors[1].close()
    assert not ray.is_initialized()

    signal.signal(signal.SIGTERM, stop)
    try:
        make_executor(size=8)
    except ConfigError as error:
        print(error, flush=True)
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is stop

    ray.init(include_dashboard=False)
    executor = make_executor()
    executor.close()
    assert ray.is_initialized()  # the script's own
    executor = make_executor()
    print(executor.call(EchoRunner.pids)[1], flush=True)
    executor.call(EchoRunner.nap_on_worker, 60)
    time.sleep(60)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with temporary_ray() as directory:
        yield directory


def processes_of(directory: Path) -> set[str]:
    """The processes of the Ray whose files are there."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if str(directory) in Path(f"/proc/{name}/cmdline").read_text():
                found.add(name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_last_engine_ends_the_ray_that_it_started_and_a_kill_ends_all(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 6}',
    }
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            assert "needs 8 CPUs for 8 ranks, and Ray has 6 CPUs" in process.stdout.readline()
            worker = int(process.stdout.readline())
            assert processes_of(directory)
        finally:
            process.kill()
    assert wait_until(lambda: is_gone(worker), timeout_s=30)  # half as long as it naps
    assert wait_until(lambda: not processes_of(directory), timeout_s=20)
