"""Sampling defaults from generation_config.json: what is read, who uses it, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.settings import read_sampling_defaults
from nanovllm.cli import main as cli
from nanovllm.errors import CheckpointError

USER = [{"role": "user", "content": "Hello"}]
FILE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3], "transformers": "5"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


def with_file(tiny: Path, tmp_path: Path, content: dict[str, Any] | str) -> Path:
    directory = shutil.copytree(tiny, tmp_path / "model")
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "generation_config.json").write_text(text)
    return directory


def make_llm(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), **({"device": "cpu", "num_kvcache_blocks": 4} | options))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (FILE, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"min_p": 0.05, "max_new_tokens": 2048}, {"min_p": 0.05, "max_tokens": 2048}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"repetition_penalty": 1.1, "max_length": 20}, {"repetition_penalty": 1.1}),
        ({}, {}),
    ],
)
def test_defaults_are_the_entries_that_sampling_params_has(
    tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_sampling_defaults(tmp_path) == expected


def test_defaults_without_the_file_are_empty(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {} and read_sampling_defaults(None) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, r"temperature=-1: .* must be 0 \(greedy\), or from .*; correct .*generation_config.json"),
        ({"top_k": "20"}, "top_k='20': .* must be an integer; correct"),
        ({"top_p": 1.5}, "top_p=1.5: .* at most 1; correct"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: .*1 or more.*; correct"),
        ({"do_sample": 1}, "do_sample=1 must be true or false; correct"),
        ("{", "generation_config.json is not JSON"),
        ("[]", "generation_config.json holds a list"),
    ],
)
def test_bad_value_is_refused_with_the_file_unless_the_file_is_left_out(
    tiny: Path, tmp_path: Path, content: dict[str, Any] | str, message: str
) -> None:
    directory = with_file(tiny, tmp_path, content)
    with pytest.raises(CheckpointError, match=message):
        make_llm(directory)
    if isinstance(content, dict):  # where its end tokens are cannot be left out
        with make_llm(directory, generation_config="none") as llm:
            assert llm.get_default_sampling_params() == SamplingParams()


def test_chat_uses_the_defaults_and_generate_does_not(tiny: Path, tmp_path: Path) -> None:
    """M6: every call sampled at temperature 1, whatever the model's authors recommend."""
    directory = with_file(tiny, tmp_path, {"do_sample": False, "max_new_tokens": 5})
    with make_llm(directory) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=5)
        (prompt,) = llm.chat_token_ids(USER)
        greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]["token_ids"]
        assert [llm.chat(USER, use_tqdm=False)[0]["token_ids"] for _ in range(2)] == [greedy] * 2
        sampled = llm.generate([prompt] * 2, use_tqdm=False)
        assert sampled[0]["token_ids"] != sampled[1]["token_ids"]
        given = SamplingParams(temperature=0, max_tokens=2)
        assert llm.chat(USER, given, use_tqdm=False)[0]["token_ids"] == greedy[:2]


def run_generate(directory: Path, *flags: str) -> int:
    argv = ["generate", "--model", str(directory), "--prompt", "Hello", "--device", "cpu", "--num-kvcache-blocks", "4"]
    return cli.main([*argv, *flags])


def test_command_line_uses_shows_and_can_switch_off_the_defaults(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = with_file(tiny, tmp_path, {"temperature": 0.6, "top_k": 1, "max_new_tokens": 3})
    shown = "from the model's generation_config.json: "
    assert run_generate(directory) == 0
    err = capsys.readouterr().err
    assert f"{shown}--temperature 0.6 --top-k 1 --max-tokens 3\n" in err and " 3 new;" in err
    assert run_generate(directory, "--max-tokens", "2", "--temperature", "0") == 0
    err = capsys.readouterr().err
    assert f"{shown}--top-k 1\n" in err and " 2 new;" in err
    assert run_generate(directory, "--generation-config", "none", "--ignore-eos") == 0
    err = capsys.readouterr().err
    assert shown not in err and " 64 new;" in err


def test_command_line_bad_file_exits_2_and_names_the_flag(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(with_file(tiny, tmp_path, {"top_k": -5})) == 2
    err = capsys.readouterr().err
    assert "top_k=-5" in err or "--top-k=-5" in err
    assert "ignore it with --generation-config='none'" in err and "generation_config.json" in err
