"""Models with recurrent layers: the logits of transformers however a sequence is cut, and guesses without a trace."""

import shutil
from pathlib import Path

import pytest
import torch
from dense_model import DenseAttention, load_model, random_prompt, run_logits, state_rows
from model_files import edit_json
from quantized_models import write_quantized
from rounded_weights import round_weights
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiers import RUNS_ALL, tiered
from tiny_models import HYBRIDS, RECURRENT, ROPES, reference_model, write_tiny_model

from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.checkpoint.read_config import load_config
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kernels.state_tensors import StateSave
from nanovllm.models.decoder import CausalLM

PROMPT = random_prompt(150)
TOLERANCE = 1e-4


def expected_logits(directory: Path, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference_model(directory)(torch.tensor([prompt])).logits[0]
    return logits


@pytest.mark.parametrize("architecture", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_logits_in_pieces_of_any_size_match_transformers(tmp_path: Path, architecture: str) -> None:
    """Pieces are summed in another order. In transformers this changes the logits by up to 1e-4 as well."""
    prompt = PROMPT if RUNS_ALL else PROMPT[:70]
    write_tiny_model(tmp_path, architecture, num_layers=4, max_position_embeddings=256)
    expected, model = expected_logits(tmp_path, prompt), load_model(tmp_path, max_model_len=256)
    reference = reference_model(tmp_path)
    for chunk in (1000, 64, 37, 2, 1):
        cache, pieces = None, []
        for start in range(0, len(prompt), chunk):
            with torch.no_grad():
                out = reference(torch.tensor([prompt[start : start + chunk]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits[0])
        theirs = (torch.cat(pieces) - expected).abs().max()
        assert (run_logits(model, prompt, chunk) - expected).abs().max() < TOLERANCE + theirs, chunk


@pytest.mark.parametrize("rope", ROPES)
def test_logits_every_rope_past_its_original_length_match_transformers(tmp_path: Path, rope: str) -> None:
    """The rope turns a quarter of a head: the other elements have no angle, and are not scaled either."""
    write_tiny_model(tmp_path, "qwen3_5", rope=rope, head_dim=32)
    model = load_model(tmp_path, max_model_len=256)
    assert (run_logits(model, PROMPT) - expected_logits(tmp_path, PROMPT)).abs().max() < TOLERANCE


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_nested_text_part_is_loaded_and_the_vision_tower_is_not(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture, with_vision=True, tied=True, bias=True)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("model.language_model.layers.") for name in names)
    prompt = PROMPT[:40]
    assert (run_logits(load_model(tmp_path), prompt) - expected_logits(tmp_path, prompt)).abs().max() < TOLERANCE


def test_experts_in_one_tensor_are_read_like_single_ones(tmp_path: Path) -> None:
    """Published checkpoints have all experts of a layer in two tensors; transformers writes them one by one."""
    write_tiny_model(tmp_path, "qwen3_5_moe")
    expected, file = run_logits(load_model(tmp_path), PROMPT[:30]), tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        parent = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{parent}.{expert}.{kind}_proj.weight") for expert in range(8)])
            for kind in ("gate", "up", "down")
        )
        tensors |= {f"{parent}.gate_up_proj": torch.cat((gate, up), 1), f"{parent}.down_proj": down}
    save_file(tensors, file)
    assert torch.equal(run_logits(load_model(tmp_path), PROMPT[:30]), expected)
    for logits in run_ranks(2, lambda tp: run_logits(load_model(tmp_path, tp), PROMPT[:30])):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    tensors["model.layers.0.mlp.experts.more_proj"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"unknown to the model: model\.layers\.0\.mlp\.experts\.more_proj"):
        load_model(tmp_path)
    del tensors["model.layers.0.mlp.experts.more_proj"]
    for num_rows in (1, 63):  # Regression: rows that are no gates and as many others were an internal error
        name = "model.layers.1.mlp.experts.gate_up_proj"
        save_file(tensors | {name: tensors[name][:, :num_rows].contiguous()}, file)
        with pytest.raises(CheckpointError, match=r"misses weights: model\.layers\.1\.mlp\.experts\.0\.gate_proj"):
            load_model(tmp_path)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture, bias=True)
    expected = run_logits(load_model(tmp_path), PROMPT[:70])
    for logits in run_ranks(2, lambda tp: run_logits(load_model(tmp_path, tp), PROMPT[:70], chunk=33)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    write_tiny_model(tmp_path, architecture, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads=2 is not divisible by tensor_parallel_size=4"):
        run_ranks(4, lambda tp: load_model(tmp_path, tp))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_random_weights_are_the_same_for_any_number_of_ranks(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture)
    expected = run_logits(load_model(tmp_path, load_format="dummy"), PROMPT[:40])
    assert expected.isfinite().all() and expected.std() > 0.1
    for logits in run_ranks(2, lambda tp: run_logits(load_model(tmp_path, tp, load_format="dummy"), PROMPT[:40])):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("qwen3_5", name) for name in ("fp8 small blocks", "awq", "packed 4 zeros", "gptq 8 order")),
        ("qwen3_5_moe", "awq"),
        *(pytest.param("qwen3_5_moe", name, marks=pytest.mark.slow) for name in ("fp8 small blocks", "gptq 8 order")),
    ],
)
def test_quantized_checkpoints_have_the_logits_of_their_values(tmp_path: Path, architecture: str, name: str) -> None:
    """Parts of a layer, such as the rows of one head that are rotated, are cut out of packed words and blocks."""
    plain = write_tiny_model(tmp_path / "plain", architecture, with_vision=True, head_dim=32)
    quantized, values = write_quantized(plain, tmp_path, name)
    prompt = PROMPT[:40]
    logits, expected = run_logits(load_model(quantized), prompt), run_logits(load_model(values), prompt)
    assert torch.equal(logits, expected) and not torch.equal(expected, run_logits(load_model(plain), prompt))
    assert (expected - expected_logits(values, prompt)).abs().max() < TOLERANCE
    for of_rank in run_ranks(2, lambda tp: run_logits(load_model(quantized, tp), prompt)):
        torch.testing.assert_close(of_rank, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", tiered(QUANTIZATIONS, ("int4", "int8", "fp8_dynamic")))
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_all_but_the_gates_of_states_are_quantized_while_loading(tmp_path: Path, architecture: str, name: str) -> None:
    """Columns that are not whole blocks on each rank stay as they are."""
    plain = write_tiny_model(tmp_path / "plain", architecture, head_dim=32)
    values, prompt = shutil.copytree(plain, tmp_path / "values"), PROMPT[:40]
    tensors, expected = load_file(plain / "model.safetensors"), []
    stored, _ = load_config(str(plain))
    for num_ranks in (1, 2):
        rounded = round_weights(tensors, stored.quantized(name, None, num_ranks))
        save_file(rounded, values / "model.safetensors")
        expected.append(run_logits(load_model(values), prompt))
        if num_ranks == 1:
            assert {key for key in tensors if rounded[key] is not tensors[key]} == {
                key
                for key in tensors
                if "_proj" in key
                and "in_proj_a" not in key
                and "in_proj_b" not in key
                and (name.startswith("fp8") or tensors[key].shape[1] % 64 == 0)
            }
    assert torch.equal(run_logits(load_model(plain, quantization=name), prompt), expected[0])
    for of_rank in run_ranks(2, lambda tp: run_logits(load_model(plain, tp, quantization=name), prompt)):
        torch.testing.assert_close(of_rank, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_kernels_have_the_logits_of_transformers(tmp_path: Path, architecture: str) -> None:
    """In fp32, and in bf16 with at most twice the error of transformers; heads as large as in published models."""
    sizes = {name: 128 if name.endswith("dim") else number for name, number in RECURRENT.items()}
    options = {"num_layers": 4, "hidden_size": 256, "head_dim": 256, "max_position_embeddings": 512}
    write_tiny_model(tmp_path, architecture, recurrent=sizes, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
    prompt = random_prompt(300)
    reference = reference_model(tmp_path)
    with torch.no_grad():
        exact = reference(torch.tensor([prompt])).logits[0].cuda()
        plain = reference.bfloat16()(torch.tensor([prompt])).logits[0].cuda()
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 2 * (plain - exact).abs().mean())):
        model = load_model(tmp_path, max_model_len=512, dtype=dtype, device="cuda")
        for chunk in (1000, 100, 1):
            with torch.device("cuda"), torch.no_grad():
                ours = run_logits(model, prompt, chunk)
            assert (ours - exact).abs().mean() <= most, (dtype, chunk)


# -- states ------------------------------------------------------------------------------------------------------------


def run(model: CausalLM, attn: DenseAttention, tokens: list[int], start: int) -> torch.Tensor:
    attn.positions = torch.arange(start, start + len(tokens))
    return model.compute_logits(model(torch.tensor(tokens), attn.positions, attn))


def test_wrong_guesses_leave_no_trace_and_right_ones_are_replayed(tmp_path: Path) -> None:
    """Every step verifies up to 5 guesses, of which any number is right. Odd steps put the state into another slot."""
    model = load_model(write_tiny_model(tmp_path, "qwen3_5", num_layers=4))
    expected, attn = run_logits(model, PROMPT), DenseAttention(model, len(PROMPT))
    run(model, attn, PROMPT[:10], 0)
    position, num_right, slot, step = 10, 0, 1, 0
    while position + 6 < len(PROMPT):
        num_guesses = step % 6
        guesses = PROMPT[position + 1 : position + 1 + num_guesses]
        right = step * 7 % (num_guesses + 1)
        wrong = [(token + 1) % 320 for token in guesses[right:]]
        source, slot = slot, (2 if slot == 1 else 1) if step % 2 else slot
        attn.rows = state_rows([1 + num_guesses], [source], [slot], [num_right], [num_guesses])
        logits = run(model, attn, [PROMPT[position], *guesses[:right], *wrong], position)[: 1 + right]
        assert (logits - expected[position : position + 1 + right]).abs().max() < TOLERANCE, step
        position, num_right, step = position + 1 + right, right, step + 1
    assert step > 30


def test_a_draft_in_another_slot_leaves_the_state_and_what_is_pending(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path, "qwen3_5"))
    expected, attn = run_logits(model, PROMPT[:30]), DenseAttention(model, 40)
    run(model, attn, PROMPT[:20], 0)
    attn.rows = state_rows([4], [1], [1], [0], [3])
    run(model, attn, PROMPT[20:24], 20)
    for replayed, tokens in ((3, PROMPT[24:25]), (0, [5])):
        attn.rows = state_rows([1], [1 if replayed else 3], [3], [replayed], [0])
        run(model, attn, tokens, 24)
    attn.rows = state_rows([6], [1], [1], [3], [0])
    assert (run(model, attn, PROMPT[24:30], 24) - expected[24:]).abs().max() < TOLERANCE


