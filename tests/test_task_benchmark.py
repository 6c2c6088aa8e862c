"""The benchmark of guesses on tasks, and the training of its model: tiny, on the CPU."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_tasks, train_small_lm
from benchmarks.attention_mass import BLOCK_SIZE, chosen_keys, compare_choices
from benchmarks.python_sources import END_TOKEN_ID, join_files, library_files, package_files, rename_words
from benchmarks.task_prompts import CUE_TOKENS, MIN_TOKENS, TASKS, make_prompts
from benchmarks.training_data import Crops, LongSequences
from nanovllm import LLM, SamplingParams
from nanovllm.demo.retrieval_model import build_retrieval_model
from nanovllm.engine.internals import Internals

NUM_TOKENS = 8
CONTEXT = MIN_TOKENS + NUM_TOKENS
TINY = (
    *("--hidden-size 64 --intermediate-size 128 --layers 2 --heads 4 --kv-heads 2 --head-dim 16").split(),
    *("--contexts 128 256 --batch-tokens 512 --steps 6 4 --packages tqdm --device cpu").split(),
    *("--eval-every 3 --eval-contexts 128 512 --eval-samples 2").split(),
)


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    return library_files()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The directory of a model after a few steps, and what its training measured."""
    directory = str(tmp_path_factory.mktemp("small-lm"))
    return directory, train_small_lm.train(train_small_lm.parse(["--out", directory, *TINY]))


def text(token_ids: Sequence[int]) -> bytes:
    return bytes(token_id for token_id in token_ids if token_id != END_TOKEN_ID)


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_tokens", [MIN_TOKENS, 16384, 20001])
def test_prompts_have_the_exact_length_and_depend_on_the_seed_alone(
    files: list[bytes], task: str, num_tokens: int
) -> None:
    prompts = make_prompts(task, files, num_tokens, 4, 300, seed=1)
    assert [len(prompt.token_ids) for prompt in prompts] == [num_tokens] * 4
    assert [len(prompt.expected) for prompt in prompts] == [300] * 4
    assert all(0 <= token_id <= END_TOKEN_ID for prompt in prompts for token_id in prompt.token_ids)
    assert make_prompts(task, files, num_tokens, 4, 300, seed=1) == prompts
    assert make_prompts(task, files, num_tokens, 2, 300, seed=1) == prompts[:2]
    assert not set(map(str, make_prompts(task, files, num_tokens, 4, 300, seed=2))) & set(map(str, prompts))


@pytest.mark.parametrize(("task", "first", "last"), [("quote", 1 / 2, 7 / 8), ("far", 1 / 8, 1 / 4)])
def test_a_passage_to_quote_is_in_the_prompt_once_and_where_the_task_says(
    files: list[bytes], task: str, first: float, last: float
) -> None:
    for prompt in make_prompts(task, files, 16384, 8, 400, seed=0):
        tokens = "".join(map(chr, prompt.token_ids))
        cue = tokens[-CUE_TOKENS:]
        position = tokens.index(cue)
        assert tokens.count(cue) == 2 and first <= position / 16384 <= last
        assert tokens[position - 1] == "\n" and tokens[-CUE_TOKENS - 1] == chr(END_TOKEN_ID)
        assert tokens[position + CUE_TOKENS :].startswith("".join(map(chr, prompt.expected)))
        assert prompt.num_right(prompt.expected) == 400
        assert prompt.num_right([*prompt.expected[:7], -1, *prompt.expected[8:]]) == 7


def test_a_rewritten_file_is_the_one_before_it_with_other_names(files: list[bytes]) -> None:
    for prompt in make_prompts("rewrite", files, 16384, 8, 300, seed=0):
        *_, content, beginning = "".join(map(chr, prompt.token_ids)).split(chr(END_TOKEN_ID))
        assert content.encode("latin-1") in files
        copy = beginning + "".join(map(chr, prompt.expected))
        assert not content.startswith(copy)
        assert 1024 <= len(content) <= 16384 * 3 // 8 and len(beginning) >= len(content) // 8


def test_a_continued_file_goes_on_as_it_does(files: list[bytes]) -> None:
    for prompt in make_prompts("continue", files, 16384, 8, 300, seed=0):
        assert sum(text(prompt.token_ids[-200:] + prompt.expected) in content for content in files) == 1


def test_prompts_that_are_too_short_for_their_task_are_refused(files: list[bytes]) -> None:
    with pytest.raises(ValueError, match=f"at least {MIN_TOKENS}"):
        make_prompts("quote", files, MIN_TOKENS - 1, 1, 16, seed=0)
    with pytest.raises(ValueError, match="too few tokens"):
        make_prompts("quote", files[:3], 2**20, 1, 16, seed=0)


# -- training --------------------------------------------------------------------------------------------------------


def test_training_files_are_not_held_out_ones() -> None:
    held_out = set(library_files())
    files = package_files(["tqdm", "tqdm"])
    assert files and not held_out.intersection(files) and len(set(files)) == len(files)
    with pytest.raises(ValueError, match="not installed"):
        package_files(["no_such_package"])


def test_renamed_words_are_renamed_everywhere_and_nothing_else_changes() -> None:
    content = b"def total(values):\n    total = 0\n    return total + len(values) + values[0]\n"
    changed = rename_words(random.Random(0), content)
    assert changed.count(b"values_total") + changed.count(b"total_total") == 3
    assert changed.replace(b"_values", b"").replace(b"_total", b"").count(b"\n") == 3
    assert rename_words(random.Random(0), b"x = 1\n") == b"x = 1\n"
    assert rename_words(random.Random(0), content) == changed


