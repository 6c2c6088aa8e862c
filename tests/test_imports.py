"""The import rules, read from the source: what each part of the package may know about.

A part is a folder of the package, a folder of `kvcache` or `attention`, or a module at the top.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent

# Part -> the parts it may import, besides itself. Imports go downwards only.
OPTIONS = {"config", "sampling_params", "errors", "checkpoint", "utils"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "utils": set(),
    "sampling_params": {"errors", "utils"},
    "checkpoint": {"errors", "sampling_params", "utils"},
    "config": {"errors", "sampling_params", "checkpoint", "utils"},
    "core": OPTIONS,
    "capacity": OPTIONS | {"core"},
    "device": OPTIONS,
    "kernels": {"device", "core"},
    "layers": OPTIONS | {"device", "kernels"},
    "cpu_attention": {"errors", "utils"},
    "attention": {"layers", "utils"},
    "attention.backends": OPTIONS | {"attention", "layers", "kernels", "device", "core"},
    "kvcache": {"kvcache.policy", "kvcache.transfer"},
    "kvcache.policy": OPTIONS | {"core"},
    "kvcache.disk": OPTIONS | {"core", "kvcache.policy"},
    "kvcache.transfer": OPTIONS | {"core", "cpu_attention", "device", "kvcache.policy", "kvcache.disk"},
    "models": OPTIONS | {"attention", "layers", "device"},
    "runner": OPTIONS
    | {
        "core",
        "cpu_attention",
        "device",
        "kernels",
        "layers",
        "attention",
        "attention.backends",
        "kvcache.disk",
        "kvcache.transfer",
        "models",
    },
    "executor": {"errors", "device", "core"},
    "scheduling": {"sampling_params", "core", "kvcache.policy", "kvcache.disk", "speculation"},
    "speculation": OPTIONS | {"core"},
    "text": OPTIONS | {"core"},
    "engine": OPTIONS
    | {
        "core",
        "capacity",
        "cpu_attention",
        "device",
        "attention.backends",
        "demo",
        "kvcache.policy",
        "kvcache.disk",
        "runner",
        "executor",
        "scheduling",
        "speculation",
    },
    "demo": OPTIONS,
    "llm": OPTIONS | {"core", "capacity", "scheduling", "engine", "text"},
    "request_stream": {"errors", "core"},
    "async_llm": OPTIONS | {"core", "engine", "text", "llm", "request_stream"},
    "server": OPTIONS | {"core", "demo", "text", "llm", "request_stream", "async_llm", "nanovllm"},
    "cluster": OPTIONS | {"core", "capacity", "text", "llm", "request_stream", "async_llm", "server", "nanovllm"},
    "cli": OPTIONS
    | {"cluster", "core", "capacity", "device", "engine", "kvcache.disk", "text", "llm", "server", "demo", "nanovllm"},
    "nanovllm": {"errors", "utils", "llm", "async_llm", "sampling_params"},
    "__main__": {"cli"},
}
TORCH_FREE = {"errors", "sampling_params", "config", "checkpoint", "core", "capacity", "kvcache.policy", "kvcache.disk"}
TORCH_FREE |= {"scheduling", "speculation"}
MAY_IMPORT_TRITON = {"kernels"}
MAY_IMPORT_RAY = {"nanovllm.cluster", "nanovllm.executor.ray_reservation"}
MAY_USE_THE_DEVICE = {"device", "kernels", "attention.backends", "kvcache.transfer", "runner"}


def module_names() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def part_of(module: str) -> str:
    """The longest name of a part that the module lies in."""
    names = module.split(".")[1:] or ["nanovllm"]
    return next(part for k in (2, 1) if (part := ".".join(names[:k])) in ALLOWED)


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
    part = part_of(module)
    broken = [f"relative import {name}" for name in imported if name.startswith(".")]
    for name in imported_modules(tree, modules):
        if part_of(name) not in ALLOWED[part] | {part}:
            broken.append(f"{part} imports {name}, which belongs to {part_of(name)}")
    if part in TORCH_FREE and any(is_in(name, "torch") for name in imported):
        broken.append("imports torch")
    if part not in MAY_IMPORT_TRITON and any(is_in(name, "triton") for name in imported):
        broken.append("imports triton")
    if not any(is_in(module, name) for name in MAY_IMPORT_RAY) and any(is_in(name, "ray") for name in imported):
        broken.append("imports ray")
    if part not in MAY_USE_THE_DEVICE and uses_torch_cuda(tree):
        broken.append("uses torch.cuda")
    if part == "kernels" and any(is_in(name, "torch") for name in imported) and not postpones_annotations(tree):
        broken.append("reads torch for its annotations")  # the process that compiles kernels would load it
    if part == "kernels":  # for the same reason
        at_run_time = ast.Module([node for node in tree.body if not is_for_annotations(node)], [])
        needed = {name for name in imported_modules(at_run_time, modules) if part_of(name) == "device"}
        broken += [f"loads torch with {name}" for name in needed - {"nanovllm.device.kernel_target"}]
    return broken


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


def test_parts_are_allowed_no_circle() -> None:
    assert find_circle(ALLOWED) is None


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
        ("nanovllm.layers.linear", "from nanovllm.scheduling.scheduler import Scheduler", "layers imports"),
        ("nanovllm.layers.linear", "def f():\n    import nanovllm.models.decoder", "layers imports"),
        ("nanovllm.attention.base", "from nanovllm.kvcache.transfer import streams", "attention imports"),
        ("nanovllm.attention.base", "from nanovllm.attention.backends.a import b", "attention imports"),
        (
            "nanovllm.kvcache.transfer.streams",
            "from nanovllm.attention.base import PagedBatch",
            "kvcache.transfer imports",
        ),
        (
            "nanovllm.kvcache.policy.block_manager",
            "from nanovllm.kvcache.transfer import streams",
            "kvcache.policy imports",
        ),
        ("nanovllm.scheduling.scheduler", "from nanovllm.llm import LLM", "scheduling imports"),
        ("nanovllm.models.decoder", "from . import loader", "relative import"),
        ("nanovllm.scheduling.scheduler", "from torch import Tensor", "imports torch"),
        ("nanovllm.layers.linear", "import triton.language as tl", "imports triton"),
        ("nanovllm.executor.processes", "def f():\n    from ray.util import placement_group", "imports ray"),
        ("nanovllm.layers.linear", "import torch\ntorch.cuda.synchronize()", "uses torch.cuda"),
        ("nanovllm.layers.linear", "from torch import cuda", "uses torch.cuda"),
        ("nanovllm.kernels.fused", "import torch\ndef f(x: torch.Tensor): ...", "reads torch"),
        ("nanovllm.kernels.fused", "from nanovllm.device.tp_group import TPGroup", "loads torch"),
    ],
)
def test_broken_rules_bad_import_complains(module: str, source: str, complaint: str) -> None:
    modules = {"scheduling.scheduler", "models.decoder", "kvcache.transfer.streams", "llm", "attention.base"}
    modules |= {"device.tp_group"}
    names = {f"nanovllm.{name}" for name in modules | {"attention.backends.a"}}
    broken = broken_rules(module, source, names)
    assert any(rule.startswith(complaint) for rule in broken), broken


def test_broken_rules_good_imports_pass() -> None:
    modules = {"nanovllm.layers.linear", "nanovllm.core.step_plan"}
    assert not broken_rules("nanovllm.models.decoder", "import torch\nfrom nanovllm.layers import linear", modules)
    assert not broken_rules(
        "nanovllm.kvcache.policy.block_manager", "from nanovllm.core.step_plan import KVMoves", modules
    )


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
    names = ["nanovllm", *sorted(name for name in module_names() if part_of(name) in TORCH_FREE)]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_package_is_usable_without_loading_ray() -> None:
    """An extra: only what was asked for several engines, or for ranks that Ray places, loads it."""
    names = ("llm", "cli.main", "engine.startup", "server.lifecycle")
    names += tuple(f"cluster.{name}" for name in ("front", "options", "resources", "routing"))
    modules = ", ".join(f"nanovllm.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_kvcache_exports_the_names_that_people_look_for() -> None:
    names = "BlockManager, HybridKVCacheManager"
    code = f"from nanovllm.kvcache import {names}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    from nanovllm.kvcache import OffloadEngine

    assert OffloadEngine.__module__.startswith("nanovllm.kvcache")