def test_states_are_saved_within_a_row(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path, "qwen3_5"))
    expected, attn = run_logits(model, PROMPT), DenseAttention(model, len(PROMPT))
    attn.rows = state_rows([140], [-1], [1], [0], [0], [StateSave(0, 1, 2), StateSave(0, 100, 3)])
    run(model, attn, PROMPT[:140], 0)
    for slot, position in ((2, 1), (3, 100), (1, 140)):
        attn.rows = state_rows([len(PROMPT) - position], [slot], [0], [0], [0])
        assert (run(model, attn, PROMPT[position:], position) - expected[position:]).abs().max() < TOLERANCE, position


def test_rows_of_several_sequences_keep_apart(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path, "qwen3_5"))
    layer, config = model.model.layers[0].linear_attn, model.config
    assert layer is not None
    attn, hidden = DenseAttention(model, 1), torch.randn(90, config.hidden_size)
    attn.rows = state_rows([70, 0, 20], [-1, 2, 3], [1, 2, 3], [0, 0, 2], [0, 0, 4])
    before = [tensor.clone() for tensor in (attn.conv, attn.matrix, attn.pending)]
    out = layer(hidden, hidden, attn, None)
    together = [tensor.clone() for tensor in (attn.conv, attn.matrix, attn.pending)]
    for row, tokens in ((0, slice(0, 70)), (1, slice(70, 70)), (2, slice(70, 90))):
        for tensor, old in zip((attn.conv, attn.matrix, attn.pending), before, strict=True):
            tensor.copy_(old)
        host = attn.rows.host
        attn.rows = state_rows(*([each[row]] for each in host[:5]))
        torch.testing.assert_close(layer(hidden[tokens], hidden, attn, None), out[tokens])
        for tensor, all_rows in zip((attn.conv, attn.matrix, attn.pending), together, strict=True):
            torch.testing.assert_close(tensor[row + 1, 0], all_rows[row + 1, 0])
        attn.rows = state_rows(*host[:5])
    assert torch.equal(attn.conv[2], before[0][2]) and torch.equal(attn.matrix[2], before[1][2])


