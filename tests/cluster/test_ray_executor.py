"""The tests of tests/executor with ranks that Ray has placed, on a small cluster of this machine."""

from collections.abc import Iterator

import pytest
import torch
from rank_backends import RankBackend
from ray_cluster import ray_backend, small_cluster
from test_executor import (  # noqa: F401
    executor,
    num_ranks,
    test_calls_run_on_every_rank_in_order_and_return_the_result_of_rank_0,
    test_close_twice_closes_the_runner_once_and_then_calls_are_refused,
    test_launch_rank_dies_raises_and_so_does_every_later_call,
    test_report_and_stats_are_those_of_rank_0_and_call_no_other,
)
from test_tensor_parallel import (  # noqa: F401
    reference,
    test_interrupted_generate_leaves_two_ranks_usable,
    test_killed_worker_is_an_error_within_seconds_and_leaves_nothing,
    test_two_ranks_edit_and_score_as_one_does,
    test_two_ranks_give_the_logits_of_transformers,
)
from test_worker_group import (  # noqa: F401
    group,
    seven_threads,
    test_all_reduce_two_gpus_inside_a_graph,
    test_call_every_rank_has_its_share_of_the_threads_and_the_process_has_all_between,
    test_call_many_calls_reach_every_rank_in_order,
    test_call_message_larger_than_the_segment_arrives_whole,
    test_call_rank_0_raises_ends_the_group,
    test_call_worker_killed_inside_a_collective_raises,
    test_call_worker_raises_is_reported_with_its_traceback,
    test_close_beside_another_group_leaves_nothing_of_its_own,
    test_close_forgotten_exits_silently_and_leaves_no_worker,
    test_collectives_two_gpus,
    test_collectives_two_ranks,
    test_parent_killed_leaves_no_worker,
    test_wait_for_polls_until_done,
    test_wait_for_two_gpus_worker_killed_raises_and_frees_the_gpu,
    test_wait_for_worker_killed_raises,
    test_worker_group_factory_fails_on_a_worker_raises_and_leaves_nothing,
)


@pytest.fixture(scope="module")
def backend() -> Iterator[RankBackend]:
    with small_cluster(num_gpus=torch.cuda.device_count()) as cluster:
        yield ray_backend(cluster)
