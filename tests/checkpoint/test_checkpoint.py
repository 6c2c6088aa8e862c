"""Files of a model that are read and fetched. None lies outside its directory, and none of them is run."""

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from model_files import edit_json
from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.files import CONFIG_FILES, TOKENIZER_FILES, fetch_weights, find_model, weight_files
from nanovllm.engine import startup
from nanovllm.errors import CheckpointError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def touch(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"")
    return directory


def write_index(directory: Path, *names: Any) -> None:
    weight_map = {f"tensor{i}": name for i, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# -- which files are the weights -------------------------------------------------------------------------------------

OTHERS = ("consolidated.safetensors", "adapter_model.safetensors", "adapter/model.safetensors", "onnx/x.safetensors")


def test_weight_files_follow_one_rule_whatever_else_is_there(tmp_path: Path) -> None:
    """Regression: without an index every safetensors file of the directory was read, so that a consolidated.safetensors
    beside model.safetensors was refused as weights unknown."""
    shards = "model-00001-of-00002 model-00002-of-00002"
    for i, (files, indexed, expected) in enumerate(
        (
            ("a-1 b", "b a-1", "a-1 b"),
            ("model model-new", "model-new", "model-new"),
            ("model", "", "model"),
            ("model model-00001-of-00001", "", "model"),
            (shards, "", shards),
        )
    ):
        directory = touch(tmp_path / str(i), *(f"{name}.safetensors" for name in files.split()), *OTHERS)
        if indexed:
            write_index(directory, *(f"{name}.safetensors" for name in indexed.split()))
        assert [file.stem for file in weight_files(directory)] == expected.split()
    only = touch(tmp_path / "only", "my-weights.safetensors", "onnx/x.safetensors")
    assert [file.stem for file in weight_files(only)] == ["my-weights"]


def test_weight_files_missing_or_ambiguous_raise_with_the_remedy(tmp_path: Path) -> None:
    for i, (files, message) in enumerate(
        (
            ("", "no safetensors file in"),
            ("onnx/model.safetensors model.bin", "no safetensors file in"),
            ("a.safetensors b.safetensors", r"2 safetensors files \(a.safetensors, b.safetensors\) and no .*index"),
            ("model-00001-of-00003.safetensors model-00003-of-00003.safetensors", "see model-00002-of-00003"),
            ("model-00001-of-00002.safetensors model-00001-of-00003.safetensors", "not the complete set of 00002"),
        )
    ):
        (tmp_path / str(i)).mkdir()
        with pytest.raises(CheckpointError, match=message):
            weight_files(touch(tmp_path / str(i), *files.split()))


def test_weight_files_stale_index_names_both_remedies(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    write_index(tmp_path, "model-00001-of-00001.safetensors")
    with pytest.raises(
        CheckpointError, match=r"do not exist: model-00001-.*; download them again, or delete the index if"
    ):
        weight_files(tmp_path)


def test_engine_reads_model_beside_consolidated_as_transformers_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "plain")
    write_tiny_model(tmp_path / "other", seed=1)
    shutil.copytree(tmp_path / "plain", tmp_path / "both")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "both" / "consolidated.safetensors")
    answers = []
    for name in ("plain", "both", "other"):
        with LLM(str(tmp_path / name), device="cpu", num_kvcache_blocks=2) as llm:
            answers.append(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"])
    assert answers[0] == answers[1] != answers[2]


# -- nothing outside the directory -----------------------------------------------------------------------------------


def test_index_that_leads_elsewhere_is_refused_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the index was followed wherever it led."""
    model = write_tiny_model(tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    for directory in (elsewhere, model / "sub"):
        directory.mkdir()
        shutil.copy(model / "model.safetensors", directory / "x.safetensors")
    (model / "link").symlink_to(elsewhere)
    touch(model, "model.bin")
    monkeypatch.setattr(startup, "make_runner", lambda *_: pytest.fail("a runner was made"))
    inside = ("sub/x.safetensors", "link/x.safetensors", "./model.safetensors", "..", "", "model.bin", 5)
    for name in (f"{elsewhere}/x.safetensors", "../elsewhere/x.safetensors", "sub/../../elsewhere/x.st", *inside):
        write_index(model, name)
        with pytest.raises(
            CheckpointError,
            match=r"index\.json names .*, which is not a safetensors file in the same directory; .* move",
        ):
            LLM(str(model), device="cpu", num_kvcache_blocks=2)


def test_weights_that_the_owner_linked_into_the_directory_are_read(tmp_path: Path) -> None:
    store = write_tiny_model(tmp_path / "store", sharded=True)
    model = tmp_path / "model"
    model.mkdir()
    for file in store.iterdir():
        (model / file.name).symlink_to(file)
    assert len(weight_files(model)) > 1
    with LLM(str(model), device="cpu", num_kvcache_blocks=2) as llm:
        assert len(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"]) == 5


# -- the hub ---------------------------------------------------------------------------------------------------------

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NEVER = (
    *(*OTHERS, "onnx/config.json", "original/params.json", "original/tokenizer.model", "trainer_state.json"),
    *("modeling_x.py", "configuration_x.py", "pytorch_model.bin", "README.md", "training_args.json"),
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Hub":
    hub = Hub(tmp_path / "hub", tmp_path / "cache" / COMMIT)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    return hub


class Hub:
    """One repository, and the cache's directory of its only commit."""

    def __init__(self, repository: Path, snapshot: Path) -> None:
        self.repository, self.snapshot = repository, snapshot
        self.fetched: list[str] = []

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        from huggingface_hub.utils import filter_repo_objects

        assert name == "acme/facts" and revision in (None, COMMIT)
        files = [str(file.relative_to(self.repository)) for file in self.repository.rglob("*") if file.is_file()]
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in sorted(filter_repo_objects(files, allow_patterns=allow_patterns)):
            self.fetched.append(file)
            target = self.snapshot / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repository / file, target)
        return str(self.snapshot)


