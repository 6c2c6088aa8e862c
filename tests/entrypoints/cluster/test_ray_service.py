"""`nanovllm serve --num-replicas 2` with the built-in model, on a Ray cluster of two nodes."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import faulty_service
import httpx
import pytest
import ray
from service_process import LIMIT_S, Service, service_process, two_nodes

KEYS = ("first-key", "second-key")
NUM_DOCUMENTS, NUM_QUESTIONS, DOCUMENT_CHARS = 8, 4, 1500
LONG_ANSWER = 400


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes() as address:
        yield address


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the faults of `service`."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def service(address: str, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log, drain = tmp_path_factory.mktemp("service") / "log", ("--drain-s", str(LIMIT_S))
    with two_replicas(address, log, faults, *drain) as service:
        yield service


def two_replicas(address: str, log: Path, faults: Path, *flags: str) -> AbstractContextManager[Service]:
    flags = ("--num-replicas", "2", "--ray-address", address, *flags)
    return service_process(log, *flags, program=(faulty_service.__file__,), environment={"FAULTS": str(faults)})


def document(number: int) -> str:
    return "".join(f"{number}:{i} is line {i} of document {number * 7919}. " for i in range(200))[:DOCUMENT_CHARS]


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_replicas_are_on_different_nodes_and_answer_as_one_server(service: Service) -> None:
    assert service.get("/health").json() == {"status": "ready"}
    assert service.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert service.complete("The passkey is 4711.\nThe passkey is", max_tokens=5)["choices"][0]["text"] == " 4711"
    assert service.post("", max_tokens=-1).status_code == 400
    assert "<html" in service.get("/").text
    assert len(service.replicas()) == 2


def test_each_request_has_a_line_with_its_id_in_the_logs_of_server_and_replica(service: Service) -> None:
    """Ray copies the log of a replica, which knows the tokens, to the server's. Lines that look alike are all there."""
    prompts = [f"{number} is the prompt's own number, which may lead to either replica." for number in range(16)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(partial(service.post, max_tokens=5, ignore_eos=True), prompts))
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.json()["id"] for answer in answers] == [f"cmpl-{request_id}" for request_id in ids]

    def lines(request_id: str) -> list[str]:
        return [line for line in service.log.read_text().splitlines() if request_id in line]

    service.wait_for(lambda: all(len(lines(request_id)) == 2 for request_id in ids), "both lines of all requests")
    for request_id in ids:
        assert all(" 200 in " in line for line in lines(request_id))
        assert len([line for line in lines(request_id) if "answer 5 tokens" in line]) == 1


def test_questions_reach_the_replica_that_holds_their_document(service: Service) -> None:
    """Each question finds its document in the cache, whichever replica has read it.

    The names of replicas are random, and they decide which one reads a document. So documents are read until both
    replicas hold some.
    """
    before, hits_before = service.samples("prompt_tokens_total"), service.samples("prefix_cache_hits_total")
    num_documents, read = 0, before
    while num_documents < NUM_DOCUMENTS or not all(read[replica] > before[replica] for replica in before):
        assert cached_tokens(service.complete(document(num_documents))) == 0
        num_documents, read = num_documents + 1, service.samples("prompt_tokens_total")

    def ask(number: int) -> int:
        text = document(number % num_documents) + f"\nQuestion {number}: what is in line {number}?"
        return cached_tokens(service.complete(text))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(num_documents * NUM_QUESTIONS)))
    assert sum(tokens > DOCUMENT_CHARS / 2 for tokens in found) >= 0.9 * len(found), found
    hits = service.samples("prefix_cache_hits_total")
    assert all(hits[replica] > hits_before[replica] for replica in hits), (hits_before, hits)
    assert sum(hits.values()) - sum(hits_before.values()) == sum(found)


def test_client_that_leaves_ends_its_request(service: Service, faults: Path) -> None:
    stream = service.stream("A long answer, please. " * 4, max_tokens=5000)
    with slow_steps(faults):  # so that the answer has not ended when the client leaves
        next(stream)
        assert sum(service.samples("num_requests_running").values()) == 1
        stream.close()
        service.wait_for(lambda: not sum(service.samples("num_requests_running").values()), "the request still runs")
    assert sum(service.samples("generation_tokens_total").values()) < 5000


