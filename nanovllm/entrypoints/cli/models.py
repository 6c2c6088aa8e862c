"""`nanovllm list` and `nanovllm pull`: the models on this machine, and downloads from the hub."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.capacity.fit import CONTEXTS, each_fit
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan_check import check_plan
from nanovllm.checkpoint.files import fetch_weights, find_model, presets, weight_files
from nanovllm.checkpoint.gguf import is_gguf
from nanovllm.checkpoint.gguf_files import local_models
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.entrypoints.cli.flags import add_command
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models.demo_model import DEMO_MODEL
from nanovllm.plan.kv_spec import dtype_name
from nanovllm.utils.arithmetic import format_bytes

LIST_EXAMPLE = """\
The column MODEL has what the other commands take as their model. Nothing is asked of the hub, and no weights are read.
What runs is projected, as by nanovllm plan --fit: the longest context, where the KV cache is, and a bound of the speed.
"""
PULL_EXAMPLE = """\
examples:
  nanovllm pull Qwen/Qwen3-0.6B
  nanovllm pull owner/name:Q4_K_M
  nanovllm pull owner/name/FILE.gguf
"""
HEAD = ("MODEL", "SIZE", "FORMAT", "TAKES", "RUNS HERE")


class Stored(NamedTuple):
    """A model on this machine. name: what commands take. path: its directory, or its first file in GGUF."""

    name: str
    path: Path
    num_bytes: int


def add_list_command(commands: Any) -> None:
    about = "list the models in the hub's cache and in a folder, with what runs on this machine"
    parser = add_command(commands, "list", about, run_list, (), LIST_EXAMPLE)
    folder = "folder whose GGUF files and checkpoints are listed, too (default: the working directory)"
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help=folder)


def add_pull_command(commands: Any) -> None:
    about = "download a model from the hub, so that it can be used offline"
    parser = add_command(commands, "pull", about, run_pull, (), PULL_EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="owner/name, owner/name:QUANTIZATION or owner/name/FILE.gguf")


def run_pull(args: argparse.Namespace) -> int:
    name = args.model
    if name in (DEMO_MODEL, *presets()) or Path(name).expanduser().exists() or "/" not in name:
        raise ConfigError(f"pull needs the name of a model on the hub, such as owner/name; {name!r} is not one")
    _, path = find_model(name)
    fetch_weights(name, path)
    print(path)
    return 0


def run_list(args: argparse.Namespace) -> int:
    folder = args.folder.expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    from nanovllm.llm import find_machine, resolve_device

    device = resolve_device(Config(model=DEMO_MODEL)).type
    machine = find_machine(Config(model=DEMO_MODEL, device=device))
    rows = [(stored.name, format_bytes(stored.num_bytes), *_describe(stored, machine)) for stored in _all(folder)]
    if not rows:
        print(f"no models in the hub's cache and in {folder}; nanovllm pull downloads one")
        return 0
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    for row in (HEAD, *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _all(folder: Path) -> list[Stored]:
    return sorted({stored.name: stored for stored in (*_in_cache(), *_in_folder(folder))}.values())


def _in_cache() -> Iterator[Stored]:
    """Yield the models in the newest snapshot of each repository in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        for repository in scan_cache_dir().repos:
            if repository.repo_type == "model" and repository.revisions:
                newest = max(repository.revisions, key=lambda revision: revision.last_modified)
                yield from _in_directory(newest.snapshot_path, repository.repo_id)


def _in_folder(folder: Path) -> Iterator[Stored]:
    yield from _in_directory(folder, str(folder))
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _in_directory(path, str(folder / path.name))


def _in_directory(directory: Path, name: str) -> Iterator[Stored]:
    """Yield the checkpoint in a directory, or its models in GGUF."""
    if (directory / "config.json").is_file():
        yield Stored(
            name, directory, sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.is_file())
        )
    else:
        for files in local_models(directory):
            num_bytes = sum((directory / file).stat().st_size for file in files)
            yield Stored(str(Path(name) / files[0]), directory / files[0], num_bytes)


def _describe(stored: Stored, machine: Machine) -> tuple[str, str, str]:
    """Return the format, the longest context that the model takes, and what runs."""
    try:
        model = config_without_weights(str(stored.path))
        own = model.quantization.method if model.quantization else dtype_name(Config(model=stored.name), model)
        format = "/".join(model.gguf_types) if is_gguf(stored.path) else own
        takes = f"{model.max_model_len_limit:,}"
        if not is_gguf(stored.path):
            weight_files(stored.path)
        return format, takes, what_runs(machine, str(stored.path), model, own)
    except (CheckpointError, ConfigError) as error:
        return "", "", str(error).partition(";")[0].replace(str(stored.path), "it")


def what_runs(machine: Machine, path: str, model: ModelConfig, own: str) -> str:
    """Say what runs on `machine`: the longest context in the model's format `own`, or else in a format of loading."""
    if machine.gpu_bytes is None:
        context = _longest_on_cpu(machine, path, model)
        return f"{context:,} tokens on the CPU" if context else "no; it needs more memory"
    limit, best = model.max_model_len_limit, None
    for context in (limit, *(shorter for shorter in reversed(CONTEXTS) if shorter < limit)):
        found = each_fit(machine, [path], context=context)
        if (best := next(found, None)) is not None:
            break
    if best is None:
        return "no; it needs more memory"
    if best.format != own:
        best = max((best, *found), key=lambda fit: fit.plan.expected_decode_tok_per_s or 0.0)
    rate = best.plan.expected_decode_tok_per_s
    parts = [f"{best.plan.context:,} tokens", {"GPU": "on the GPU"}.get(best.where, f"with {best.where}")]
    parts += [f"and --quantization {best.format}"] if best.format != own else []
    return " ".join(parts) + (f", <= {rate:.1f} tok/s" if rate else "")


def _longest_on_cpu(machine: Machine, path: str, model: ModelConfig) -> int:
    """Return the longest context whose plan works, by halving the model's, or 0."""
    context = model.max_model_len_limit
    while context:
        with suppress(ConfigError):
            check_plan(make_plan(Config(model=path, device="cpu", max_model_len=context), model, machine))
            return context
        context //= 2
    return 0
