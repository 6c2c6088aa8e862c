"""Models that fit on one GPU: every entry works with the options that it names, and none that could work is missing."""

import json
import re
import shlex
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from gguf_files import write_gguf
from tiers import RUNS_ALL
from tiny_models import write_tiny_model

from nanovllm.capacity.fit import CONTEXTS, SETTINGS, _Wish, each_fit, fits, is_resident
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.plan_check import check_plan
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.entrypoints.cli.main import main
from nanovllm.entrypoints.planner import fit_table
from nanovllm.errors import ConfigError

GIB = 2**30


def machine(name: str = "RTX 4070", host_gib: int = 64) -> Machine:
    return Machine.gpu(host_gib * GIB, find_gpu(name))


def fits_here(plan: CapacityPlan) -> bool:
    with suppress(ConfigError):
        check_plan(plan)
        return True
    return False


@pytest.mark.slow
def test_fits_of_a_dense_model_are_in_formats_that_fit() -> None:
    found = {(fit.format, fit.plan.context) for fit in fits(machine(), ["qwen2.5-7b-1m"])}
    assert {format for format, _ in found} == {"fp8", "int6", "int5", "int4", "fp8_dynamic"}
    assert ("fp8", 32768) in found


@pytest.mark.parametrize(
    "format", ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in (None, "int8", "fp8", "fp8_dynamic"))]
)
def test_fits_each_works_with_its_options_and_only_what_never_works_is_missing(format: str | None) -> None:
    name = "qwen2.5-7b-1m"
    found = {
        fit.plan.context: fit.plan for fit in fits(machine(), [name], format) if fit.format == (format or "bfloat16")
    }
    model = config_without_weights(name).quantized(format)
    for context in CONTEXTS:
        working = []
        for settings, head in product(SETTINGS, (None, "int8")):
            config = Config(model=name, max_model_len=context, quantize_head=head, **settings)
            working += [config] * fits_here(make_plan(config, model.quantized(None, head), machine()))
        assert bool(working) == (context in found)
        assert not working or found[context].config in working


def test_fits_prefers_the_gpu_and_goes_beyond_the_rope_only_as_recommended() -> None:
    by_context = {fit.plan.context: fit for fit in fits(machine("RTX 4090"), ["qwen3-8b"], "fp8")}
    assert by_context.keys() == {32768, 131072}  # by YaRN; nobody recommends 262,144
    assert by_context[32768].is_resident and not by_context[131072].is_resident
    assert by_context[131072].kv_bytes == 18 * GIB
    assert not fits(machine("RTX 4090", host_gib=20), ["qwen3-8b"], "fp8", 131072)  # 70% of it is less than 18 GiB


def test_fits_of_a_quantized_gguf_file_quantizes_no_further(tmp_path: Path) -> None:
    """Bug: `plan --fit --model FILE.gguf` was refused with a message about --quantization, which was not given."""
    path = write_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "model", "llama"), types=["Q8_0"])
    assert {fit.format for fit in fits(machine(), [str(path)])} == {"gguf"}
    with pytest.raises(ConfigError, match=r"quantization='int4' is for checkpoints .* types Q8_0; leave it out"):
        fits(machine(), [str(path)], "int4")


@pytest.mark.slow
def test_fits_with_a_quantization_leaves_out_presets_that_are_quantized_already() -> None:
    found = fits(machine(), (), "int4", 32768)
    assert found and not any(fit.model.startswith("gpt-oss") for fit in found)
    assert {fit.format for fit in fits(machine(), ["gpt-oss-20b"], None, 32768)} == {"mxfp4"}
    with pytest.raises(ConfigError, match="quant_method='mxfp4'; leave it out"):
        fits(machine(), ["gpt-oss-20b"], "int4", 32768)


def test_fits_names_the_reason_if_the_gpu_does_not_take_the_format() -> None:
    """Regression: the answer was "nothing; use a smaller model or context, or more memory"."""
    with pytest.raises(ConfigError, match=r"fp8_dynamic needs a GPU .* RTX 3090 has 8\.6; use another GPU, or use"):
        fits(machine("RTX 3090"), ["qwen3-8b"], "fp8_dynamic")
    assert fits(machine("RTX 3090"), ["qwen3-8b"], "fp8")


