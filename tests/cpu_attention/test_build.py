import importlib.util
import stat
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from nanovllm.cpu_attention import build
from nanovllm.cpu_attention.build import INSTRUCTION_SETS, InstructionSet, source_hash
from nanovllm.cpu_attention.kernels import CompiledKernel, UnusableLibraryError, choose_kernel, load_library
from nanovllm.errors import ConfigError

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
    assert [path.name for path in build.build(folder)] == [f"_attention_{name}.so" for name in ("avx512_bf16", "avx2")]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"_attention_{name}.so" for name in ("avx2", "avx512_bf16")
    ]
    assert "amx skipped: error: unrecognized option -mamx-tile" in capsys.readouterr().out
    options = (folder / "_attention_avx2.so").read_text().split()
    assert {"-g", "-O3", "-mavx2", "-mfma", "-mf16c"} <= set(options) and "-mavx512f" not in options


@pytest.mark.usefixtures("fake_compiler")
def test_build_elsewhere_makes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: False)
    assert build.build(tmp_path) == []
    assert "nothing to build for" in capsys.readouterr().out


def test_build_needs_nothing_but_the_source_tree() -> None:
    """The GPU machine builds where neither torch nor numpy may be importable."""
    code = (
        "import sys; import nanovllm.cpu_attention.build; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT).returncode == 0


def test_build_of_every_variant_defines_the_source(tmp_path: Path, fake_compiler: Path) -> None:
    (library, *_) = build.build(tmp_path)
    assert f"-DSOURCE_HASH={source_hash():#x}ull" in library.read_text()


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
    names = ("avx512_bf16", "avx2")
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
    assert len(libraries) == 2 * has_compiler
    assert wheel.name.endswith("-py3-none-any.whl") != has_compiler
    assert "nanovllm/cpu_attention/source/attention.cpp" in zipfile.ZipFile(wheel).namelist()


# -- the choice ------------------------------------------------------------------------------------------------------

AVX2 = "fpu sse sse2 avx fma f16c avx2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl avx512_bf16"
NAMES = [variant.name for variant in INSTRUCTION_SETS]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the variants that choose_kernel tries to open. The operating system refuses all of them."""
    names: list[str] = []

    def refuse(self: object, variant: InstructionSet, *_: object) -> None:
        names.append(variant.name)
        raise UnusableLibraryError("the operating system refuses")

    monkeypatch.setattr(CompiledKernel, "__init__", refuse)
    return names


def test_choose_kernel_tries_only_what_the_cpu_can_run_best_first(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading another would end the process. Behind a variant that is refused, as AMX may be, comes the next."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(build, "CPUINFO", path)
    for flags, first in {
        f"{AVX512} amx_tile amx_bf16": "amx",
        f"{AVX512} amx_tile": "avx512_bf16",
        AVX512: "avx512_bf16",
        AVX512.replace("avx512_bf16", ""): "avx2",
        AVX512.replace("avx512vl", ""): "avx2",
        AVX2: "avx2",
        AVX2.replace("fma", ""): None,
        "": None,
    }.items():
        path.write_text(f"processor\t: 0\nmodel name\t: a cpu with flags\nflags\t\t: {flags}\nbugs\t\t: none\n")
        assert choose_kernel([0]).name == "torch"
        assert opened == ([] if first is None else NAMES[NAMES.index(first) :])
        opened.clear()
    for is_arm in (True, False):  # the other system does not say
        path.write_text("processor\t: 0\nFeatures\t: fp asimd\n") if is_arm else path.unlink()
        assert choose_kernel([0]).name == "torch" and not opened
        for name in NAMES:
            with pytest.raises(ConfigError, match=f"kernel {name} cannot run here: this processor lacks .*avx2"):
                choose_kernel([0], name)


def test_choose_kernel_takes_the_best_of_a_complete_build_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runnable = [variant for variant in INSTRUCTION_SETS if not build.missing_flags(variant, build.cpu_flags())]
    if not runnable or build.find_compiler() is None:
        pytest.skip("nothing can be built here")
    assert runnable[-1].library().exists(), "run python -m nanovllm.cpu_attention.build"
    if not all(variant.library().exists() for variant in runnable):
        pytest.skip("the compiler does not know all variants")
    kernel = choose_kernel([0])
    assert kernel.name == runnable[0].name or runnable[0].name == "amx"  # which the operating system may refuse
    kernel.close()
    assert not caplog.records


def test_source_hash_follows_every_source(tmp_path: Path) -> None:
    (tmp_path / "b.h").write_text("")
    (tmp_path / "a.cpp").write_text("a")
    assert source_hash(tmp_path) == 0xAF63DC4C8601EC8C  # FNV-1a of "a"
    (tmp_path / "b.h").write_text("b")
    assert source_hash(tmp_path) != 0xAF63DC4C8601EC8C


def test_choose_kernel_with_outdated_libraries_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = [it for it in INSTRUCTION_SETS if not build.missing_flags(it, build.cpu_flags()) and it.library().exists()]
    if not built:
        pytest.skip("nothing was built")
    monkeypatch.setattr(build, "source_hash", lambda: 1)
    with pytest.raises(UnusableLibraryError, match=r"another source; run python -m nanovllm.cpu_attention.build"):
        load_library(built[0].library())
    assert choose_kernel([0]).name == "torch"
    (record,) = caplog.records
    assert f"{built[0].library().name} was built from another source" in record.message


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which choose_kernel looks for the libraries, on a processor with AVX-512."""
    monkeypatch.setattr(InstructionSet, "library", lambda self, *_: tmp_path / f"_attention_{self.name}.so")
    monkeypatch.setattr(build, "cpu_flags", lambda: set(AVX512.split()))
    return tmp_path


def test_choose_kernel_names_the_libraries_that_the_cpu_could_run(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own_folder / "_attention_avx2.so").touch()
    choose_kernel([0]).close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nanovllm", "WARNING") and "uses the torch kernel" in record.message
    assert "_attention_avx512_bf16.so has not been built" in record.message and "amx" not in record.message
    assert "_attention_avx2.so cannot be loaded" in record.message
    assert record.message.count("run python -m nanovllm.cpu_attention.build") == 1


@pytest.mark.usefixtures("own_folder")
def test_choose_kernel_says_nothing_where_a_build_would_not_help(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_kernel([0], "torch").name == "torch"
    assert choose_kernel([0], head_dim=72).name == "torch"
    with pytest.raises(ConfigError, match=r"has not been built; run python -m nanovllm.cpu_attention.build"):
        choose_kernel([0], "avx2")
    assert not caplog.records
