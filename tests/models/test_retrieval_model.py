"""The retrieval model, run by transformers: the engine's tests compare with a model that is known to be right."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from private_cache import use_private_cache
from tiers import tiered
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.read_config import load_config
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models.retrieval_model import (
    END_TOKEN,
    END_TOKEN_ID,
    HELP,
    build_retrieval_model,
    model_weights,
    token_codes,
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_retrieval_model(tmp_path_factory.mktemp("model") / request.param, dtype=request.param)


@cache
def load(model_path: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return tokenizer, AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="sdpa")


in_fp32 = pytest.mark.parametrize("model_path", ["float32"], indirect=True)


def answer(model_path: Path, prompt: str, num_tokens: int) -> str:
    tokenizer, model = load(model_path)
    prompt_ids = tokenizer(prompt, return_tensors="pt")
    output_ids = model.generate(**prompt_ids, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(output_ids[0, prompt_ids.input_ids.shape[1] :])


@pytest.mark.parametrize("depth", tiered((0.0, 0.13, 0.5, 0.87, 1.0), (0.0, 0.87)))
def test_retrieval_any_depth_answers_passkey(model_path: Path, depth: float) -> None:
    passkey = str(random.Random(depth).randrange(10**4, 10**9))
    assert answer(model_path, build_haystack(1025, depth, passkey), len(passkey) + 1) == f"{passkey}."


@pytest.mark.slow
@pytest.mark.parametrize("model_path", ["bfloat16"], indirect=True)
def test_retrieval_8k_tokens_answers_passkey(model_path: Path) -> None:
    """The engine does it with 40,960 in test_demo."""
    assert answer(model_path, build_haystack(8192, 0.25, "731946205"), 10) == "731946205."


def test_retrieval_takes_only_six_tokens_and_ends_with_the_passage(model_path: Path) -> None:
    prompt = "xbcdef2 acdef3 abcdeg4 " * 50 + "abcdef1 " + "abddef5 ibcdef6 abcdff7 " * 50 + "abcdef"
    assert answer(model_path, prompt, 1) == "1"  # five of six match elsewhere
    prompt = f"To be, or not to be.{END_TOKEN} That is the question. To be, or not"
    assert answer(model_path, prompt, 20) == f" to be.{END_TOKEN}"


def test_weights_are_exact_in_bfloat16_and_products_of_codes_at_most_a_quarter() -> None:
    """fp32 and bf16 read and write the same codes; only norms and positions are rounded."""
    weights = model_weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.o_proj.weight"):
        assert torch.equal(weights[name].bfloat16().float(), weights[name]), name
    codes = token_codes()
    products = codes @ codes.T
    assert torch.equal(products.diagonal(), torch.ones(len(codes)))
    assert products.fill_diagonal_(0).max() == 0.25


def test_build_second_call_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = build_retrieval_model()
    assert path.is_relative_to(tmp_path / "nanovllm")
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert build_retrieval_model() == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert list(path.parent.iterdir()) == [path]  # no scratch directory left


def test_build_fails_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("nanovllm.models.retrieval_model.save_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        build_retrieval_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_build_bad_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        build_retrieval_model(tmp_path / "model", dtype="float16")
    build_retrieval_model(tmp_path / "model", dtype="float32")
    with pytest.raises(CheckpointError, match="something other than the bfloat16"):
        build_retrieval_model(tmp_path / "model", dtype="bfloat16")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="something other"):
        build_retrieval_model(tmp_path)


def test_config_passes_the_engines_gate(model_path: Path) -> None:
    config, directory = load_config(str(model_path))
    assert directory == model_path
    assert config.torch_dtype == model_path.name
    assert config.eos_token_ids == (END_TOKEN_ID,)
    assert config.max_model_len_limit == 2**20


def test_llm_takes_the_built_in_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only the command line knew the name, and LLM("demo") asked the hub for it."""
    use_private_cache(monkeypatch, tmp_path)
    with LLM("demo", device="cpu", num_kvcache_blocks=4, max_model_len=512) as llm:
        prompt = "The passkey is q7m2x9kd.\nThe passkey is"
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output["text"] == " q7m2x9kd."
    assert Path(llm.config.model).parent == tmp_path / "nanovllm"


@in_fp32
def test_tokenizer_any_text_round_trips_one_token_per_byte(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    for text in ("", "  two  spaces\n\n\ttab", "naïve → 你好 😀", "".join(map(chr, range(0x20, 0x250)))):
        token_ids = tokenizer.encode(text)
        assert token_ids == list(text.encode())
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.encode(f"a{END_TOKEN}") == [ord("a"), END_TOKEN_ID]
    assert tokenizer.eos_token_id == END_TOKEN_ID


def chat_prompt(model_path: Path, *turns: str) -> str:
    """`turns`: of the user and the model, in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt


@in_fp32
def test_chat_model_completes_lines_and_else_says_that_it_does(model_path: Path) -> None:
    turns: list[str] = []
    for message, expected in (
        ("The passkey is q7m2x9kd.\nA second line.", HELP),
        ("What is the passkey?", HELP),
        ("The passkey is", " q7m2x9kd."),
        ("What is the passkey?", HELP),  # it was there before, at the end of a line
        ("A second ", "line."),
        ("Hi", HELP),
    ):
        turns.append(message)
        assert answer(model_path, chat_prompt(model_path, *turns), 64) == expected + END_TOKEN
        turns.append(expected)


@in_fp32
def test_chat_prompt_begins_with_the_turns_before_and_their_answers(model_path: Path) -> None:
    """So that every turn finds them in the prefix cache."""
    turns = ["The passkey is q7m2x9kd.", HELP, "The passkey is ", "q7m2x9kd.", "Thanks"]
    first, second, third = (chat_prompt(model_path, *turns[:end]) for end in (1, 3, 5))
    assert second.startswith(first + HELP + END_TOKEN)
    assert third.startswith(second + "q7m2x9kd." + END_TOKEN)


@in_fp32
def test_chat_template_with_a_system_prompt_has_it_as_lines(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    messages = [{"role": "system", "content": "The passkey is 4711."}, {"role": "user", "content": "The passkey is"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert answer(model_path, prompt, 64) == f" 4711.{END_TOKEN}"
