import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from cpu_attention_cases import Case, mixed_rows, row_spans
from emulated_amx import open_kernel_named
from tiers import RUNS_ALL
from waiting import LIMIT_S, wait_until

from nanovllm.capabilities.cpu_attention.job import FAR_AHEAD, MAX_QUEUED_JOBS, RowSpans
from nanovllm.capabilities.cpu_attention.torch_kernel import TorchKernel
from nanovllm.offload.streams import CpuServer

LARGEST = 2**31 - 1


def new_flags() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32)


def difference(flag: torch.Tensor, number: int) -> int:
    """Compare as the GPU does, signed and in 32 bits. The number is reached if the difference is not negative."""
    return (int(flag) - number + 2**31) % 2**32 - 2**31


def wait_for(flags: torch.Tensor, number: int) -> None:
    wait_until(lambda: difference(flags[1], number) >= 0)


@pytest.fixture
def case() -> Case:
    return Case(mixed_rows(2), torch.bfloat16, num_kv_heads=2, group=4)


def test_server_starts_each_job_when_its_queries_have_arrived(open_kernel, case: Case) -> None:
    flags, other = new_flags(), Case(mixed_rows(1), seed=1)
    server = open_kernel().serve(flags)
    server.submit(case.job, 0, 1)
    server.submit(other.job, 1, 2)
    time.sleep(0.01)
    assert flags.tolist() == [0, 0] and case.job.out_THD.isnan().all()
    flags[0] = 1
    wait_for(flags, 1)
    case.check(0)
    time.sleep(0.01)
    assert flags.tolist() == [1, 1] and other.job.out_THD.isnan().all()
    flags[0] = 2
    wait_for(flags, 2)
    other.check(1)
    server.close()


def test_server_queries_that_came_before_the_job_do_not_wait(open_kernel, case: Case) -> None:
    flags = new_flags()
    server = open_kernel(3).serve(flags)
    flags[0] = 3
    for number in (1, 2, 3):
        server.submit(case.job, number % 2, number)
    wait_for(flags, 3)
    assert flags[1] == 3
    case.check(1)  # the layer of the last job
    server.close()


def test_server_numbers_wrap_around(open_kernel, case: Case) -> None:
    flags = new_flags()
    server = open_kernel().serve(flags)
    flags[0] = LARGEST - 2
    numbers = [LARGEST - 1, LARGEST, -LARGEST - 1, -LARGEST]
    for number in numbers:
        server.submit(case.job, 0, number)
    for number in numbers:
        time.sleep(0.002)
        assert difference(flags[1], number) < 0 or flags[1] == 0
        flags[0] = number
        wait_until(lambda number=number: int(flags[1]) == number)
    case.check()
    server.close()


def test_server_closed_releases_waiters(open_kernel, case: Case) -> None:
    kernel = open_kernel()
    for newest in (5, LARGEST - 1):
        flags = new_flags()
        server = kernel.serve(flags)
        flags[0] = newest - 2
        for number in (newest - 1, newest):
            server.submit(case.job, 0, number)
        time.sleep(0.002)
        server.close()
        assert case.job.out_THD.isnan().all()
        assert difference(flags[1], newest) > 0 and difference(flags[1], newest + 1000) > 0
        server.close()
    kernel.attend(case.job, 0)
    case.check()


def test_kernel_closed_closes_its_servers(open_kernel, case: Case) -> None:
    flags = [new_flags(), new_flags()]
    kernel = open_kernel()
    servers = [kernel.serve(pair) for pair in flags]
    servers[0].submit(case.job, 0, 1)
    kernel.close()
    assert difference(flags[0][1], 1) > 0 and difference(flags[1][1], 1) > 0
    for server in servers:
        server.close()


def test_server_dropped_ends_its_thread(open_kernel, case: Case) -> None:
    flags = new_flags()
    server = open_kernel().serve(flags)
    server.submit(case.job, 0, 1)
    del server
    gc.collect()
    assert difference(flags[1], 1) > 0


def test_server_new_one_starts_from_zero(open_kernel, case: Case) -> None:
    kernel, flags = open_kernel(), new_flags()
    kernel.serve(flags).close()
    server = kernel.serve(flags)
    assert flags.tolist() == [0, 0]
    server.submit(case.job, 0, 1)
    flags[0] = 1
    wait_for(flags, 1)
    assert flags[1] == 1
    case.check()
    server.close()


def test_two_servers_work_concurrently(open_kernel) -> None:
    """On one kernel, and on one kernel each, as the ranks of one process have."""
    kernels = [open_kernel(), open_kernel()]
    for of_servers in ((kernels[0], kernels[0]), kernels):
        pairs = [new_flags(), new_flags()]
        servers = [kernel.serve(flags) for kernel, flags in zip(of_servers, pairs, strict=True)]
        cases = [Case(mixed_rows(1), torch.float32, seed=i) for i in range(2)]
        for number in range(1, 31):
            for case, server, flags in zip(cases, servers, pairs, strict=True):
                case.forget()
                server.submit(case.job, number % 2, number)
                flags[0] = number
            for case, flags in zip(cases, pairs, strict=True):
                wait_for(flags, number)
                if number % 10 < 2:
                    case.check(number % 2)
        for server in servers:
            server.close()


def submit_all(server: CpuServer, case: Case, flags: torch.Tensor, num_jobs: int) -> None:
    """Submit jobs as fast as the queue takes them, with the queries arriving in steps of 7."""
    for number in range(1, num_jobs + 1):
        server.submit(case.job, number % 2, number)
        if number % 7 == 0:
            flags[0] = number
        if number % 1000 == 0:
            flags[0] = number
            wait_for(flags, number)
            time.sleep(0.003)  # long enough for the helpers to fall asleep
    flags[0] = num_jobs
    wait_for(flags, num_jobs)


