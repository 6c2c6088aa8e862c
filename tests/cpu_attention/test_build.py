import importlib.util
import stat
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from nanovllm.cpu_attention import build, instruction_sets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: True)


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments to its output and knows no AMX."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *amx*) echo "note: x" >&2; echo "error: unrecognized option -mamx-tile" >&2; exit 1;; esac\n'
        'echo "$@" > "$(echo "$*" | sed "s/.* -o //")"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"{script} -g")
    return script


def test_build_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build(tmp_path) == []
    monkeypatch.setenv("CXX", "/nonexistent/c++ -O2")
    assert build.build(tmp_path) == []
    lines = capsys.readouterr().out.splitlines()
    assert all("no C++ compiler" in line and "torch's kernel" in line for line in lines) and len(lines) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("fake_compiler")
def test_build_skips_a_variant_that_does_not_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "_attention_amx.so").write_text("from another source")
    assert [path.name for path in build.build(folder)] == [
        f"_attention_{name}.so" for name in ("avx512_bf16", "avx2", "portable")
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"_attention_{name}.so" for name in ("avx2", "avx512_bf16", "portable")
    ]
    assert "amx skipped: error: unrecognized option -mamx-tile" in capsys.readouterr().out
    options = (folder / "_attention_avx2.so").read_text().split()
    assert {"-g", "-O3", "-mavx2", "-mfma", "-mf16c"} <= set(options) and "-mavx512f" not in options


@pytest.mark.usefixtures("fake_compiler")
def test_build_elsewhere_makes_only_the_portable_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: False)
    assert [path.name for path in build.build(tmp_path)] == ["_attention_portable.so"]


def test_build_needs_nothing_but_the_source_tree() -> None:
    """The GPU machine builds where neither torch nor numpy may be importable."""
    code = (
        "import sys; import nanovllm.cpu_attention.build; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT).returncode == 0


def test_installed_libraries_are_not_in_git() -> None:
    assert "nanovllm/cpu_attention/*.so*" in (ROOT / ".gitignore").read_text().split()


def test_makefile_rebuilds_when_a_source_changes() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "COMPILED_FROM := $(wildcard nanovllm/cpu_attention/source/*)" in text


# -- hatch_build.py --------------------------------------------------------------------------------------------------


def run_hook(monkeypatch: pytest.MonkeyPatch, root: Path) -> dict[str, object]:
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.CustomBuildHook()
    hook.root = str(root)
    build_data: dict[str, object] = {"artifacts": [], "pure_python": True}
    hook.initialize("standard", build_data)
    return build_data


@pytest.mark.usefixtures("fake_compiler")
def test_hook_adds_the_libraries_and_a_platform_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nanovllm" / "cpu_attention").mkdir(parents=True)
    build_data = run_hook(monkeypatch, tmp_path)
    assert build_data["pure_python"] is False and str(build_data["tag"]).startswith("py3-none-linux_")
    names = ("avx512_bf16", "avx2", "portable")
    assert build_data["artifacts"] == [f"/nanovllm/cpu_attention/_attention_{name}.so" for name in names]


def test_hook_without_a_compiler_leaves_a_pure_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert run_hook(monkeypatch, tmp_path) == {"artifacts": [], "pure_python": True}


@pytest.mark.parametrize("has_compiler", [True, False])
def test_wheel_holds_libraries_where_there_is_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_compiler: Path, has_compiler: bool
) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    if not has_compiler:
        monkeypatch.setenv("CXX", "/nonexistent/c++")
    tree = tmp_path / "tree"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if name.split("/")[0] not in ("tests", "docs"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(libraries) == 3 * has_compiler
    assert wheel.name.endswith("-py3-none-any.whl") != has_compiler
    assert "nanovllm/cpu_attention/source/attention.cpp" in zipfile.ZipFile(wheel).namelist()


def test_build_of_every_variant_defines_the_source(tmp_path: Path, fake_compiler: Path) -> None:
    (library, *_) = build.build(tmp_path)
    assert f"-DSOURCE_HASH={instruction_sets.source_hash():#x}ull" in library.read_text()
