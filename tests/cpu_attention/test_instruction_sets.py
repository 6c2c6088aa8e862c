from pathlib import Path

import pytest

from nanovllm.cpu_attention import compiled, instruction_sets, kernels
from nanovllm.cpu_attention.compiled import CompiledKernel, UnusableLibraryError, load_library
from nanovllm.cpu_attention.instruction_sets import INSTRUCTION_SETS, InstructionSet, cpu_flags, loadable, source_hash
from nanovllm.errors import ConfigError

AVX2 = "fpu sse sse2 avx fma f16c avx2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl avx512_bf16"
NAMES = [variant.name for variant in INSTRUCTION_SETS]


@pytest.fixture
def all_built(tmp_path: Path) -> Path:
    for variant in INSTRUCTION_SETS:
        variant.library(tmp_path).touch()
    return tmp_path


def cpuinfo(tmp_path: Path, flags: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: a cpu with flags\nflags\t\t: {flags}\nbugs\t\t: none\n")
    return path


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (f"{AVX512} amx_tile amx_bf16", "amx"),
        (f"{AVX512} amx_tile", "avx512_bf16"),
        (AVX512, "avx512_bf16"),
        (AVX512.replace("avx512_bf16", ""), "avx2"),
        (AVX512.replace("avx512vl", ""), "avx2"),
        (AVX2, "avx2"),
        (AVX2.replace("fma", ""), "portable"),
        ("", "portable"),
    ],
)
def test_loadable_are_those_whose_instructions_the_cpu_has(
    all_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, first: str
) -> None:
    monkeypatch.setattr(instruction_sets, "is_x86", lambda: True)
    found = [variant.name for variant in loadable(cpu_flags(cpuinfo(tmp_path, flags)), all_built)]
    assert found == NAMES[NAMES.index(first) :]


def test_loadable_must_be_built(all_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "is_x86", lambda: True)
    (all_built / "_attention_avx2.so").unlink()
    assert [variant.name for variant in loadable(AVX2.split(), all_built)] == ["portable"]


def test_loadable_elsewhere_is_the_portable_variant(all_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "is_x86", lambda: False)
    assert [variant.name for variant in loadable(AVX512.split(), all_built)] == ["portable"]


def test_cpu_flags_unknown_are_none(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "missing") == set()
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(tmp_path / "arm") == set()


def test_source_hash_follows_every_source(tmp_path: Path) -> None:
    (tmp_path / "b.h").write_text("")
    (tmp_path / "a.cpp").write_text("a")
    assert source_hash(tmp_path) == 0xAF63DC4C8601EC8C  # FNV-1a of "a"
    (tmp_path / "b.h").write_text("b")
    assert source_hash(tmp_path) != 0xAF63DC4C8601EC8C


def test_choose_kernel_never_loads_what_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: set())
    loaded = []
    monkeypatch.setattr(compiled, "load_library", lambda path: loaded.append(path.name) or load_library(path))
    kernel = kernels.choose_kernel([0])
    assert kernel.name in ("portable", "torch") and set(loaded) <= {"_attention_portable.so"}
    kernel.close()
    for name in ("amx", "avx512_bf16", "avx2"):
        with pytest.raises(ConfigError, match=f"kernel {name} cannot run here"):
            kernels.choose_kernel([0], name)


def test_choose_kernel_refused_by_the_system_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AMX is, where the kernel does not know it."""
    opened = []

    def refuse(self: object, library: object, *_: object) -> None:
        opened.append(library)
        raise UnusableLibraryError("the operating system refuses")

    monkeypatch.setattr(compiled._Engine, "__init__", refuse)
    assert kernels.choose_kernel([0]).name == "torch"
    assert len(opened) == len(loadable())


def test_library_of_another_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = INSTRUCTION_SETS[-1]
    if not portable.library().exists():
        pytest.skip("nothing was built")
    monkeypatch.setattr(instruction_sets, "source_hash", lambda: 1)
    with pytest.raises(UnusableLibraryError, match=r"another source; run python -m nanovllm.cpu_attention.build"):
        CompiledKernel(portable, [0])


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which choose_kernel looks for the libraries."""
    monkeypatch.setattr(InstructionSet, "library", lambda self, *_: tmp_path / f"_attention_{self.name}.so")
    return tmp_path


def test_choose_kernel_without_any_library_warns_once(own_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels.choose_kernel([0]).close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nanovllm", "WARNING")
    assert "uses the torch kernel" in record.message and "_attention_portable.so has not been built" in record.message
    assert record.message.count("run python -m nanovllm.cpu_attention.build") == 1


def test_choose_kernel_names_the_libraries_that_the_cpu_could_run(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instruction_sets, "is_x86", lambda: True)
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: set(AVX2.split()))
    (own_folder / "_attention_avx2.so").touch()
    kernels.choose_kernel([0]).close()
    (record,) = caplog.records
    assert "_attention_avx2.so cannot be loaded" in record.message and "portable.so has not been" in record.message
    assert "amx" not in record.message and "avx512" not in record.message


def test_choose_kernel_with_outdated_libraries_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not loadable():
        pytest.skip("nothing was built")
    monkeypatch.setattr(instruction_sets, "source_hash", lambda: 1)
    assert kernels.choose_kernel([0]).name == "torch"
    (record,) = caplog.records
    assert f"{loadable()[0].library().name} was built from another source" in record.message


def test_choose_kernel_says_nothing_where_a_build_would_not_help(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kernels.choose_kernel([0], "torch").name == "torch"
    assert kernels.choose_kernel([0], head_dim=72).name == "torch"
    with pytest.raises(ConfigError, match=r"has not been built; run python -m nanovllm.cpu_attention.build"):
        kernels.choose_kernel([0], "portable")
    assert not caplog.records


def test_choose_kernel_of_a_complete_build_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if len(loadable()) < sum(not instruction_sets.why_not_runnable(it, cpu_flags()) for it in INSTRUCTION_SETS):
        pytest.skip("something was not built")
    kernels.choose_kernel([0]).close()
    assert not caplog.records


def test_library_that_is_none_is_refused(all_built: Path) -> None:
    with pytest.raises(UnusableLibraryError, match="cannot be loaded"):
        load_library(all_built / "_attention_portable.so")


def test_why_unavailable_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(instruction_sets, "loadable", list)
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: set(AVX2.split()))
    assert "lacks amx_bf16" in str(CompiledKernel.why_unavailable(128, torch.bfloat16))
