"""vLLM's names: taken where they mean the same or change nothing, otherwise refused with what to use instead."""

import copy
import inspect
import pickle
import pydoc
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from nanovllm.compat import ENGINE, METHODS, SAMPLING, STRUCTURED, Names
from nanovllm.config import Config, EngineOptions
from nanovllm.engine.setup import prepare
from nanovllm.errors import ConfigError, RequestError

OPTIONS: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_model_len": 512}


def config_of(**options: Any) -> Config:
    return prepare("qwen3-0.6b", OPTIONS | options).config


def test_engine_takes_names_that_mean_the_same() -> None:
    plain = config_of()
    for options, ours in (
        ({"enable_chunked_prefill": False}, {"chunked_prefill": False}),
        ({"enable_chunked_prefill": None, "enable_prefix_caching": None, "seed": None}, {}),
        ({"block_size": 512}, {"kvcache_block_size": 512}),
        ({"num_gpu_blocks_override": 7}, {"num_kvcache_blocks": 7}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"generation_config": "vllm"}, {"generation_config": "none"}),
        ({"attention_backend": "TORCH_SDPA"}, {"attn_backend": "torch"}),
    ):
        assert config_of(**options) == replace(plain, **ours), options


def test_engine_ignores_names_whose_value_changes_nothing() -> None:
    plain = config_of()
    ignored = dict.fromkeys(ENGINE.ignored, "any value")
    ignored |= dict.fromkeys(ENGINE.refused)
    assert config_of(**ignored | {"tokenizer": "qwen3-0.6b"}) == plain
    for name, refused in ENGINE.refused.items():
        for value in refused.harmless:
            assert config_of(**{name: value}) == plain, name


def test_engine_refuses_other_names_with_what_to_use_instead() -> None:
    for options, message in (
        ({"tokenizer": "other"}, "LLM does not take tokenizer='other': the tokenizer comes with the model"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: use tensor_parallel_size"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': the KV cache has the type of the weights"),
        ({"task": "embed"}, "task='embed': the models here read and write text"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling={'factor': 2}: use hf_overrides"),
        ({"revision": "abc"}, r"revision='abc': download that snapshot"),
        ({"enable_lora": True}, "enable_lora=True: merge the adapter"),
        ({"cpu_offload_gb": 10}, "cpu_offload_gb=10: use enable_cpu_offload=True"),
        ({"hf_overrides": {"max_model_len": 9}}, "names 'max_model_len', which is an option of the engine; give max"),
        ({"profiler_config": {"profiler": "torch"}}, "use torch.profiler"),
        ({"block_size": 16}, "kvcache_block_size=16 must be a multiple of 256"),
        ({"block_size": 256, "kvcache_block_size": 256}, "LLM got kvcache_block_size and block_size, which mean the"),
        ({"max_modle_len": 5}, r"LLM has no option max_modle_len; did you mean max_model_len\?"),
        ({"wholly_unlike": 5}, "LLM has no option wholly_unlike; it has attn_backend, "),
        ({"quantization": "awq"}, "for checkpoints with quant_method='awq', and this one has none; leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of(**options)


def test_parameters_take_refuse_and_ignore_names() -> None:
    digits = StructuredOutputs(regex="[0-9]+", backend="xgrammar", whitespace_pattern=None)
    assert digits == StructuredOutputs(regex="[0-9]+")
    same = SamplingParams(guided_decoding=digits, best_of=1, use_beam_search=False, extra_args={})
    assert same == SamplingParams(structured_outputs=digits)
    for make, message in (
        (lambda: SamplingParams(best_of=4), "SamplingParams does not take best_of=4: use n and choose by cumulative"),
        (lambda: SamplingParams(best_of=True), "does not take best_of=True"),
        (lambda: SamplingParams(logits_processors=[print]), "use logit_bias, bad_words or structured_outputs"),
        (lambda: SamplingParams(tempreature=1), "no option tempreature; did you mean temperature"),
        (lambda: StructuredOutputs(grammar="root ::= x"), "StructuredOutputs does not take grammar=.*: use regex"),
    ):
        with pytest.raises(RequestError, match=message):
            make()
    with pytest.raises(FrozenInstanceError, match=r"use dataclasses.replace\(..., max_tokens=...\)"):
        same.max_tokens = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match=r"use dataclasses.replace\(..., max_tokens=...\)"):
        same.clone().max_tokens = 5  # type: ignore[misc]
    assert same.clone() == same and replace(same.clone(), max_tokens=5).max_tokens == 5
    assert pickle.loads(pickle.dumps(same)) == copy.copy(same) == replace(same, n=1) == same


@pytest.mark.parametrize(
    ("names", "kind"), [(ENGINE, Config), (SAMPLING, SamplingParams), (STRUCTURED, StructuredOutputs)]
)
def test_tables_do_not_contradict_our_own_names(names: Names, kind: type) -> None:
    ours = {each.name for each in fields(kind)}
    foreign = [*names.same, *names.ignored, *names.refused]
    assert len(set(foreign)) == len(foreign) and not ours & set(foreign)
    assert set(names.same.values()) | set(names.values) <= ours


def test_methods_and_imports_of_vllm_are_refused_by_name(model: Path) -> None:
    with LLM(model, device="cpu", num_kvcache_blocks=4) as llm:
        for name, instead in METHODS.items():
            assert not hasattr(llm, name)
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'") as raised:
                getattr(llm, name)
            assert str(raised.value).endswith(instead)
        with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'nothing'$"):
            llm.nothing  # noqa: B018
    with pytest.raises(ImportError, match="nanovllm has no AsyncLLMEngine; use AsyncLLM"):
        from nanovllm import AsyncLLMEngine  # type: ignore[attr-defined]  # noqa: F401


def test_help_shows_every_option_with_its_type_and_meaning_and_nothing_else() -> None:
    for kind, options in ((LLM, Config), (AsyncLLM, Config), (Config, Config), (SamplingParams, SamplingParams)):
        text = pydoc.render_doc(kind, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
        assert "nternals" not in text
        parameters = inspect.signature(kind).parameters
        assert list(parameters) == [each.name for each in fields(options)]
        for each in fields(options):
            assert parameters[each.name].annotation in (each.type, "str | Path", str | Path), each.name
            assert f" {each.name}: {inspect.formatannotation(each.type)}" in text, each.name
            assert " ".join(each.metadata["help"].split()) in " ".join(text.replace(" |  ", " ").split()), each.name


def test_editors_know_the_options_of_config() -> None:
    hints = get_type_hints(EngineOptions)
    assert hints == {each.name: each.type for each in fields(Config) if each.name != "model"}