@pytest.mark.parametrize("data", [Crops, LongSequences])
def test_batches_have_their_shape_and_depend_on_the_seed(files: list[bytes], data: Any) -> None:
    first = data(files[:50], 0).batch(3, 1000)
    assert first.shape == (3, 1000) and int(first.max()) <= END_TOKEN_ID
    assert torch.equal(data(files[:50], 0).batch(3, 1000), first)
    assert not torch.equal(data(files[:50], 1).batch(3, 1000), first)


def test_long_sequences_repeat_much_of_what_came_before(files: list[bytes]) -> None:
    """Compared with plain files, many more lines of 30 characters or more occur earlier in the same sequence."""

    def repeated_share(tokens: Sequence[int]) -> float:
        lines = [line for line in text(tokens).split(b"\n") if len(line) >= 30]
        return 1 - len(set(lines)) / len(lines)

    shares = [repeated_share(LongSequences(files, seed).sequence(16384).tolist()) for seed in range(8)]
    assert sum(shares) / len(shares) > 0.2 > 2 * repeated_share(join_files(files)[:131072].tolist())


def test_trained_model_improves_is_reported_and_is_an_ordinary_checkpoint(trained: tuple[str, dict[str, Any]]) -> None:
    directory, result = trained
    phases = result["phases"]
    assert [phase["num_steps"] for phase in phases] == [6, 4]
    assert [phase["num_tokens"] for phase in phases] == [6 * 512, 4 * 512]
    assert phases[1]["bits_per_byte"][128] < phases[0]["history"][0]["bits_per_byte"][128] < 8.4
    assert set(result["held_out"]) == {"128", "512", "512 yarn"}
    assert result["seed"] == 0 and result["num_parameters"] > 0 and result["transformers"] and result["torch"]
    json.dumps(result)
    with LLM(directory, device="cpu", max_model_len=512, num_kvcache_blocks=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": list(b"import torch\n")}], params, use_tqdm=False)
    assert output["text"] is None and len(output["token_ids"]) == 5


def test_a_phase_by_time_ends_when_its_minutes_are_over() -> None:
    phase = train_small_lm.Phase(2048, 2.0, None, 1e-3, 1e-4, 10)
    assert phase.progress(1000, 60.0) == 0.5 and phase.progress(0, 120.0) == 1
    assert phase.learning_rate(0, 0.0) == pytest.approx(1e-4)  # the first of 10 warm-up steps
    assert phase.learning_rate(50, 0.0) == 1e-3 and phase.learning_rate(50, 1.0) == pytest.approx(1e-4)


# -- the benchmark ---------------------------------------------------------------------------------------------------


def arguments(model: str, *more: str) -> Any:
    sizes = ["--contexts", str(CONTEXT), "--block-size", "256", "--tokens", str(NUM_TOKENS)]
    return bench_tasks.parse(["--model", model, "--device", "cpu", "--dtype", "float32", *sizes, *more])


def test_every_drafter_has_its_figures_and_changes_no_answer(
    trained: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "tasks.json"
    args = arguments(trained[0], "--slots", "3", "0", "--prompts", "1", "--json", str(file), "--yarn-from", "256")
    args.tasks, args.drafters = ["rewrite"], ["auto", "resident"]
    result = bench_tasks.run(args, Internals(always_guesses=True))
    assert result["num_differing"] == 0
    points = {(p["num_slots"], p["drafter"], p["task"], p["temperature"]): p for p in result["points"]}
    assert len(points) == len(result["points"]) == (3 + 2) * 2  # off is added; resident needs offload
    for (num_slots, drafter, _, _), point in points.items():
        assert point["num_missing_blocks"] == (CONTEXT // 256 - 2 if num_slots else 0)
        assert point["tok_per_s_min"] <= point["tok_per_s"] <= point["tok_per_s_max"]
        assert point["ratio_to_off"] > 0 and (drafter != "off" or point["ratio_to_off"] == 1)
        assert (point["num_guesses"] > 0) == (point["guess_acceptance"] is not None)
        if drafter != "off" and num_slots:
            assert point["num_guesses"] > 0 and 1 <= point["tokens_per_pass"] <= NUM_TOKENS
    assert json.loads(file.read_text())["points"] == result["points"]


def test_a_model_that_quotes_is_found_to_do_so(tmp_path: Path) -> None:
    """The demo's model quotes. It looks for 6 bytes wherever they are, so drafts without the passage are wrong."""
    model = str(build_retrieval_model(tmp_path / "retrieval"))
    args = arguments(model, "--tasks", "far", "--drafters", "resident", "--slots", "3", "--prompts", "1")
    args.temperatures = [0.0]
    result = bench_tasks.run(args, Internals(always_guesses=True))
    off, resident = result["points"]
    assert off["drafter"] == "off" and off["num_right_tokens"] == NUM_TOKENS
    assert result["num_differing"] == 0 and resident["guess_acceptance"] < 0.5
    rows = compare_choices(args, {"far": make_prompts("far", library_files(), MIN_TOKENS, 1, NUM_TOKENS, seed=0)})
    acceptances = {row["choice"]: row["acceptance"] for row in rows}
    assert acceptances["attention_mass"] == 1 and acceptances["newest"] < 0.5


def test_chosen_keys_are_as_many_for_both_choices() -> None:
    num_keys = 20 * BLOCK_SIZE
    mass = torch.zeros(num_keys)
    mass[5 * BLOCK_SIZE + 3] = 1.0
    newest, by_mass = (chosen_keys(choice, mass, num_keys) for choice in ("newest", "attention_mass"))
    assert len(newest) == len(by_mass) == 3 * BLOCK_SIZE
    assert {int(key) // BLOCK_SIZE for key in newest} == {0, 18, 19}
    assert {int(key) // BLOCK_SIZE for key in by_mass} == {0, 5, 19}
