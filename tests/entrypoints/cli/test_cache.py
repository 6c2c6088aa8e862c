"""`nanovllm cache`: list, verify, prune and remove what engines have left on disk."""

import os
from pathlib import Path

import pytest
from checked_engine import Reference
from tiny_engines import write_model_with_text

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.disk.disk_moves import DISK_HEADER_BYTES, document_disk_bytes
from nanovllm.capabilities.disk.store import list_extents
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.make_plan import make_plan
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.entrypoints.cli.main import main
from nanovllm.entrypoints.planner import disk_bytes, plan_table

PROMPT = [i % 300 for i in range(1025)]


@pytest.fixture
def path(model: Path, tmp_path: Path) -> Path:
    """Four extents in fp32, and the same in bf16."""
    for dtype in ("float32", "bfloat16"):
        with LLM(model, device="cpu", dtype=dtype, num_kvcache_blocks=8, kv_disk_path=str(tmp_path)) as llm:
            llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    status = main(["cache", *map(str, argv)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_list_shows_whose_extents_there_are(path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "list", path)
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert sorted(line[2] for line in lines[1:3]) == ["bfloat16", "float32"]
    assert all(model.name in line[1] and line[6] == "1,024" for line in lines[1:3])
    assert [folder.name[:8] for folder in sorted(path.iterdir()) if folder.is_dir()] == [line[0] for line in lines[1:3]]


def test_verify_names_and_removes_damaged_files(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", path)[0] == 0
    damaged = list_extents(path).extents[3].path
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    status, text = run(capsys, "verify", path)
    assert status == 1 and f"{damaged}: its content is damaged" in text and "7 files are whole" in text
    assert not damaged.exists()
    assert run(capsys, "verify", path)[0] == 0


def test_prune_and_remove_take_what_they_say(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extents = sorted(list_extents(path).extents, key=lambda extent: extent.used_s)
    num_bytes = sum(extent.num_bytes for extent in extents[3:])
    assert "removed 3 files" in run(capsys, "prune", path, "--keep-gb", (num_bytes + 1) / 2**30)[1]
    assert {extent.path for extent in list_extents(path).extents} == {extent.path for extent in extents[3:]}
    last = extents[-1].path.parent
    assert "removed 4 files" in run(capsys, "remove", path, "--id", last.name[:6])[1]
    assert [extent.path for extent in list_extents(path).extents] == [extents[3].path]
    assert "removed 1 files" in run(capsys, "remove", path)[1]
    assert int.from_bytes((path / "lock").read_bytes(), "little") == 0


def test_bad_input_gets_one_line_with_a_remedy(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (("prune", path), "add --keep-gb"),
        (("prune", path, "--keep-gb", "nan"), "must be between 0 and"),
        (("list", path, "--keep-gb", "1"), "--keep-gb=1 has no meaning for list"),
        (("list", path / "nowhere"), "give kv_disk_path"),
        (("list", path, "--id", "xyz"), "--id=xyz is the beginning of 0 ids"),
        (("list", path, "--id", ""), "--id= is the beginning of 2 ids"),
    ):
        status, text = run(capsys, *argv)
        assert status == 2 and text.count("\n") == 1, text
        assert message.replace("kv_disk_path", "") in text


def test_plan_says_what_a_document_takes(path: Path) -> None:
    """The plan's figure is the size of the files."""
    config = Config(model="m", device="cpu", dtype="float32", kv_disk_path=str(path), kv_disk_gb=1)
    directory = write_model_with_text(path / "model")
    plan = make_plan(config, config_without_weights(str(directory)), Machine.cpu(2**34), context=len(PROMPT))
    sizes = [extent.num_bytes for extent in list_extents(path).extents]
    assert disk_bytes(plan) == 4 * max(sizes)
    assert f"there is room for {2**30 // disk_bytes(plan):,} in 1.00 GiB" in plan_table(plan)


@pytest.fixture
def with_states(hybrid: Reference, tmp_path: Path) -> Path:
    """Four extents and a state."""
    path = tmp_path / "kv"
    with LLM(hybrid.directory, device="cpu", dtype="float32", num_kvcache_blocks=8, kv_disk_path=str(path)) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    return path


def test_states_are_counted_checked_and_removed(with_states: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list", with_states)[1].splitlines()[1].split()[6:8] == ["1,024", "1"]
    (state,) = (extent for extent in list_extents(with_states).extents if extent.is_state)
    extents = [extent for extent in list_extents(with_states).extents if not extent.is_state]
    content = state.path.read_bytes()
    state.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, text = run(capsys, "verify", with_states)
    assert status == 1 and f"{state.path}: its content is damaged" in text and "4 files are whole" in text
    state.path.write_bytes(extents[0].path.read_bytes())
    assert "it belongs to another model or to other tokens" in run(capsys, "verify", with_states)[1]
    assert "removed 4 files" in run(capsys, "remove", with_states)[1]


def test_a_state_is_pruned_before_what_it_follows(with_states: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_bytes = list_extents(with_states).num_bytes
    run(capsys, "prune", with_states, "--keep-gb", (num_bytes - 1) / 2**30)
    assert [extent.is_state for extent in list_extents(with_states).extents] == [False] * 4


def test_plan_counts_the_states_of_a_document(hybrid: Reference, with_states: Path) -> None:
    config = Config(model="m", device="cpu", dtype="float32", kv_disk_path=str(with_states))
    model = config_without_weights(str(hybrid.directory))
    plan = make_plan(config, model, Machine.cpu(2**34), context=len(PROMPT))
    assert disk_bytes(plan) == list_extents(with_states).num_bytes
    assert "1 state" in plan_table(plan)
    extent, state = (document_disk_bytes(256, 10, 0), 1000 + DISK_HEADER_BYTES)
    for num_tokens, num_extents, num_states in (
        (0, 0, 0),
        (256, 0, 0),
        (257, 1, 1),
        (8192, 31, 1),
        (8193, 32, 1),
        (8449, 33, 2),
        (40_000, 156, 5),
    ):
        assert document_disk_bytes(num_tokens, 10, 1000) == num_extents * extent + num_states * state
    assert document_disk_bytes(4000, 10, 1000, grain=1024) == 12 * extent + state


def test_path_of_a_flag_is_that_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Replicas run in other folders, so the command line makes paths absolute."""
    monkeypatch.chdir(tmp_path)
    prompt = "word " * 300
    main(["generate", "--model", str(model), "--device", "cpu", "--prompt", prompt, "--kv-disk-path", "kv"])
    assert os.listdir(tmp_path) == ["kv"]
