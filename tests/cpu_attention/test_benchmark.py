import json
import sys

import pytest
import torch

from benchmarks import bench_cpu_attention


@pytest.mark.parametrize("kernel", ["portable", "torch"])
def test_bench_cpu_attention_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kernel: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = [
        "--kernel",
        kernel,
        "--mib",
        "4",
        "--heads",
        "8x2,4x7",
        "--rows",
        "1,2",
        "--head-dim",
        "64",
        "--threads",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--runs", "2"])
    try:
        bench_cpu_attention.main()
    except SystemExit:
        assert "has not been built" in capsys.readouterr().out
        pytest.skip("nothing was built")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["results"]) == 4 + (kernel == "portable")
    for row in result["results"]:
        assert 0 < row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
        assert not any(key.endswith("_text") for key in row)


def test_link_rate_counts_the_copies_since_the_clock_started(monkeypatch: pytest.MonkeyPatch) -> None:
    link = bench_cpu_attention.Link.__new__(bench_cpu_attention.Link)
    link._target = torch.empty(1000, dtype=torch.uint8)
    link._num_copies = 5
    link.restart_clock()
    link._num_copies = 8
    monkeypatch.setattr(bench_cpu_attention.time, "perf_counter", lambda: link._start[0] + 2.0)
    assert link.byte_per_s() == 1500
