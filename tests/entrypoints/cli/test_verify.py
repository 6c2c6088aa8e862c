"""`nanovllm verify`: that sound paths agree, and that a block which is lost does not go unnoticed."""

import json
import re
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.engine.setup import Internals
from nanovllm.entrypoints.cli.main import main
from nanovllm.entrypoints.cli.verify import (
    ANSWER_TOKENS,
    PATHS,
    VerifyOptions,
    _num_prompt_tokens,
    ask,
    compare,
    make_prompts,
    run_verify,
)
from nanovllm.errors import ConfigError
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import ImmediateStreams
from nanovllm.outputs import Logprob, RequestOutput
from nanovllm.plan.kv_spec import KVCacheSpec

pytestmark = pytest.mark.usefixtures("cache_directory")
SMALL = ["--num-tokens", "2048", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096))


class LosesABlock(OffloadEngine):
    """Zeroes one block in CPU memory after each step."""

    def end_step(self) -> None:
        super().end_step()
        self.v_cache_cpu[:, 2] = 0


def losing_engine(spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> OffloadEngine:
    return LosesABlock(spec, num_blocks, dtype, device, ImmediateStreams())


def report_of(text: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_sound_paths_agree(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "demo", "--dtype", dtype, *SMALL]) == 0
    out = capsys.readouterr().out
    report = report_of(out)
    assert [path["path"] for path in report["paths"]] == ["all resident", "other chunks", *PATHS]
    assert report["agrees"] and all(path["agrees"] for path in report["paths"][1:])
    assert all(path["num_work"] > 0 for path in report["paths"][2:])
    assert ("Verified within 0.062" in out and "--dtype float32" in out) == (dtype == "bfloat16")
    assert ("takes the same tokens as the path with all KV" in out) == (dtype == "float32")
    assert report["bound_logprob"] == 0.002 if dtype == "float32" else 0.01 < report["bound_logprob"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_a_lost_block_is_found(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only one of the answers reads the block, whose loss changed log-probabilities by 0.12, but no token: verify had
    looked at nothing but tokens in fp32.
    """
    internals = Internals(make_offload_engine=losing_engine)
    engine = {"device": "cpu", "dtype": dtype}
    assert run_verify("demo", VerifyOptions(num_tokens=2048), engine, internals) == 1
    out = capsys.readouterr().out
    agree = [path["agrees"] for path in report_of(out)["paths"][1:]]
    assert agree == [True, False, False, False, False]
    assert "DIFFERS" in out and "NOT verified" in out


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_on_a_gpu_agrees_and_reports_rates_beside_bounds(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "demo", "--dtype", dtype, "--device", "cuda"]) == 0
    for path in report_of(capsys.readouterr().out)["paths"][2:]:
        assert path["num_work"] > 0 and path["link_byte_per_s"] > 1e9
        if "guesses" in path["path"] or "shadow" in path["path"]:
            assert path["decode_bound_tok_per_s"] is None
        else:
            assert path["decode_tok_per_s"] < path["decode_bound_tok_per_s"]


def test_compare_goes_on_after_a_tie_and_after_another_token(tiny: str) -> None:
    with LLM(tiny, device="cpu", max_model_len=2200, num_kvcache_blocks=30) as llm:
        prompts = make_prompts(llm, 2048)[:2]
        reference = ask(llm, prompts)
        assert [len(prompt) for prompt in prompts] == [2048] * 2
        same = compare(llm, prompts, reference, ask(llm, prompts, salt="x", filler=[1, 2, 3]))
        assert (same.num_different, same.num_ties) == (0, 0) and same.rms < 1e-5
        for gap, counts in ((0.001, (0, 1)), (0.5, (1, 0))):
            answer: RequestOutput = reference[0].copy()
            answer["token_ids"] = [*answer["token_ids"]]
            expected, other = answer["token_ids"][3], 5
            answer["token_ids"][3] = other
            at_3 = reference[0]["logprobs"][3]
            at_3[other] = Logprob(at_3[expected].logprob - gap, 2, None)
            found = compare(llm, prompts, reference, [answer, reference[1]])
            assert (found.num_different, found.num_ties) == counts and found.rms < 1e-5
        assert len(reference[1]["token_ids"]) == ANSWER_TOKENS


def test_verify_takes_what_the_model_allows_if_that_is_less_than_its_default() -> None:
    """Regression: for a model of 8,192 tokens it refused its own default."""
    for limit, num_tokens in ((8192, 8192 - ANSWER_TOKENS), (4096, 4096 - ANSWER_TOKENS), (9000, 8192), (10**6, 8192)):
        assert _num_prompt_tokens(None, limit) == num_tokens
    with pytest.raises(ConfigError, match=r"takes 2079 tokens, and this check needs 2048 and 32 new tokens"):
        _num_prompt_tokens(None, 2079)


@pytest.mark.slow
def test_verify_of_a_short_model_runs_and_says_how_long_it_takes(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", tiny, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "to prompts of 4,064" in out and re.search(r"the others take about [\d.,]+ s\n", out)


def test_verify_bad_input_exits_2(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    for flags, message in (
        (["--num-tokens", "2047"], "--num-tokens=2047 must be 2048 or more"),
        (["--num-tokens", "8192"], "are more than the model's limit of 4096; lower --num-tokens to 4064"),
        (["--device", "tpu"], "--device='tpu' is unknown"),
    ):
        assert main(["verify", "--model", tiny, *flags]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):  # the check chooses this itself
        main(["verify", "--model", tiny, "--num-gpu-blocks", "3"])
