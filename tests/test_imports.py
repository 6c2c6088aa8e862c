"""The import rules, read from the source.

1. Imports go down the list of FLOORS: a folder or module may import what stands before it, and nothing in circles.
2. The floors before `capabilities` do not know what is in `capabilities`. Start-up puts a capability in its place.
3. The entry points use the engine's public calls: its top modules, its data, its text, its errors and its options.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent

FLOORS = (
    *("errors", "utils", "compat", "outputs", "sampling_params", "checkpoint", "config", "plan", "capacity", "device"),
    *("kernels", "layers", "attention", "models", "offload", "kvcache", "schedule", "runner", "executor"),
    *("capabilities", "engine", "text", "llm", "request_stream"),
    *("async_llm", "llm_engine", "nanovllm", "entrypoints", "__main__"),
)
PUBLIC = {"nanovllm", "llm", "async_llm", "request_stream", "plan", "text", "errors", "config", "sampling_params"}
PUBLIC |= {"capacity", "checkpoint", "outputs", "utils", "models.demo_model", "models.retrieval_model"}
PUBLIC |= {"capabilities.disk.store", "capabilities.disk.disk_moves"}  # files that `nanovllm cache` manages
TORCH_FREE = (
    "errors",
    "compat",
    "outputs",
    "sampling_params",
    "config",
    "checkpoint",
    "plan",
    "capacity",
    "kvcache",
    "schedule",
)
TORCH_FREE += ("capabilities.edits", "capabilities.speculation", "capabilities.cpu_attention.cpu_split")
TORCH_FREE += ("capabilities.draft_head.pages",)
TORCH_FREE += ("capabilities.disk.store", "capabilities.disk.tier", "capabilities.disk.disk_moves")
TORCH_FREE += ("capabilities.shadow.pages", "capabilities.recurrent.places")
MAY_IMPORT_TRITON = ("kernels",)
MAY_IMPORT_RAY = ("entrypoints.cluster",)
MAY_USE_THE_DEVICE = ("device", "kernels", "attention", "offload", "runner", "capabilities")


def module_names() -> dict[str, Path]:
    """Return the file of every module of the package, by dotted name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def floor_of(module: str) -> str:
    return (module.split(".")[1:] or ["nanovllm"])[0]


def is_one_of(module: str, names: Iterable[str]) -> bool:
    """Return True if the module is one of these parts of the package, or lies in one."""
    return any(is_in(module, f"nanovllm.{name}" if name != "nanovllm" else name) for name in names)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


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


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of the package that are imported; `from a.b import c` is a.b.c if that is a module, otherwise a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules


def uses_torch_cuda(tree: ast.AST) -> bool:
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "cuda")
    named = any(isinstance(node.value, ast.Name) and node.value.id == "torch" for node in attributes)
    return named or any(is_in(name, "torch.cuda") for name in imported_names(tree))


def broken_rules(module: str, source: str, modules: set[str]) -> list[str]:
    """List the rules that the imports of `module` break, one line each."""
    tree = ast.parse(source)
    imported = imported_names(tree)
    broken = [f"relative import {name}" for name in imported if name.startswith(".")]
    floor = floor_of(module)
    for name in sorted(imported_modules(tree, modules)):
        imported_floor = floor_of(name)
        if FLOORS.index(imported_floor) > FLOORS.index(floor):
            broken.append(f"{floor} imports {name}, which stands above it")
        elif floor == "entrypoints" and imported_floor != floor and not is_public(name):
            broken.append(f"an entry point imports {name}, which is not public")
    if is_one_of(module, TORCH_FREE) and any(is_in(name, "torch") for name in imported):
        broken.append("imports torch")
    if not is_one_of(module, MAY_IMPORT_TRITON) and any(is_in(name, "triton") for name in imported):
        broken.append("imports triton")
    if not is_one_of(module, MAY_IMPORT_RAY) and any(is_in(name, "ray") for name in imported):
        broken.append("imports ray")
    if not is_one_of(module, MAY_USE_THE_DEVICE) and uses_torch_cuda(tree):
        broken.append("uses torch.cuda")
    if floor == "kernels" and any(is_in(name, "torch") for name in imported) and not postpones_annotations(tree):
        broken.append("reads torch for its annotations")  # the process that compiles kernels would load it
    if floor == "kernels":  # for the same reason
        at_run_time = ast.Module([node for node in tree.body if not is_for_annotations(node)], [])
        needed = {name for name in imported_modules(at_run_time, modules) if floor_of(name) == "device"}
        broken += [f"loads torch with {name}" for name in needed - {"nanovllm.device.kernel_target"}]
    return broken


def is_public(module: str) -> bool:
    return module == "nanovllm" or is_one_of(module, PUBLIC - {"nanovllm"})