@pytest.mark.parametrize("sharded", [False, True])
def test_hub_only_what_is_needed_is_fetched_and_weights_apart(hub: Hub, sharded: bool) -> None:
    """Regression: every *.json, *.txt and *.safetensors of the repository was, those of its folders too, and the
    weights even where nobody reads them."""
    small = [name for name in (*CONFIG_FILES, *TOKENIZER_FILES) if sharded or "index" not in name]
    touch(hub.repository, *small, *NEVER, *(SHARDS if sharded else ["model.safetensors"]))
    if sharded:
        write_index(hub.repository, *SHARDS)
    config, directory = find_model("acme/facts")
    assert directory == hub.snapshot and config == hub.snapshot / "config.json"
    assert hub.fetched == sorted(small)
    hub.fetched.clear()
    fetch_weights("acme/facts", directory)
    assert hub.fetched == (sorted(SHARDS) if sharded else ["model.safetensors"])


def test_hub_that_cannot_be_reached_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As httpx does for huggingface_hub: the reason is the cause of the error, which has a longer text."""

    def fail(*args: Any, **kwargs: Any) -> str:
        try:
            raise ConnectionRefusedError("refused")
        except OSError as error:
            raise FileNotFoundError("An error happened while trying to locate the files.") from error

    for name in ("snapshot_download", "HfApi.model_info"):
        monkeypatch.setattr(f"huggingface_hub.{name}", fail)
    expected = r"the hub cannot be reached \(refused\); check the network, set HF_ENDPOINT to a mirror, or give a local"
    for model, preset in (("acme/facts", False), ("acme/facts:Q4_K_M", False), ("qwen3-0.6", True)):
        with pytest.raises(CheckpointError, match=expected) as caught:
            find_model(model)
        assert ("qwen3-0.6b" in str(caught.value)) == preset


def test_hub_weights_that_cannot_be_had_are_refused_with_the_remedy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(hub.repository, "config.json", "pytorch_model.bin")
    _, directory = find_model("acme/facts")
    with pytest.raises(CheckpointError, match=r"no safetensors file in .*save_pretrained"):
        fetch_weights("acme/facts", directory)

    def no_network(*args: Any, **kwargs: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(CheckpointError, match=r"weights of model 'acme/facts' could not be downloaded: no network"):
        fetch_weights("acme/facts", directory)
    write_index(hub.snapshot, "../../other/model.safetensors")
    with pytest.raises(CheckpointError, match="not a safetensors file in the same directory"):
        fetch_weights("acme/facts", directory)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_hub_engine_fetches_weights_unless_they_are_random(hub: Hub, load_format: str) -> None:
    write_tiny_tokenizer(write_tiny_model(hub.repository))
    with LLM("acme/facts", device="cpu", num_kvcache_blocks=2, load_format=load_format) as llm:
        assert len(llm.generate(["abc"], GREEDY, use_tqdm=False)[0]["token_ids"]) == 5
    assert ("model.safetensors" in hub.fetched) == (load_format == "auto")


# -- no code, no questions -------------------------------------------------------------------------------------------


class Stdin:
    """Remembers that somebody asked: transformers turns what this raises into an error of its own."""

    was_read = False

    def __getattr__(self, name: str) -> Any:
        if name in ("encoding", "errors"):
            raise AttributeError(name)
        self.was_read = True
        raise AssertionError(f"stdin.{name} was used")


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Stdin:
    stdin = Stdin()
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


@pytest.fixture
def model_with_code(tmp_path: Path) -> Path:
    """Its Python files leave a file `ran` behind; its config.json and its tokenizer name them."""
    model = write_tiny_tokenizer(write_tiny_model(tmp_path / "model"))
    for name in ("configuration", "modeling", "tokenization"):
        (model / f"{name}_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass\n")
    edit_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]})
    edit_json(model / "config.json", auto_map={"AutoConfig": "configuration_x.X"})
    return model


def test_code_beside_a_known_model_is_not_run_and_nothing_is_asked(model_with_code: Path, stdin: Stdin) -> None:
    with LLM(str(model_with_code), device="cpu", num_kvcache_blocks=2) as llm:
        assert len(llm.generate(["abc"], GREEDY, use_tqdm=False)[0]["token_ids"]) == 5
    assert not (model_with_code.parent / "ran").exists() and not stdin.was_read


def test_model_that_needs_its_own_code_is_refused_and_nothing_is_asked(model_with_code: Path, stdin: Stdin) -> None:
    """Regression: transformers asked on stdin whether to run the code of a model type that it does not know."""
    auto_map = {"AutoModelForCausalLM": "modeling_x.X"}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"auto_map": auto_map}, "'modeling_x.X' asks for code .* never run; remove auto_map .* plain Qwen3"),
        ({"model_type": "x"}, "model_type='x' is not supported; supported are Qwen3ForCausalLM"),
        ({"architectures": ["XForCausalLM"]}, "'XForCausalLM' with model_type='x' is not supported"),
        ({"model_type": None}, "model_type=None is not supported"),
    )
    for changes, message in cases:
        edit_json(model_with_code / "config.json", **changes)
        with pytest.raises(CheckpointError, match=message):
            LLM(str(model_with_code), device="cpu", num_kvcache_blocks=2)
    assert not (model_with_code.parent / "ran").exists() and not stdin.was_read


def test_transformers_is_never_given_the_choice() -> None:
    """Every call of an Auto class says trust_remote_code=False."""
    calls = 0
    for path in (*ROOT.glob("*.py"), *(ROOT / "nanovllm").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("Auto"):
                calls += 1
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
    assert calls >= 3


def test_files_are_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    """Regression: a file that exists was a "model directory that does not exist"."""
    write_tiny_model(tmp_path / "model")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(CheckpointError, match=rf"is a file; give its directory, '{tmp_path}/model'"):
            find_model(str(tmp_path / "model" / name))
    (tmp_path / "book.txt").write_text("Once")
    with pytest.raises(CheckpointError, match="is a file; give the directory of a model, or a file in GGUF"):
        find_model(str(tmp_path / "book.txt"))


def test_config_json_is_not_read_by_the_rules_of_transformers_for_the_tokenizer(tmp_path: Path) -> None:
    """Regression: AutoTokenizer reads config.json. `rms_norm_eps: 1`, `torch.float32` and nulls in it were refused as
    faults of the tokenizer's files.
    """
    write_tiny_tokenizer(write_tiny_model(tmp_path))
    path, whole = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    for changes in (
        {"dtype": "torch.float32"},
        {"rms_norm_eps": 1},
        {"attention_bias": None, "tie_word_embeddings": None, "use_cache": None, "max_window_layers": None},
        {"initializer_range": 1, "pad_token_id": "none"},
    ):
        path.write_text(json.dumps(whole | changes))
        with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=2) as llm:
            assert len(llm.generate(["abc"], GREEDY, use_tqdm=False)[0]["token_ids"]) == 5, changes
    for changes, message in (
        ({"dtype": "float8"}, r"dtype float8 in config\.json is not supported"),
        ({"rms_norm_eps": None}, r"rms_norm_eps=None must be .*; correct .*config\.json"),
        ({"head_dim": None}, r"head_dim=None .*; correct .*config\.json"),
        ({"eos_token_id": "x"}, r"eos_token_id='x' in config\.json"),
        ({"vocab_size": 320.5}, r"vocab_size=320.5 must be an integer .*; correct .*config\.json"),
    ):
        path.write_text(json.dumps(whole | changes))
        with pytest.raises(CheckpointError, match=message):
            LLM(str(tmp_path), device="cpu", num_kvcache_blocks=2)


# -- a damaged tokenizer ---------------------------------------------------------------------------------------------


def test_damaged_tokenizer_is_named_before_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: "Expecting value: line 2 column 1 (char 6)", after the weights had been loaded."""
    model = write_tiny_tokenizer(write_tiny_model(tmp_path))
    monkeypatch.setattr(startup, "make_runner", lambda *_: pytest.fail("a runner was made"))
    for name, content, message in (
        ("tokenizer.json", b'{"a":', r"/tokenizer\.json is not JSON .*; download it again"),
        ("tokenizer.json", b"", r"/tokenizer\.json is not JSON"),
        ("tokenizer.json", b"[]", r"/tokenizer\.json holds a list instead of a JSON object; download it"),
        ("tokenizer.json", b'{"a": 1}', r"the tokenizer in .* cannot be read .*again: tokenizer\.json"),
        ("tokenizer_config.json", b'{"a":', r"/tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", b"[]", r"/tokenizer_config\.json holds a list"),
        ("special_tokens_map.json", b"{", r"/special_tokens_map\.json is not JSON"),
        ("tokenizer.json", b"\xff", r"/tokenizer\.json is not JSON"),
        ("tokenizer.json", None, r"the tokenizer in .* has no vocabulary, only .*; add tokenizer\.json"),
    ):
        path = model / name
        before = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            LLM(str(model), device="cpu", num_kvcache_blocks=2)
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)