def test_server_many_tiny_jobs(open_kernel) -> None:
    for num_threads in (1, 2, 3) if RUNS_ALL else (2,):
        kernel, flags = open_kernel(num_threads), new_flags()
        case = Case([row_spans(1, (0, 100), (200, 30))], num_kv_heads=1, group=2, head_dim=16, num_threads=num_threads)
        server = kernel.serve(flags)
        num_jobs = 500 if kernel.name == "torch" else 10_000
        submit_all(server, case, flags, num_jobs)
        assert flags.tolist() == [num_jobs, num_jobs]
        case.check(num_jobs % 2)
        server.close()


def thread_ids() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def test_threads_stay_on_their_cpu_only_if_they_are_pinned(kernel_name: str, case: Case) -> None:
    cpu, everywhere = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    for is_pinned, expected in ((True, {cpu}), (False, everywhere)):
        before, flags = thread_ids(), new_flags()
        kernel = open_kernel_named(kernel_name, [cpu, cpu], is_pinned=is_pinned)
        server = kernel.serve(flags)
        server.submit(case.job, 0, 1)
        flags[0] = 1
        wait_for(flags, 1)
        started = thread_ids() - before
        assert started
        for thread in started:  # each thread sets its place when it first runs
            wait_until(lambda thread=thread, expected=expected: os.sched_getaffinity(thread) == expected)
        case.check()
        server.close()
        kernel.close()


def test_server_with_a_full_queue_refuses(open_kernel) -> None:
    case, flags = Case([row_spans(1, (0, 1))], num_kv_heads=1, group=1, head_dim=16), new_flags()
    server = open_kernel().serve(flags)
    for number in range(1, MAX_QUEUED_JOBS + 1):
        server.submit(case.job, 0, number)
    with pytest.raises(RuntimeError, match="2048 jobs are waiting"):
        server.submit(case.job, 0, MAX_QUEUED_JOBS + 1)
    flags[0] = MAX_QUEUED_JOBS
    wait_for(flags, MAX_QUEUED_JOBS)

    def has_room() -> bool:
        """The last job leaves the queue a moment after its results are there."""
        try:
            server.submit(case.job, 0, MAX_QUEUED_JOBS + 1)
        except RuntimeError:
            return False
        return True

    wait_until(has_room)
    flags[0] = MAX_QUEUED_JOBS + 1
    wait_for(flags, MAX_QUEUED_JOBS + 1)
    case.check()
    server.close()


def test_torch_server_error_is_raised_by_the_next_call(case: Case) -> None:
    kernel, flags = TorchKernel([0]), new_flags()
    server = kernel.serve(flags)
    flags[0] = 2
    server.submit(case.job, 99, 1)
    wait_for(flags, 1)
    with pytest.raises(AssertionError, match="layer 99"):
        server.submit(case.job, 0, 2)
    server.submit(case.job, 0, 2)
    wait_for(flags, 2)
    case.check()
    server.submit(case.job, 98, 3)
    flags[0] = 3
    wait_for(flags, 3)
    with pytest.raises(AssertionError, match="layer 98"):
        server.close()
    server.close()


@pytest.fixture
def failing(case: Case) -> Case:
    """Its results are those of an earlier layer. From now on it raises after some of its rows are written."""
    kernel = TorchKernel([0])
    kernel.attend(case.job, 1)
    case.check(1)
    case.job.rows[2] = RowSpans(2, (None,))  # type: ignore[arg-type]
    return case


def test_torch_server_job_that_fails_leaves_no_older_results(failing: Case) -> None:
    """The GPU merged the results of the previous layer as if they were right."""
    kernel, flags = TorchKernel([0]), new_flags()
    server = kernel.serve(flags)
    server.submit(failing.job, 0, 1)
    flags[0] = 1
    wait_for(flags, 1)
    assert failing.job.out_THD.isnan().all() and (failing.job.lse_HT == 0).all()
    with pytest.raises(TypeError, match="NoneType"):
        server.close()
    assert difference(flags[1], 1) == FAR_AHEAD


def test_torch_attend_that_fails_raises(failing: Case) -> None:
    kernel, num_threads = TorchKernel([0]), torch.get_num_threads()
    with pytest.raises(TypeError, match="NoneType"):
        kernel.attend(failing.job, 0)
    assert torch.get_num_threads() == num_threads
    kernel.close()


def test_torch_kernel_close_that_raises_has_closed_every_server(failing: Case) -> None:
    """An exception from the first server left the others running."""
    kernel, all_flags = TorchKernel([0]), [new_flags() for _ in range(3)]
    servers = [kernel.serve(flags) for flags in all_flags]
    for server, flags in zip(servers, all_flags, strict=True):
        server.submit(failing.job, 0, 1)
        flags[0] = 1
        wait_for(flags, 1)
    with pytest.raises(TypeError, match="NoneType"):
        kernel.close()
    assert all(difference(flags[1], 1) == FAR_AHEAD for flags in all_flags)
    assert "cpu-attention" not in {thread.name for thread in threading.enumerate()}
    kernel.close()


@pytest.mark.slow
def test_forked_process_ends_although_it_has_no_threads() -> None:
    """A forked process closes its copies of the kernel and of the server at exit, without waiting for threads."""
    code = """
import os, sys, torch
from nanovllm.capabilities.cpu_attention.kernels import choose_kernel
kernel = choose_kernel([0, 0])
server = kernel.serve(torch.zeros(2, dtype=torch.int32))
if os.fork() == 0:
    sys.exit(3)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) - 3)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0
