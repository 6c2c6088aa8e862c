"""The benchmark of KV on disk runs, and its last line has the figures that targets read."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_disk


@pytest.mark.slow
def test_bench_disk_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv"
    options = ["--gib", "0.03", "--runs", "1", "--restart", "--beside", "--device", "cpu", "--context", "1500"]
    monkeypatch.setattr("sys.argv", ["bench_disk", "--path", str(path), *options])
    monkeypatch.setattr(bench_disk, "DECODE_TOKENS", 20)
    bench_disk.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["load_share"] > 0 and result["restart_share"] > 0 and result["num_loaded_tokens"] > 0
    assert result["decode_share_while_writing"] > 0 and result["num_bytes_written_beside"] > 0
    assert not path.exists()
