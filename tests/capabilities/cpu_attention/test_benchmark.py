import json
import sys

import pytest
import torch

from benchmarks import bench_cpu_attention


def test_bench_cpu_attention_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = "--kernel torch --mib 4 --heads 8x2,4x7 --rows 1,2 --head-dim 64 --threads 1 --runs 2"
    monkeypatch.setattr(sys, "argv", ["bench", *options.split()])
    bench_cpu_attention.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["results"]) == 4
    assert all(0 < row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"] for row in result["results"])
