"""A script that has no Ray: its engines start one and end it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_backends import is_gone
from ray_cluster import temporary_ray
from test_worker_group import wait_until

SCRIPT = """
import os, signal, threading, time
from nanovllm.engine.startup import make_workers
from nanovllm.errors import ConfigError
from nanovllm.executor.worker_group import WorkerGroup
from test_worker_group import EchoRunner
import ray

def make_group(size=2):
    return WorkerGroup(EchoRunner, size, "cpu", make_workers("ray"))

def stop(signum, frame):
    pass

groups = []
thread = threading.Thread(target=lambda: groups.append(make_group()))
thread.start()
thread.join()  # Linux would end a Ray that this thread has started
groups.append(make_group())
groups[0].close()
assert ray.is_initialized() and groups[1].call(EchoRunner.collectives)[0] == [3.0]
groups[1].close()
assert not ray.is_initialized()

signal.signal(signal.SIGTERM, stop)
try:
    make_group(size=8)
except ConfigError as error:
    print(error, flush=True)
assert not ray.is_initialized()
assert signal.getsignal(signal.SIGTERM) is stop

ray.init(include_dashboard=False)
group = make_group()
group.close()
assert ray.is_initialized()  # the script's own
group = make_group()
print(group.call(EchoRunner.pids)[1], flush=True)
group.call(EchoRunner.nap_on_worker, 60)
time.sleep(60)
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
