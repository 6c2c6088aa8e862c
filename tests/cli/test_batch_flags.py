"""`nanovllm batch` before Ray is asked for anything: what is refused, and how."""

import sys
from pathlib import Path

import pytest

from nanovllm.cli import main as cli

ARGS = ("batch", "--model", "demo", "--input", "x.jsonl", "--output", "out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-engines", "0"), "--num-engines=0 must be between"),
        (("--top-p", "9"), "--top-p=9.0 must be"),
        (("--ray-address", "ray://head:10001"), "--ray-address='ray://head:10001' must be host:port"),
        (("--num-gpu-blocks", "8"), "--num-gpu-blocks applies only to CPU offload"),
    ],
)
def test_batch_bad_flag_is_refused_by_its_name(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*ARGS, *flags]) == 2
    assert message in capsys.readouterr().err


def test_batch_without_ray_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(ARGS) == 2
    assert "nanovllm batch needs ray; run: pip install 'nanovllm[ray]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
