"""The benchmarks where there is no GPU: their figures of a tiny model, and the table of targets."""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_model

import bench_offload
from benchmarks import bench_attention, common, device_memory, run_all, speculation, trained_model
from benchmarks.common import Ceilings, greedy, lengths_after_short_warm_up, random_prompt, serve, time_prompts
from benchmarks.targets import JOBS, TARGETS, Job, Target
from nanovllm import LLM, SamplingParams
from nanovllm.capacity.plan_check import check_plan
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import parse_quantization
from nanovllm.plan.sequence import Sequence
from nanovllm.schedule.proposer import Guesses

ROOT = Path(__file__).parent.parent
CEILINGS = Ceilings("a laptop", 1e12, 1e11, 1e10)
BLOCK, CONTEXT = 256, 2048


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Engines are made on the CPU; the options of each."""
    made: list[dict[str, Any]] = []

    def make(model: str, **options: Any) -> LLM:
        made.append(options)
        return LLM(model, device="cpu", **options)

    monkeypatch.setattr(bench_offload, "LLM", make)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
    return made


def arguments(model: str, **options: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {"load_format": "auto", "tp": 1, "backend": "auto", "batch": 1, "runs": 2}
    defaults |= {"block_size": BLOCK, "num_gpu_blocks": 3, "decode_tokens": 8, "one_prompt": False}
    return argparse.Namespace(**({"model": model, "cpu_memory_gb": None, "quantization": None} | defaults | options))


@pytest.mark.slow
@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("drafter", "num_gpu_blocks"), [("resident", 3), ("shadow", 3), ("mtp", 3), ("mtp", 0), ("prompt_lookup", 0)]
)
def test_bench_speculation_the_oracle_changes_no_token(
    model: str, drafter: str, num_gpu_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drafter == "mtp":
        sizes: dict[str, Any] = {"num_layers": 4, "max_position_embeddings": CONTEXT, "with_mtp": True}
        model = str(write_tiny_model(tmp_path, "qwen3_5", **sizes))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    args = arguments(model, speculation=drafter, num_gpu_blocks=num_gpu_blocks, decode_tokens=6, cpu_attention="auto")
    args.max_model_len, args.num_speculative_tokens, args.shadow_bits = CONTEXT, 15, 4
    header = {"model": "tiny", "gpu": "none", "num_speculative_tokens": 15}
    result = speculation.run_speculation(args, CEILINGS, header, bench_offload.make_llm)
    targets = [target for target in TARGETS if all(job.startswith("guesses-") for job in target.jobs)]
    assert targets
    for target in targets:
        if num_gpu_blocks or "bound_tok_per_s" not in target.key:
            assert target.value(*[result for _ in target.jobs]) > 0
    assert [point["acceptance"] for point in result["points"]] == list(speculation.ACCEPTANCES)
    assert all(point["decode_tok_per_s"] > 0 for point in result["points"])
    assert result["plain_tok_per_s"] > 0 and ("bound_tok_per_s" in result) == (num_gpu_blocks > 0)
    costs_drafts = drafter != "prompt_lookup"
    assert all((point["draft_s"] > 0) == costs_drafts for point in result["points"])


def test_presets_of_any_length() -> None:
    """Regression: the context of a preset whose text part is nested stayed as it was."""
    for preset in ("qwen3-0.6b", "qwen3.5-9b"):
        config, _ = ModelConfig.from_pretrained(common.model_of_length(preset, 500_000))
        assert config.max_model_len_limit == 500_000


def test_random_weights_in_fp8_whose_activations_are_quantized(tmp_path: Path) -> None:
    """Unlike those of a preset that is quantized while it is loaded."""
    config, _ = ModelConfig.from_pretrained(common.model_of_length("qwen3-0.6b-fp8", 500))
    assert config.quantization == parse_quantization(common.FP8_CONFIG) and config.quantization.has_fp8_activations
    tiny = write_tiny_model(tmp_path, hidden_size=128, intermediate_size=256, max_position_embeddings=500)
    settings = json.loads((tiny / "config.json").read_text()) | {"quantization_config": common.FP8_CONFIG}
    (tiny / "config.json").write_text(json.dumps(settings))
    with LLM(str(tiny), device="cpu", load_format="dummy", num_kvcache_blocks=4) as llm:
        assert llm.model_config.quantization == config.quantization
        (output,) = llm.generate([[1] * 100], greedy(3), use_tqdm=False)
    assert len(output["token_ids"]) == 3


@pytest.mark.parametrize("task", trained_model.TASKS)
def test_prompts_of_tasks_have_their_length_and_show_what_is_asked_for(task: str) -> None:
    lines = [f"def function_{i}(argument):\n    return {i * 7919} + argument\n" for i in range(400)]
    files = ["".join(lines[start : start + 25]).encode() for start in range(0, 400, 25)]
    prompt = trained_model.make_prompt(task, random.Random(0), files, 6000, 64)
    assert len(prompt) == 6000
    text = bytes(token_id if token_id < 256 else 0 for token_id in prompt)
    if task in ("quote", "far"):
        cue, start = text[-trained_model.CUE_TOKENS :], text.index(text[-trained_model.CUE_TOKENS :])
        assert text.count(cue) == 2 and (start < 1600) == (task == "far")
    else:
        shown = text.rpartition(b"\0")[2]
        assert shown.startswith(b"def ") and shown.endswith(b"\n")
        assert any(content.startswith(shown) for content in files) == (task == "continue")


def test_oracle_errs_with_the_given_probability() -> None:
    oracle = speculation.Oracle()
    oracle.answer = list(range(3000))
    seq = Sequence(0, [1, 2, 3], SamplingParams(max_tokens=5000), seed=0)
    assert not oracle.can_guess(seq) and not oracle.guess(seq, 5).token_ids
    seq.token_ids.extend(oracle.answer[:100])
    oracle.acceptance = 0.8
    guesses = oracle.guess(seq, 2000)
    num_right = sum(guess == token_id for guess, token_id in zip(guesses.token_ids, oracle.answer[100:], strict=False))
    assert len(guesses.token_ids) == 2000 and 0.77 < num_right / 2000 < 0.83 and guesses.num_drafts == 0
    drafting = speculation.DraftingOracle()
    drafting.answer, drafting.acceptance = [5] * 200, 1.0
    assert drafting.guess(seq, 7) == Guesses((5,) * 7, 7)


@pytest.mark.slow
@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("one_prompt", [False, True])
def test_bench_offload_has_every_figure_its_targets_read(model: str, one_prompt: bool) -> None:
    args = arguments(model, one_prompt=one_prompt)
    args.max_model_len, args.cpu_attention = CONTEXT, "both"
    result = bench_offload.bench_with_and_without_cpu(args, CEILINGS)
    assert result["prefill_tokens"] == CONTEXT - (8 if one_prompt else 1)
    share = result["offload_prefill_tok_per_s"] / result["prefill_bound_tok_per_s"]
    assert result["prefill_bound_share"] == pytest.approx(share)
    assert result["num_missing_blocks"] == 7 - (3 - 1) and result["link_share"] > 0
    result |= bench_offload.bench_default(args)
    added_by_main = {"prefill_ratio_to_gpu": 1.0, "decode_ratio_to_gpu": 1.0}
    for target in TARGETS:
        if all(name.startswith("offload") for name in target.jobs):
            target.value(*[result | added_by_main for _ in target.jobs])


@pytest.mark.slow
def test_bench_offload_pool_and_batch_are_passed_on(model: str, made: list[dict[str, Any]]) -> None:
    args = arguments(model, cpu_memory_gb=0.01, one_prompt=True)
    result = bench_offload.bench_offload(args, CEILINGS, CONTEXT, args.num_gpu_blocks, "auto")
    assert made[0]["cpu_memory_gb"] == 0.01 and "num_cpu_blocks" not in made[0]
    assert result["start_s"] > 0
    args = arguments(model, batch=3, num_gpu_blocks=24)  # it fits the slots
    result = bench_offload.bench_offload(args, CEILINGS, CONTEXT, args.num_gpu_blocks, "auto")
    assert result["num_missing_blocks"] == 0 and "link_share" not in result
    assert result["engine_load_byte_per_s"] is None  # nothing was streamed


def test_serve_counts_steps_in_which_all_decode(model: str) -> None:
    """Chunks of 100 tokens: the first prompt decodes while the second is still read, which does not count."""
    rng = random.Random(0)
    with LLM(model, device="cpu", max_num_batched_tokens=100, num_kvcache_blocks=8, max_model_len=512) as llm:
        prompts = [random_prompt(rng, 150, 320) for _ in range(2)]
        outputs, ends = serve(llm, prompts, greedy(10))
    assert [len(output["token_ids"]) for output in outputs] == [10, 10]
    assert 2 <= len(ends) < 9


def test_time_prompts_second_questions_reuse_their_prompt_and_nothing_else_is_reused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the CPU pool holds one prompt and one block, as in the sweep."""
    num_cached = []

    def recording_serve(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Any:
        outputs, ends = serve(llm, prompts, params)
        num_cached.append(outputs[0]["num_cached_tokens"])
        return outputs, ends

    monkeypatch.setattr(common, "serve", recording_serve)
    options = {"enable_cpu_offload": True, "num_gpu_blocks": 3, "kvcache_block_size": BLOCK}
    with LLM(model, device="cpu", num_cpu_blocks=CONTEXT // BLOCK + 1, **options) as llm:
        times = time_prompts(llm, [1000, CONTEXT - 8, CONTEXT - 8], 8, seed=0)
    assert num_cached == [0, 3 * BLOCK, 0, 7 * BLOCK, 0, 7 * BLOCK]
    assert [len(samples.values) for samples in times] == [2, 2, 2]


def test_bench_offload_one_prompt_of_a_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_offload.py", "--one-prompt", "--batch", "4"])
    with pytest.raises(SystemExit):
        bench_offload.main()
    assert "leave out --batch 4" in capsys.readouterr().err


def test_device_memory_cases_are_engines_that_fit() -> None:
    total_bytes, others_bytes = 140 * 2**30, 2**29
    for case in device_memory.CASES.values():
        options = device_memory.engine_options(case, total_bytes)
        check_plan(device_memory.planned(options))
        beside_others = device_memory.engine_options(case, total_bytes, others_bytes)
        if "simulated_gib" in case:
            assert options["gpu_memory_utilization"] * total_bytes == pytest.approx(21.6 * 2**30)
            assert beside_others["gpu_memory_utilization"] * total_bytes == pytest.approx(22.1 * 2**30)
        else:
            assert options == beside_others


def test_device_memory_case_is_served_and_reported(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with a device whose free memory falls by 10 bytes with each look."""
    free = iter(range(1000, 0, -10))
    for name, fake in {
        "synchronize": lambda: None,
        "mem_get_info": lambda: (next(free), 2000),
        "get_device_properties": lambda index: argparse.Namespace(total_memory=2000),
        "memory_stats": lambda: {"reserved_bytes.all.current": 7, "allocated_bytes.all.peak": 5},
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    options = {"device": "cpu", "enable_cpu_offload": True, "kvcache_block_size": BLOCK, "num_gpu_blocks": 3}
    monkeypatch.setitem(device_memory.CASES, "tiny", {"model": model, "max_num_seqs": 2, **options})
    result = device_memory.serve_case("tiny", free_bytes=1500, num_short_prompts=5)
    assert [result[f"{stage}_bytes"] for stage in ("cuda", "start", "served")] == [500, 510, 520]
    assert (result["reserved_bytes"], result["unreserved_bytes"]) == (7, 513)
    assert result["kv_bytes"] == result["plan_kv_bytes"] == result["plan_parts"]["kv_bytes"] > 0


def test_device_memory_targets_read_the_figures_of_their_case() -> None:
    targets = [target for target in TARGETS if target.jobs == ["device-memory"]]
    figures = {"served_bytes": 6 * 2**30, "plan_error": -0.06}
    values = [target.value(dict.fromkeys(device_memory.CASES, figures)) for target in targets]
    assert values == [6 * 2**30, 6 * 2**30, 0.06, 0.06]
    assert [target.is_reached(value) for target, value in zip(targets, values, strict=True)] == [True, *[False] * 3]


def test_short_warm_up_is_streamed_and_never_longer_than_the_prompt() -> None:
    assert lengths_after_short_warm_up(262144, 2, 36, 4096) == [40 * 4096, 262144, 262144]
    assert lengths_after_short_warm_up(1000, 1, 8, 4096) == [1000, 1000]


# -- jobs and targets ------------------------------------------------------------------------------------------------


def test_targets_name_jobs_that_exist_once() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    assert {name for target in TARGETS for name in target.jobs} <= set(names)
    assert all(any(job.name in target.jobs for target in TARGETS) for job in JOBS if job.is_check)
    for job in JOBS:
        is_module = job.command[1] == "-m"
        script = job.command[2].replace(".", "/") + ".py" if is_module else job.command[1]
        assert job.is_check or (ROOT / script).is_file(), job


def test_row_compares_results_with_the_target_or_says_why_it_cannot() -> None:
    peak = Target("peak", "long / short", "peak_bytes", 1.02, at_most=True)
    for value, verdict in ((1.02, "reached"), (1.03, "MISSED")):
        line = run_all.row(peak, {"short": {"peak_bytes": 1}, "long": {"peak_bytes": value}}, {})
        assert line.endswith(verdict) and f"{value:.3f}" in line
    line = run_all.row(peak, {"long": {"peak_bytes": 1}}, {"long": "ok", "short": "skipped: needs 2 GPUs"})
    assert line.endswith("not measured: short skipped: needs 2 GPUs")
    assert run_all.row(peak, {}, {}).endswith("not measured: long did not run, short did not run")
    assert run_all.row(peak, {"long": {}, "short": {}}, {}).endswith("not measured: no 'peak_bytes' in the result")
    assert Target("share", "one", "rate / bound", 1).value({"rate": 3, "bound": 4}) == 0.75
    assert Target("error", "one", "case:error", 1).value({"case": {"error": -0.5}}) == 0.5


def test_choose_takes_several_parts_of_names_and_refuses_unknown_ones() -> None:
    names = [job.name for job in run_all.choose("requests,start-warm,")]
    assert names == ["requests", "requests-offload", "start-warm", "requests-triton", "requests-flash"]
    assert run_all.choose("") == JOBS
    with pytest.raises(ValueError, match="--only nothing: no job"):
        run_all.choose("long,nothing")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_all, "RESULTS", tmp_path)
    return tmp_path


def python(code: str, **options: Any) -> Job:
    return Job("job", (sys.executable, "-c", code), **options)


def test_run_jobs_without_what_they_need_are_skipped_with_the_reason(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_one = 'print("text"); print(\'{"rate": 2}\')'
    jobs = [
        Job("two", (sys.executable, "-c", print_one), num_gpus=2),
        Job("tool", (sys.executable, "-c", print_one), needs=("no-such-program",)),
        Job("one", (sys.executable, "-c", print_one), needs=("torch", "sh")),
    ]
    monkeypatch.setattr(run_all, "TARGETS", [Target("rate", "one", "rate", 1)])
    found, statuses = run_all.run_jobs(jobs, num_gpus=1)
    assert statuses == {"two": "skipped: needs 2 GPUs", "tool": "skipped: needs no-such-program", "one": "ok"}
    assert found == {"one": {"rate": 2}} == {"one": json.loads((results / "one.json").read_text())}
    assert capsys.readouterr().out.count("reached") == 1


def test_run_failures_have_no_result(results: Path) -> None:
    assert run_all.run(python("print(1); raise SystemExit(3)")) == ("exit status 3", None)
    assert run_all.run(python("print('no json')")) == ("its last line is not JSON", None)
    assert run_all.run(python("raise SystemExit(3)", is_check=True)) == ("exit status 3", {"passed": False})
    assert run_all.run(python("print('fine')", is_check=True)) == ("ok", {"passed": True})
    # Regression: a child that holds the pipe open kept the whole run waiting after its parent was killed
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start_s = time.monotonic()
    assert run_all.run(python(code, timeout_s=1)) == ("did not end within 1 s", None)
    assert time.monotonic() - start_s < 30 and not list(results.iterdir())


def test_run_scratch_is_an_empty_folder_that_is_removed(results: Path) -> None:
    code = "import json, os; d = os.environ['DIR']; print(json.dumps({'path': d, 'files': os.listdir(d)}))"
    _, result = run_all.run(python(code, env=(("DIR", "{scratch}"),)))
    assert result is not None and result["files"] == [] and not Path(result["path"]).exists()


def test_attention_shares_of_flash_are_of_the_same_workload() -> None:
    rows = [
        {"model": "m", "workload": work, "backend": backend, "median_ms": ms}
        for work, backend, ms in (("a", "flash", 2.0), ("b", "flash", 3.0), ("a", "triton", 4.0), ("b", "triton", 2.0))
    ]
    rows.append({"model": "m", "workload": "c", "backend": "triton", "median_ms": 1.0})  # flash-attn did not run it
    assert bench_attention.add_shares_of_flash(rows) == {"triton_share_of_flash": 0.5}
    assert [row.get("share_of_flash") for row in rows] == [None, None, 0.5, 1.5, None]
