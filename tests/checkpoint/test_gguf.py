"""GGUF files: what is read from them, where they are found, and that nothing in a damaged file does harm."""

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_gguf
from tiny_models import ROPES, write_tiny_model

from nanovllm.checkpoint.files import check_tokenizer, find_model
from nanovllm.checkpoint.gguf import join, read_model, split_paths
from nanovllm.checkpoint.gguf_config import settings, weights
from nanovllm.checkpoint.gguf_files import find_gguf
from nanovllm.checkpoint.read_config import config_without_weights, load_config
from nanovllm.checkpoint.settings import read_sampling_defaults
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.text.gguf_tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def valid(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with a vocabulary."""

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])

    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", directory, metadata=vocabulary).read_bytes()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "x.gguf"
        path.unlink(missing_ok=True)  # a new file, so that nothing is taken from the cache of headers
        path.write_bytes(content)
        return path

    return write


# -- what a file says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_config_is_that_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    with_mtp = architecture.startswith("qwen3_5")
    directory = write_tiny_model(tmp_path / "model", architecture, num_layers=4, with_mtp=with_mtp)
    expected, _ = load_config(str(directory))
    found, path = load_config(str(write_gguf(tmp_path / "x.gguf", directory)))
    assert found == expected and path == tmp_path / "x.gguf" and found.has_mtp == with_mtp


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


YARN_WITH_FACTOR = ROPES["yarn"] | {"attention_factor": 1.5}


@pytest.mark.parametrize("rope", [ROPES["linear"], ROPES["yarn"], YARN_WITH_FACTOR, LLAMA3])
def test_rope_is_that_of_the_checkpoint(rope: dict[str, Any], tmp_path: Path) -> None:
    """Bug: yarn_attn_factor, in which converters store attention_factor, was ignored."""
    directory = write_tiny_model(tmp_path / "model", "llama", rope=rope, head_dim=128)
    expected, _ = load_config(str(directory))
    found, _ = load_config(str(write_gguf(tmp_path / "x.gguf", directory)))
    assert found.rope == expected.rope


def test_rope_with_other_factors_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "llama", rope="llama3")  # original_max_position_embeddings=32
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight\) that are not Llama 3's"):
        load_config(str(write_gguf(tmp_path / "x.gguf", directory)))


def test_end_tokens_are_named_and_known_ones(directory: Path, tmp_path: Path) -> None:
    """Files name one end token; Qwen's models have two, and Llama 3's three."""

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["<|end|>", "<|endoftext|>", "<|im_end|>", "a", "<|eot_id|>"])
        writer.add_token_types([1, 3, 3, 1, 4])  # <|end|> is part of texts here
        writer.add_eot_token_id(3)

    config, _ = load_config(str(write_gguf(tmp_path / "x.gguf", directory, metadata=vocabulary)))
    assert config.eos_token_ids == (319, 3, 1, 2, 4)


def test_quantization_config_for_a_file_is_refused(directory: Path, tmp_path: Path) -> None:
    """Bug: the tensors were read by their own types, but plans counted the format of hf_overrides."""
    path = str(write_gguf(tmp_path / "x.gguf", directory, types=["Q8_0"]))
    for read in (load_config, config_without_weights):
        with pytest.raises(ConfigError, match=r"hf_overrides has quantization_config, but .*x.gguf has the type"):
            read(path, {"quantization_config": {"quant_method": "fp8"}})


def test_sampling_defaults_are_read(directory: Path, tmp_path: Path) -> None:
    def sampling(writer: gguf.GGUFWriter) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)

    path = write_gguf(tmp_path / "x.gguf", directory, metadata=sampling)
    assert read_sampling_defaults(path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path = write_gguf(tmp_path / "y.gguf", directory, metadata=lambda writer: writer.add_sampling_temp(-1.0))
    with pytest.raises(CheckpointError, match=r"temperature=-1.0.*y.gguf.*generation_config='none'"):
        read_sampling_defaults(path)


def test_types_in_16_bits_are_the_dtype(directory: Path, tmp_path: Path) -> None:
    for types, dtype in ((["F16"], "float16"), (["BF16"], "bfloat16"), (["F32"], "float32"), (["Q8_0"], "bfloat16")):
        config, _ = load_config(str(write_gguf(tmp_path / f"{dtype}-{types[0]}.gguf", directory, types=types)))
        assert config.torch_dtype == dtype and config.gguf_types == tuple(t for t in types if t == "Q8_0")
    with pytest.raises(ConfigError, match=r"quantization='int4' is for checkpoints that are not quantized.*Q8_0"):
        config.quantized("int4")


REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (
        lambda writer: writer.add_attn_logit_softcapping(50.0),
        "llama.attn_logit_softcapping=50.0, which is not supported",
    ),
    (lambda writer: writer.add_expert_count(8), "llama.expert_count=8, which is not supported"),
    (lambda writer: writer.add_sliding_window(64), "sliding_window=64 is not supported"),
    (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type='longrope'"),
    (lambda writer: writer.add_rope_scaling_yarn_ext_factor(0.5), "rope.scaling.yarn_ext_factor=0.5, which is not"),
    (lambda writer: writer.add_rope_scaling_attn_factors(1.2), "rope.scaling.attn_factor=1.2, which is not"),
    (lambda writer: writer.add_string("general.alignment", "x"), "general.alignment='x' is not a power of two"),
]


@pytest.mark.parametrize(("entry", "message"), REFUSED)
def test_what_is_not_supported_is_refused(
    entry: Callable[[Any], None], message: str, directory: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "x.gguf", directory, metadata=entry)
    with pytest.raises(CheckpointError, match=message):
        load_config(str(path))


# -- damaged files ---------------------------------------------------------------------------------------------------


def test_other_files_and_versions_are_refused(valid: bytes, write: Callable[[bytes], Path]) -> None:
    cases = {
        b"": "is not a GGUF file: it begins with b''",
        b"PK\x03\x04" + valid[4:]: "is not a GGUF file: it begins with b'PK",
        valid[:4] + struct.pack("<I", 1) + valid[8:]: "of version 1, and little-endian version 3 is supported",
        valid[:4] + struct.pack("<I", 2) + valid[8:]: "of version 2",
        valid[:4] + struct.pack(">I", 3) + valid[8:]: "of big-endian version 3",
    }
    for content, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            read_model(write(content))


def test_sizes_beyond_the_file_are_refused_before_anything_is_allocated(
    valid: bytes, write: Callable[[bytes], Path]
) -> None:
    key = valid.index(b"general.architecture") + len(b"general.architecture")
    tokens = valid.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    tensor = valid.index(b"token_embd.weight") + len(b"token_embd.weight")
    huge = struct.pack("<Q", 2**60)
    cases = [
        (8, huge, r"its header has 1152921504606846976 tensors"),
        (16, huge, r"1152921504606846976 metadata entries"),
        (8, b"\xff" * 8, r"its header has -1 tensors"),
        (key + 4, huge, r"values up to byte 11529"),  # the length of a text
        (tokens, huge, r"its header has 1152921504606846976 texts in the array tokenizer.ggml.tokens"),
        (tensor + 4, huge, r"token_embd.weight has the shape \[320, 1152921504606846976\]"),
        (tensor + 4, struct.pack("<Q", 0), r"token_embd.weight has the shape \[320, 0\]"),
        (tensor, struct.pack("<I", 5), r"token_embd.weight has 5 dimensions"),
        (tensor + 20, struct.pack("<I", 10), r"token_embd.weight in .* has the type Q2_K, .* Q4_K, Q5_K"),
        (tensor + 20, struct.pack("<I", 999), r"has the type 999"),
        (tensor + 24, huge, r"is truncated: token_embd.weight ends at byte 11529"),
        (tensor + 24, struct.pack("<Q", 1), r"token_embd.weight begins at 1, which is not a multiple of 32"),
        (key, struct.pack("<I", 77), r"'general.architecture' has the unknown type 77"),
        (tokens - 4, struct.pack("<I", 9), r"'tokenizer.ggml.tokens' is an array of the unsupported type 9"),
        (key + 12, b"\xff\xfe", r"is not UTF-8"),
    ]
    for place, value, message in cases:
        with pytest.raises(CheckpointError, match=message):
            read_model(write(valid[:place] + value + valid[place + len(value) :]))


def test_names_that_occur_twice_are_refused(valid: bytes, write: Callable[[bytes], Path]) -> None:
    for name, other, message in (
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", "the tensor 'blk.0.attn_q.weight' occurs twice"),
        (b"tokenizer.ggml.model", b"general.architecture", "metadata entry 'general.architecture' occurs twice"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_model(write(valid.replace(name, other)))


def test_truncated_file_is_refused_at_any_length(valid: bytes, write: Callable[[bytes], Path]) -> None:
    header = valid.index(b"token_embd.weight") + 3000
    for size in [*range(0, header, 97), len(valid) // 2, len(valid) - 1]:
        with pytest.raises(CheckpointError, match=r"truncated|is not a GGUF file"):
            read_model(write(valid[:size]))


@pytest.mark.parametrize("seed", range(4))
def test_damage_at_random_is_refused_or_harmless(seed: int, valid: bytes, write: Callable[[bytes], Path]) -> None:
    rng, size = random.Random(seed), valid.index(b"blk.1.")
    for _ in range(100):
        content = bytearray(valid)
        for _ in range(rng.choice([1, 1, 2, 8])):
            content[rng.randrange(size)] = rng.choice([0, 1, 2, 8, 9, 127, 255, rng.randrange(256)])
        path = write(bytes(content))
        try:
            load_config(str(path))
            model = read_model(path)
            assert dict(weights(model))
            make_tokenizer(model)
        except CheckpointError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize("name", ["block_count", "ssm.time_step_rank", "ssm.inner_size"])
def test_numbers_beyond_the_tensors_are_refused_before_anything_is_allocated(name: str, tmp_path: Path) -> None:
    """Bug: lists and arrays of these lengths took minutes and all memory."""
    file = read_model(write_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "model", "qwen3_5")))
    damaged = file._replace(metadata={**file.metadata, f"qwen35.{name}": 2**31})
    with pytest.raises(CheckpointError, match=rf"x.gguf has qwen35.*{name}"):
        settings(damaged)
        list(weights(damaged))


# -- where files are found -------------------------------------------------------------------------------------------


def test_split_model_is_found_by_any_of_its_files(directory: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", directory, num_files=3)
    assert first.name == "m-00001-of-00003.gguf"
    (tmp_path / "other").mkdir()
    whole = read_model(write_gguf(tmp_path / "other" / "whole.gguf", directory)).tensors
    for path in split_paths(first):
        assert find_model(str(path)) == (first, first)
        assert read_model(path).tensors.keys() == whole.keys()
    assert find_model(str(tmp_path)) == (first, first), "the only model in the directory"
    shutil.copy(first.with_name("m-00002-of-00003.gguf"), first.with_name("m-00003-of-00003.gguf"))
    with pytest.raises(CheckpointError, match=r"says that it is file 2 of its model \(split.no\)"):
        read_model(first)
    first.with_name("m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00003.gguf of the 3 files"):
        find_model(str(first))
        read_model(first)


@pytest.mark.parametrize("value", ["x", [1, 2]])
def test_split_numbers_of_wrong_types_are_refused(value: Any, directory: Path, tmp_path: Path) -> None:
    """Bug: an array as split.count and a text as split.no raised ValueError and TypeError without the file's name."""
    first = read_model(write_gguf(tmp_path / "x.gguf", directory))
    wrong = np.array(value) if isinstance(value, list) else value
    with pytest.raises(CheckpointError, match=r"x.gguf is one of .* files \(split.count\)"):
        join([first._replace(metadata=first.metadata | {"split.count": wrong})])
    headers = [first._replace(metadata={"split.count": 2}), first._replace(metadata={"split.no": wrong}, tensors={})]
    with pytest.raises(CheckpointError, match=r"x.gguf says that it is file .* of its model \(split.no\)"):
        join(headers)


def test_directory_with_a_file_in_capitals_is_a_model(directory: Path, tmp_path: Path) -> None:
    """Bug: the file alone was accepted as M.GGUF, but not its directory."""
    path = write_gguf(tmp_path / "M.GGUF", directory)
    assert find_model(str(tmp_path)) == (path, path)


def test_directory_with_several_models_is_refused(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-Q8_0.gguf", directory)
    shutil.copy(path, tmp_path / "mmproj-m.gguf")
    assert find_model(str(tmp_path)) == (path, path), "the part for images is no model"
    shutil.copy(path, tmp_path / "m-Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 models in GGUF; give .*: m-Q4_0.gguf, m-Q8_0.gguf"):
        find_model(str(tmp_path))
    shutil.copy(directory / "model.safetensors", tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    assert find_model(str(tmp_path)) == (tmp_path / "config.json", tmp_path), "safetensors come first"


HUB = [
    *("README.md", "mmproj-F16.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_XS.gguf"),
    *("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"),
]
FOUND = {
    "acme/m-GGUF": ("m-Q4_K_M.gguf",),
    "acme/m-GGUF:q4_k_m": ("m-Q4_K_M.gguf",),
    "acme/m-GGUF:UD-Q4_K_M": ("m-UD-Q4_K_M.gguf",),
    "acme/m-GGUF:IQ4_XS": ("m-IQ4_XS.gguf",),
    "acme/m-GGUF:BF16": ("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"),
    "acme/m-GGUF/m-Q4_K_S.gguf": ("m-Q4_K_S.gguf",),
    "acme/m-GGUF/BF16/m-BF16-00002-of-00002.gguf": (
        "BF16/m-BF16-00001-of-00002.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
    ),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of the hub that can only be listed."""
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in HUB])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name: info)


@pytest.mark.parametrize("name", FOUND)
def test_hub_name_finds_the_file(name: str, hub: None) -> None:
    found = find_gguf(name)
    assert found is not None and found.names == FOUND[name] and found.repository == "acme/m-GGUF"


def test_hub_name_without_such_a_file_lists_what_there_is(hub: None) -> None:
    for name in ("acme/m-GGUF:Q8_0", "acme/m-GGUF/m-Q8_0.gguf", "acme/m-GGUF:Q4"):
        with pytest.raises(CheckpointError, match=r"acme/m-GGUF on the hub has no file named .*m-IQ4_XS.gguf"):
            find_gguf(name)


def test_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """Bug: of a path such as ../m/x.gguf, the directory was taken for a repository of the hub."""
    for name in (str(tmp_path / "x.gguf"), "x.gguf", "~nobody-here/x.gguf", "../m/x.gguf", "./m/x.gguf", "~/m/x.gguf"):
        with pytest.raises(CheckpointError, match=r"x.gguf' does not exist; a model in GGUF is FILE.gguf"):
            find_gguf(name)


def test_file_without_a_tokenizer_or_a_template_is_refused_for_texts(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", directory)
    with pytest.raises(CheckpointError, match=r"has no tokenizer.ggml.model"):
        check_tokenizer(str(path), "use token ids")
    path = write_gguf(tmp_path / "y.gguf", directory, metadata=lambda writer: writer.add_tokenizer_model("gpt2"))
    check_tokenizer(str(path), "use token ids")
    with pytest.raises(CheckpointError, match=r"has no chat template: .*y.gguf has no tokenizer.chat_template"):
        check_tokenizer(str(path), "use token ids", needs_template=True)