def test_only_the_first_layer_of_each_kind_runs_when_inner_layers_are_skipped(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path, "qwen3_5", num_layers=8))

    class Noting(DenseAttention):
        def __init__(self) -> None:
            super().__init__(model, 3)
            self.heard: list[tuple[str, int, int]] = []

        def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
            self.heard.append(("attend", layer, len(q_THD)))
            return super().attend(layer, q_THD) if len(q_THD) else q_THD

        def layer_memory(self, layer: int):  # type: ignore[no-untyped-def]
            self.heard.append(("states", layer, 0))
            return super().layer_memory(layer)

    attn = Noting()
    with model.skipping_inner_layers():
        run(model, attn, [1, 2, 3], 0)
    assert attn.heard == [("states", 0, 0), ("attend", 0, 3), ("attend", 1, 3)]


def test_weights_of_another_shape_or_name_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_5")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.linear_attn.conv1d.weight"
    save_file({**tensors, name: tensors[name][:, 0].contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"conv1d\.weight in .* has shape \[128, 4\], .* asks for \[128, 1, 4\]"):
        load_model(tmp_path)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(1), "model.visual.merger.weight": torch.zeros(1)}, file)
    load_model(tmp_path)
    save_file({**tensors, "model.layers.0.linear_attn.in_proj_x.weight": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"unknown to the model: model\.layers\.0\.linear_attn\.in_proj_x"):
        load_model(tmp_path)
    save_file(tensors, file)
    edit_json(tmp_path / "config.json", linear_num_value_heads=2)
    with pytest.raises(CheckpointError, match=r"conv1d\.weight in .* \[128, 1, 4\], .* asks for \[96, 1, 4\]"):
        load_model(tmp_path)
