"""Options that are chosen by estimates let an engine start on a GPU, and give it what they promise."""

import pytest

from nanovllm import LLM, ConfigError, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("gib", [3.2, 4.5, 6.0, 9.0])
def test_chosen_options_start_an_engine_in_little_memory(gib: float) -> None:
    """gpu_memory_utilization stands for a smaller GPU: it is given, so it stays."""
    import torch

    share = gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
    with LLM("qwen3-0.6b", load_format="dummy", fit=True, gpu_memory_utilization=share) as llm:
        assert llm.config.gpu_memory_utilization == share
        assert llm.config.enable_cpu_offload == (gib < 8)
        assert llm.max_request_tokens == llm.max_model_len
        prompt = [number % 1000 for number in range(llm.max_request_tokens - 40)]
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False
        )
        assert len(output["token_ids"]) == 32


def test_defaults_are_chosen_where_everything_fits() -> None:
    with LLM("qwen3-0.6b", load_format="dummy", fit=True) as llm:
        assert not llm.config.enable_cpu_offload and llm.config.max_num_seqs == 512
        assert llm.config.quantization is None


def test_refusal_of_weights_that_do_not_fit_names_fit() -> None:
    import torch

    share = 6 * 2**30 / torch.cuda.get_device_properties(0).total_memory
    options = {"load_format": "dummy", "gpu_memory_utilization": share}
    with pytest.raises(ConfigError, match="or use fit=True, which chooses quantization=int"):
        LLM("qwen3-4b", **options)
    with pytest.raises(ConfigError) as refused:
        LLM("qwen3-4b", **options, fit=False)
    assert "fit=True" not in str(refused.value)
