import logging
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanovllm.capabilities.cpu_attention import build
from nanovllm.capabilities.cpu_attention.build import BUILD_COMMAND, INSTRUCTION_SETS, InstructionSet, library_path
from nanovllm.capabilities.cpu_attention.kernels import CompiledKernel, UnusableLibraryError, choose_kernel
from nanovllm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
AMX, AVX512_BF16, AVX2_SET = INSTRUCTION_SETS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for libraries, instead of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanovllm"


@pytest.fixture
def fake_compiler(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments to its output, takes a while, and knows no AMX."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-mamx-*) echo "note: x" >&2; echo "error: unrecognized option -mamx-tile" >&2; exit 1;; esac\n'
        'output=$(echo "$*" | sed "s/.* -o //")\n'
        'echo "$@" > "$output"; sleep 0.05; echo end >> "$output"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"{script} -g")
    return script


def test_compile_variant_without_a_compiler_names_the_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert "no C++ compiler (c++, g++, clang++); install one" in str(build.compile_variant(AVX2_SET))
    monkeypatch.setenv("CXX", "/nonexistent/c++ -O2")
    assert "no C++ compiler (/nonexistent/c++ -O2); install one" in str(build.compile_variant(AVX2_SET))
    assert not cache.exists()


@pytest.mark.usefixtures("fake_compiler")
def test_compile_variant_where_nothing_can_be_written_names_the_remedy(cache: Path) -> None:
    cache.parent.touch()  # a file, where a folder is needed
    assert "Not a directory" in (problem := str(build.compile_variant(AVX2_SET))) and "set XDG_CACHE_HOME" in problem


@pytest.mark.usefixtures("fake_compiler")
def test_build_command_skips_a_variant_that_does_not_compile(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: True)
    assert build.main() == 0
    assert {*cache.iterdir()} == {library_path(AVX512_BF16), library_path(AVX2_SET)}
    lines = capsys.readouterr().out.splitlines()
    assert "amx does not compile: error: unrecognized option -mamx-tile; GCC 12" in lines[0] and len(lines) == 3
    options = library_path(AVX2_SET).read_text().split()
    assert {"-g", "-O3", "-mavx2", "-mfma", "-mf16c"} <= set(options) and "-mavx512f" not in options
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert build.main() == 1


def test_build_command_elsewhere_makes_nothing_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: False)
    assert build.main() == 0 and not cache.exists()
    assert "nothing to build for" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_compiler")
def test_compile_variant_at_once_in_many_processes_leaves_one_whole_library(cache: Path) -> None:
    """Each process compiles in its own folder; no process sees an unfinished library."""
    program = (
        "from nanovllm.capabilities.cpu_attention.build import *\n"
        "assert compile_variant(INSTRUCTION_SETS[-1]) is None\n"
        "assert library_path(INSTRUCTION_SETS[-1]).read_text().endswith('end\\n')"
    )
    with ThreadPoolExecutor(6) as pool:
        command = [sys.executable, "-S", "-c", program]
        assert [*pool.map(lambda _: subprocess.run(command, cwd=ROOT).returncode, range(6))] == [0] * 6
    assert [*cache.iterdir()] == [library_path(AVX2_SET)]


def test_build_needs_nothing_but_the_source_tree() -> None:
    """The GPU machine builds where neither torch nor numpy may be importable."""
    code = (
        "import sys; import nanovllm.capabilities.cpu_attention.build; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT).returncode == 0


def test_library_path_follows_sources_flags_and_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {library_path(variant) for variant in INSTRUCTION_SETS} | {library_path(AVX2_SET._replace(name="avx2"))}
    assert len(paths) == 3 and all(path.parent == cache for path in paths)
    paths.add(library_path(AVX2_SET._replace(compile_flags=("-mavx2",))))
    monkeypatch.setattr(build, "FLAGS", ("-O2",))
    paths.add(library_path(AVX2_SET))
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    build.SOURCES.mkdir()
    for text in ("a", "b"):
        (build.SOURCES / "attention.cpp").write_text(text)
        paths.add(library_path(AVX2_SET))
    assert len(paths) == 7
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert library_path(AVX2_SET).parent == Path.home() / ".cache" / "nanovllm"


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
    """Loading any other variant would end the process. After a refused variant, as AMX may be, comes the next one."""
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


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Another test may have made the logger tell more."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def runnable_variants() -> list[InstructionSet]:
    return [variant for variant in INSTRUCTION_SETS if not build.missing_flags(variant, build.cpu_flags())]


def test_choose_kernel_takes_the_best_that_compiles_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runnable = runnable_variants()
    if not runnable or not (library_path(runnable[0]).exists() or build.compile_variant(runnable[0]) is None):
        pytest.skip("the best variant cannot be compiled here")
    kernel = choose_kernel([0])
    assert kernel.name == runnable[0].name or runnable[0].name == "amx"  # which the operating system may refuse
    kernel.close()
    assert not warnings_in(caplog)


@pytest.mark.slow
def test_choose_kernel_with_an_empty_cache_compiles_only_what_it_uses_and_only_once(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runnable = runnable_variants()
    if not runnable or build.find_compiler() is None:
        pytest.skip("nothing can be compiled here")
    caplog.set_level(logging.INFO, "nanovllm")
    for _ in range(2):
        choose_kernel([0], runnable[-1].name).close()
    assert [*cache.iterdir()] == [library_path(runnable[-1])]
    (record,) = caplog.records
    assert record.message == f"attention on the CPU: compiling {library_path(runnable[-1])}, once"


@pytest.fixture
def avx512_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: set(AVX512.split()))


@pytest.mark.usefixtures("avx512_cpu", "cache")
def test_choose_kernel_without_a_compiler_warns_once_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    caplog.set_level(logging.INFO, "nanovllm")
    choose_kernel([0]).close()
    (record,) = caplog.records  # and no line that says that something is compiled
    assert (record.name, record.levelname) == ("nanovllm", "WARNING") and "uses the torch kernel" in record.message
    assert record.message.count("no C++ compiler (/nonexistent/c++); install one, such as the package g++") == 1


@pytest.mark.usefixtures("avx512_cpu", "fake_compiler")
def test_choose_kernel_with_libraries_that_cannot_be_loaded_warns(caplog: pytest.LogCaptureFixture) -> None:
    """The fake compiler's output is text, as if the file were damaged."""
    choose_kernel([0]).close()
    (record,) = warnings_in(caplog)
    assert f"{library_path(AVX512_BF16)} cannot be loaded" in record.message
    assert record.message.endswith(f"run {BUILD_COMMAND}")


@pytest.mark.usefixtures("avx512_cpu", "cache")
def test_choose_kernel_says_nothing_where_compiling_would_not_help(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert choose_kernel([0], "torch").name == "torch"
    assert choose_kernel([0], head_dim=72).name == "torch"
    with pytest.raises(ConfigError, match=r"kernel avx2 cannot run here: there is no C\+\+ compiler"):
        choose_kernel([0], "avx2")
    assert not caplog.records
