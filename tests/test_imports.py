"""The import rules, read from the source: what each part of the package may know about."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent

# Part -> the parts it may import, besides itself. Imports go downwards only.
BASE = {"base", "utils"}
ALLOWED = {
    "utils": set(),
    "base": {"utils"},  # config, errors, sampling_params, distributed, ...
    "plan": BASE,  # engine/batch and engine/sequence: plain data that the cache managers work on
    "layers": BASE,
    "attention": BASE | {"layers"},
    "kvcache": BASE | {"layers", "plan"},
    "models": BASE | {"layers", "attention"},
    "engine": BASE | {"plan", "layers", "attention", "kvcache", "models"},
    "demo": BASE | {"layers", "models", "engine", "top"},
    "top": BASE | {"plan", "layers", "attention", "kvcache", "models", "engine", "demo"},  # llm, cli, console
}
PART_OF_MODULE = {
    "nanovllm": "top",
    "nanovllm.__main__": "top",
    "nanovllm.llm": "top",
    "nanovllm.plan": "base",  # not the plan of a step
    "nanovllm.cli": "top",
    "nanovllm.chat": "top",
    "nanovllm.flags": "top",
    "nanovllm.console": "top",
    "nanovllm.engine.batch": "plan",
    "nanovllm.engine.sequence": "plan",
    "nanovllm.loader": "models",  # fills the parameters of the models
}
TORCH_FREE = {
    f"nanovllm.{name}"
    for name in (
        "kvcache.base kvcache.prefix_index kvcache.block_pool kvcache.block_manager kvcache.hybrid_manager "
        "kvcache.slot_ring kvcache.step_slots kvcache.histories kvcache.copy_runs "
        "engine.scheduler engine.sequence engine.batch config sampling_params "
        "errors planner plan plan_table plan_check remedies costs device_memory machine gpus "
        "model_config model_settings checkpoint config_overrides rope_extension generation_config flags"
    ).split()
}
MAY_IMPORT_TRITON = ("nanovllm.attention.kernels", "nanovllm.layers.kernels", "nanovllm.attention.triton_backend")
OWNS_THE_DEVICE = {
    f"nanovllm.{name}"
    for name in (
        "distributed kernel_target engine.model_runner engine.startup engine.cuda_graphs engine.streamed_graphs "
        "layers.kernels.launch engine.device_guard engine.graph_capture engine.memory_profile engine.step_result "
        "kvcache.streams kvcache.pinned_memory utils.cuda_streams attention.cudnn_backend attention.triton_backend"
    ).split()
}


def module_names() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def part_of(module: str) -> str:
    if module in PART_OF_MODULE:
        return PART_OF_MODULE[module]
    folder = module.split(".")[1]
    return folder if folder in ALLOWED else "base"


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imported_names(tree: ast.AST) -> set[str]:
    """Everything the module imports, at any depth: `from a import b` counts as `a` and `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return names


def uses_torch_cuda(tree: ast.AST) -> bool:
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "cuda")
    named = any(isinstance(node.value, ast.Name) and node.value.id == "torch" for node in attributes)
    return named or any(is_in(name, ("torch.cuda",)) for name in imported_names(tree))


def broken_rules(module: str, source: str, modules: set[str]) -> list[str]:
    """What is wrong with the imports of `module`, one line each."""
    tree = ast.parse(source)
    imported = imported_names(tree)
    part = part_of(module)
    broken = [f"relative import {name}" for name in imported if name.startswith(".")]
    for name in imported & modules - {"nanovllm"}:
        if part_of(name) not in ALLOWED[part] | {part}:
            broken.append(f"{part} imports {name}, which belongs to {part_of(name)}")
    if module in TORCH_FREE and any(is_in(name, ("torch",)) for name in imported):
        broken.append("imports torch")
    if not is_in(module, MAY_IMPORT_TRITON) and any(is_in(name, ("triton",)) for name in imported):
        broken.append("imports triton")
    if module not in OWNS_THE_DEVICE and uses_torch_cuda(tree):
        broken.append("uses torch.cuda")
    return broken


def test_package_keeps_the_import_rules() -> None:
    modules = module_names()
    broken = {name: broken_rules(name, path.read_text(), set(modules)) for name, path in modules.items()}
    assert not {name: rules for name, rules in broken.items() if rules}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("nanovllm.layers.linear", "from nanovllm.engine.scheduler import Scheduler", "layers imports"),
        ("nanovllm.layers.linear", "def f():\n    import nanovllm.models.qwen3", "layers imports"),
        ("nanovllm.attention.paged", "from nanovllm.kvcache import streams", "attention imports"),
        ("nanovllm.kvcache.streams", "from nanovllm.attention.base import PagedBatch", "kvcache imports"),
        ("nanovllm.kvcache.base", "from nanovllm.engine.scheduler import Scheduler", "kvcache imports"),
        ("nanovllm.engine.scheduler", "from nanovllm.llm import LLM", "engine imports"),
        ("nanovllm.models.qwen3", "from . import decoder", "relative import"),
        ("nanovllm.engine.scheduler", "from torch import Tensor", "imports torch"),
        ("nanovllm.layers.linear", "import triton.language as tl", "imports triton"),
        ("nanovllm.layers.linear", "import torch\ntorch.cuda.synchronize()", "uses torch.cuda"),
        ("nanovllm.layers.linear", "from torch import cuda", "uses torch.cuda"),
    ],
)
def test_broken_rules_bad_import_complains(module: str, source: str, complaint: str) -> None:
    modules = {"nanovllm.engine.scheduler", "nanovllm.models.qwen3", "nanovllm.kvcache.streams", "nanovllm.llm"}
    broken = broken_rules(module, source, modules | {"nanovllm.attention.base"})
    assert any(rule.startswith(complaint) for rule in broken), broken


def test_broken_rules_good_imports_pass() -> None:
    modules = {"nanovllm.layers.linear", "nanovllm.engine.batch"}
    assert not broken_rules("nanovllm.models.qwen3", "import torch\nfrom nanovllm.layers import linear", modules)
    assert not broken_rules("nanovllm.kvcache.base", "from nanovllm.engine.batch import KVMoves", modules)


def test_package_lists_what_it_exports_without_loading_torch() -> None:
    """R7: `dir(nanovllm)`, and with it completion, showed neither LLM nor SamplingParams."""
    code = "import nanovllm, sys; print(*dir(nanovllm)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"LLM", "SamplingParams", "__version__"} <= set(done.stdout.split())


def test_torch_free_modules_imported_leave_torch_out() -> None:
    """What the source says also holds at run time, through everything that is imported on the way."""
    names = ["nanovllm", *sorted(TORCH_FREE & module_names().keys())]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