def is_for_annotations(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def postpones_annotations(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


def find_circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules that import each other in a circle, or None."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for name in sorted(imports[module]):
            if circle := visit(name, [*path, module]):
                return circle
        done.add(module)
        return None

    return next((circle for module in imports if (circle := visit(module, []))), None)


def test_package_keeps_the_import_rules() -> None:
    modules = module_names()
    broken = {name: broken_rules(name, path.read_text(), set(modules)) for name, path in modules.items()}
    assert not {name: rules for name, rules in broken.items() if rules}


def test_modules_import_each_other_in_no_circle() -> None:
    modules = module_names()
    imports = {name: imported_modules(ast.parse(path.read_text()), set(modules)) for name, path in modules.items()}
    assert find_circle(imports) is None


def test_find_circle_names_it() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("nanovllm.layers.linear", "from nanovllm.schedule.scheduler import Scheduler", "layers imports"),
        ("nanovllm.layers.linear", "def f():\n    import nanovllm.models.decoder", "layers imports"),
        ("nanovllm.kvcache.block_pool", "from nanovllm.capabilities.shadow import pages", "kvcache imports"),
        ("nanovllm.schedule.scheduler", "from nanovllm.llm import LLM", "schedule imports"),
        ("nanovllm.entrypoints.cli.main", "from nanovllm.schedule import scheduler", "an entry point imports"),
        ("nanovllm.models.decoder", "from . import loader", "relative import"),
        ("nanovllm.schedule.scheduler", "from torch import Tensor", "imports torch"),
        ("nanovllm.layers.linear", "import triton.language as tl", "imports triton"),
        ("nanovllm.executor.processes", "def f():\n    from ray.util import placement_group", "imports ray"),
        ("nanovllm.layers.linear", "import torch\ntorch.cuda.synchronize()", "uses torch.cuda"),
        ("nanovllm.layers.linear", "from torch import cuda", "uses torch.cuda"),
        ("nanovllm.kernels.fused", "import torch\ndef f(x: torch.Tensor): ...", "reads torch"),
        ("nanovllm.kernels.fused", "from nanovllm.device.tp_group import TPGroup", "loads torch"),
    ],
)
def test_broken_rules_bad_import_complains(module: str, source: str, complaint: str) -> None:
    modules = {"schedule.scheduler", "models.decoder", "capabilities.shadow.pages", "llm", "device.tp_group"}
    broken = broken_rules(module, source, {f"nanovllm.{name}" for name in modules})
    assert any(rule.startswith(complaint) for rule in broken), broken


def test_broken_rules_good_imports_pass() -> None:
    modules = {"nanovllm.layers.linear", "nanovllm.plan.step_plan"}
    assert not broken_rules("nanovllm.models.decoder", "import torch\nfrom nanovllm.layers import linear", modules)
    assert not broken_rules("nanovllm.kvcache.block_manager", "from nanovllm.plan.step_plan import KVMoves", modules)


def test_scripts_and_benchmarks_import_modules_that_exist() -> None:
    """bench_offload.py still imported a module of the package by its old path, and ended before it read its flags."""
    modules = module_names()
    root = PACKAGE.parent
    for path in (*root.glob("*.py"), *(root / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and is_in(node.module or "", "nanovllm"):
                assert node.module in modules, f"{path.name} imports {node.module}, which does not exist"


def test_package_lists_what_it_exports_without_loading_torch() -> None:
    """R7: `dir(nanovllm)`, and with it completion, showed neither LLM nor SamplingParams."""
    code = "import nanovllm, sys; print(*dir(nanovllm)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = {"CheckpointError", "ConfigError", "EngineError", "RequestError", "WorkerDiedError"}
    assert {"LLM", "SamplingParams", "__version__"} | errors <= set(done.stdout.split())


def test_package_exports_each_name_it_lists() -> None:
    assert all(getattr(nanovllm, name) is not None for name in nanovllm.__all__)
    assert nanovllm.RequestError.__module__ == "nanovllm.errors"
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = nanovllm.Engine  # type: ignore[attr-defined]


def test_torch_free_modules_imported_leave_torch_out() -> None:
    """Nothing that is imported on the way loads torch either."""
    names = ["nanovllm", *sorted(name for name in module_names() if is_one_of(name, TORCH_FREE))]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_package_is_usable_without_loading_ray() -> None:
    """An extra: only commands with several engines load it."""
    names = ("llm", "engine.startup", "entrypoints.cli.main", "entrypoints.server.lifecycle")
    names += tuple(f"entrypoints.cluster.{name}" for name in ("front", "resources", "batch_process"))
    modules = ", ".join(f"nanovllm.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_kvcache_exports_the_names_that_people_look_for() -> None:
    names = "BlockManager, HybridKVCacheManager"
    code = f"from nanovllm.kvcache import {names}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    from nanovllm.kvcache import OffloadEngine

    assert OffloadEngine.__name__ == "OffloadEngine"
