"""The short form of benchmarks/soak.py: all kinds of clients at once against a server with a tiny pool."""

import json

import pytest

from benchmarks import soak
from benchmarks.soak import CHAT, COMPLETIONS, texts_of

OFFLOAD = ["--enable-cpu-offload", "--num-gpu-blocks", "3", "--num-cpu-blocks", "30", "--kvcache-block-size", "256"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], [*OFFLOAD, "--speculation", "prompt_lookup"]], ids=["all-GPU", "offload"])
def test_every_request_ends_as_its_client_expects(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "160", "--clients", "12", "--cases", "36", "--seed", str(len(flags))]
    status = soak.main([*options, *(["--", *flags] if flags else [])])
    out = capfd.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and result["num_faults"] == 0, out
    assert result["num_requests"] >= 160 and sum(result["ends"].values()) == result["num_requests"]
    assert result["ends"]["stream: right"] > 10 and result["ends"]["whole: right"] > 10


def test_faults_are_noticed() -> None:
    """All checks of the soak can fail: memory, files, threads, and the server's own end."""
    early, late = soak.Usage(10**8, 20, 9), soak.Usage(2 * 10**8, 30, 15)
    report = soak.Report(usage=[early] * 50 + [late] * 50, num_requests=100_000)
    found = soak.faults_of(report, status=1)
    assert [fault.split(" ")[0] for fault in found] == ["memory", "num_files", "num_threads", "the"]
    assert soak.faults_of(soak.Report(usage=[early] * 100, num_requests=100_000), status=0) == []


@pytest.mark.parametrize(
    ("path", "payload", "is_stream"),
    [
        (COMPLETIONS, b'{"choices": [{"index": 0, "text": "x", "finish_reason": "abort"}]}', False),
        (CHAT, b'data: {"error": {"message": "failed"}}\n\ndata: [DONE]\n\n', True),
        (CHAT, b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n', True),
    ],
)
def test_answer_without_a_good_end_is_a_fault(path: str, payload: bytes, is_stream: bool) -> None:
    with pytest.raises(ValueError):
        texts_of(path, payload, is_stream, 1)


def test_comments_in_a_stream_are_no_part_of_the_answer() -> None:
    """Regression: the soak found faults beside other load, because a slow server keeps its streams alive."""
    event = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\n'
    payload = b": no new text yet\n\n" + event + b": no new text yet\n\ndata: [DONE]\n\n"
    assert texts_of(COMPLETIONS, payload, True, 1) == ["x"]