@pytest.mark.slow
def test_fit_table_names_bounds_as_projected_and_says_when_nothing_runs() -> None:
    text = fit_table(machine(), fits(machine(), ["qwen3-8b"], context=32768))
    assert "RTX 4070 (11.60 GiB) with 64.00 GiB of CPU memory" in text and "projected" in text
    assert (
        text.count("qwen3-8b") == 5  # formats
        and "also stands for" not in text
        and "recommended: nanovllm chat Qwen/Qwen3-8B --quantization int4 --max-model-len 40960" in text
    )
    beyond = fit_table(machine(), fits(machine(), ["qwen3-8b"], context=131072), context=131072)
    (command,) = re.findall("recommended: (.*)", beyond)
    *_, name, overrides = shlex.split(command)
    assert "--max-model-len 131072" in command and name == "--hf-overrides"
    stored = config_without_weights("qwen3-8b", json.loads(overrides))
    assert stored.max_model_len_limit == 131072 and stored.rope.rope_type == "yarn"
    of_27b = fit_table(machine("A100 80GB"), fits(machine("A100 80GB"), ["qwen3.5-27b"], context=32768))
    assert "fp8_dynamic" in text and "fp8_dynamic" not in of_27b  # an A100 does not multiply in fp8
    assert "\nqwen3.5-27b also stands for Qwen3.6-27B and Qwen3.8-27B\n" in of_27b
    assert "nothing" in fit_table(machine(), fits(machine(host_gib=1), ["qwen3-30b-a3b"], "int4"))
    with pytest.raises(
        ConfigError, match=r"context=1000000 is more than the 131072 tokens that qwen3-8b takes; lower it"
    ):
        fits(machine(), ["qwen3-8b"], context=10**6)
    unknown = Machine.found_gpu(64 * GIB, "NVIDIA Unknown", 24 * GIB, (8, 9))
    assert "unknown" in fit_table(unknown, fits(unknown, ["qwen3-8b"], context=32768))


def test_model_of_a_short_context_is_listed_with_its_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: contexts began at 32,768, so nothing was listed for a model of 8,192, with exit status 0."""
    content = json.loads(presets()["qwen3-0.6b"].read_text()) | {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert {fit.plan.context for fit in fits(machine(), [str(tmp_path)])} == {8192}
    argv = ["plan", "--fit", "--model", str(tmp_path), "--gpu", "RTX 4070", "--host-memory-gb", "64"]
    assert main(argv) == 0 and "8,192" in capsys.readouterr().out
    assert main([*argv, "--gpu-memory-gb", "1"]) == 1 and "nothing" in capsys.readouterr().out
    assert main([*argv, "--context", "9000"]) == 2
    assert "--context=9000 is more than the 8192 tokens" in capsys.readouterr().err


def plans_that_pass(wish: _Wish, model: ModelConfig, context: int) -> list[CapacityPlan]:
    """Return what `working_plans` is to find, by checking every plan."""
    working = []
    for changes in wish.all_changes(model, context):
        plan = wish.plan(model, context, changes)
        if fits_here(plan) and is_resident(plan):
            return [plan]
        working += [plan] * fits_here(plan)
    return working


@pytest.mark.slow
def test_search_leaves_out_no_plan_that_works() -> None:
    """The search skips sizes that cannot fit, and names no options to change."""
    cases = [("qwen3-30b-a3b", "RTX 4090", 24, "int8"), ("qwen3-8b", "RTX 3060 12GB", 8, None)]
    if RUNS_ALL:
        for name in ("qwen3-30b-a3b", "qwen3.5-35b-a3b", "qwen3.5-27b"):
            cases += [(name, gpu, host, "int4") for gpu in ("RTX 3060 12GB", "RTX 4090") for host in (16, 64)]
    sizes = set()
    for name, gpu, host_gib, format in cases:
        model = config_without_weights(name).quantized(format)
        wish = _Wish(config=Config(model=name), given=(), machine=machine(gpu, host_gib))
        found = wish.working_plans(model, 32_768)
        assert [plan.config for plan in found] == [plan.config for plan in plans_that_pass(wish, model, 32_768)]
        sizes.add(len(found))
    assert min(sizes) == 0 < max(sizes)


def test_each_fit_has_the_checkpoints_format_first() -> None:
    """`nanovllm list` asks for no other format if the first one runs."""
    found = each_fit(machine("RTX 4090", host_gib=64), ["qwen3-30b-a3b"], context=32_768)
    first = next(found)
    assert first.format == "bfloat16" and first.where == "experts"