def test_replica_killed_under_load_is_replaced(service: Service, address: str, faults: Path) -> None:
    """Streams that it had begun end with an error event; what had not begun is answered by the other replica."""
    replicas = service.replicas()
    with replica_actors(address) as actors, ThreadPoolExecutor(16) as pool:
        with slow_steps(faults):  # so that no answer has ended when the replica is killed
            streams = [
                service.stream(f"{i} is the number of this stream. " * 10, max_tokens=LONG_ANSWER) for i in range(8)
            ]
            begun = list(pool.map(next, streams))  # each has sent a token
            assert not any("error" in event for event in begun)
            whole = [
                pool.submit(
                    service.post, f"{i} is an answer without a stream. " * 10, max_tokens=LONG_ANSWER, ignore_eos=True
                )
                for i in range(8)
            ]
            service.wait_for(lambda: sum(service.samples("num_requests_running").values()) == 16, "16 do not run")
            running = service.samples("num_requests_running")
            victim = max(running, key=lambda replica: running[replica])
            ray.kill(actors[victim])
        lasts = list(pool.map(lambda stream: list(stream)[-1], streams))
        statuses = [each.result().status_code for each in whole]
    failed = [event["error"]["code"] for event in lasts if "error" in event]
    assert 0 < len(failed) < len(streams) and set(failed) == {"engine_unavailable"}
    assert statuses == [200] * len(whole)
    assert service.samples("answers_cut_total") == {"": len(failed)}
    assert service.samples("requests_resent_total")[""] == running[victim] - len(failed)
    assert service.get("/health").status_code == 200
    service.wait_for(lambda: len(service.replicas()) == 2, "the replica has not been replaced")
    assert len(service.replicas() & replicas) == 1


@contextmanager
def slow_steps(faults: Path) -> Iterator[None]:
    (faults / "slow").touch()
    try:
        yield
    finally:
        (faults / "slow").unlink()


@contextmanager
def replica_actors(address: str) -> Iterator[dict[str, Any]]:
    """Ray's handles of the replicas' processes, by the names that metrics have."""
    ray.init(address, namespace="serve", logging_level="error", log_to_driver=False)
    try:
        names = [name for name in ray.util.list_named_actors() if "EngineReplica" in name]
        yield {name.rpartition("#")[2]: ray.get_actor(name) for name in names}
    finally:
        ray.shutdown()


def test_rolling_update_answers_everything(service: Service) -> None:
    service.wait_for(lambda: len(service.replicas()) == 2, "two replicas are needed")
    replicas, statuses, is_over = service.replicas(), [], threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            statuses.append(service.post("How are you? " * 10).status_code)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            service.process.send_signal(signal.SIGUSR1)
            service.wait_for(
                lambda: len(now := service.replicas()) == 2 and not now & replicas, "the replicas are the same"
            )
        finally:
            is_over.set()
        for each in asking:
            each.result()
    assert set(statuses) == {200}


def test_sigterm_lets_open_streams_finish_and_leaves_no_replica(service: Service, address: str) -> None:
    """The last test: it ends the service."""
    stream = service.stream("How are you? " * 10, max_tokens=LONG_ANSWER)
    next(stream)
    service.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
    assert service.process.wait(LIMIT_S) == 0
    with pytest.raises(httpx.ConnectError):
        service.get("/health")
    with replica_actors(address) as actors:
        assert not actors


def test_replica_whose_engine_fails_is_replaced(address: str, tmp_path: Path) -> None:
    """Its process lives on, and would answer at once, with an error. The front asks the other replica, also for the
    request in whose step the engine has failed.
    """
    with two_replicas(address, tmp_path / "log", faults=tmp_path) as service:
        replicas = service.replicas()
        (tmp_path / "fail").touch()
        statuses = [service.post(f"{i} times: how are you? " * 10).status_code for i in range(20)]
        assert statuses == [200] * 20
        assert service.samples("requests_resent_total")[""] > 0
        service.wait_for(lambda: len(service.replicas() - replicas) == 1, "the replica has not been replaced")


def test_keys_and_salts_hold_in_a_service_of_one_replica(address: str, tmp_path: Path) -> None:
    """Keys are checked once, in front. KV is shared only between requests with the same key."""
    keys = tmp_path / "keys"
    keys.write_text("\n".join(KEYS))
    flags = ("--api-key-file", str(keys), "--max-body-mb", "0.1")
    with service_process(tmp_path / "log", "--num-replicas", "1", "--ray-address", address, *flags) as service:
        headers = [{"Authorization": f"Bearer {key}"} for key in KEYS]
        assert service.post("x").status_code == 401
        assert service.post("x" * 200_000, headers=headers[0]).status_code == 413
        answers = [service.post(document(1), headers=headers[i]).json() for i in (0, 0, 1)]
        assert [cached_tokens(answer) > 0 for answer in answers] == [False, True, False]
        refused = httpx.get(f"{service.url}/metrics", headers=headers[0]).text
        assert 'nanovllm:front_requests_refused_total{model_name="demo",reason="api_key"} 1.0' in refused
