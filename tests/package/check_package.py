"""Builds the sdist and the wheel, checks both, and uses the wheel as a user would (`make package`).

The wheel is built from the sdist and installed in a new environment outside the tree, by the Containerfile's command.
Also checks the Containerfile (hadolint) and compose.yaml (the schema of the Compose specification).
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

from nanovllm import __version__
from nanovllm.capabilities.cpu_attention import build

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
CONTAINERFILE = (ROOT / "Containerfile").read_text().replace("\\\n", "")
MUST_HAVE = (
    "py.typed",
    "entrypoints/server/page/index.html",
    "capabilities/cpu_attention/source/attention.cpp",
    "capabilities/cpu_experts/source/experts.h",
    "presets/qwen3-0.6b.json",
)
GENERATE = (
    *("generate", "--model", "demo", "--prompt", "The passkey is 4711.\nThe passkey is", "--max-tokens", "5"),
    *("--enable-cpu-offload", "--num-gpu-blocks", "2", "--kvcache-block-size", "256", "--max-model-len", "1024"),
)


def tracked_files(folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\n")) - {""}


def check_wheel_files(wheel: Path) -> None:
    """The wheel holds the package and the presets, all of it and nothing else, and is for every machine."""
    assert wheel.name == f"nanovllm-{__version__}-py3-none-any.whl", wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"nanovllm-{__version__}.dist-info"
    expected = tracked_files("nanovllm") | {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD")}
    expected |= {f"nanovllm/presets/{Path(name).name}" for name in tracked_files("benchmarks/configs")}
    expected |= {f"{info}/entry_points.txt", f"{info}/licenses/LICENSE"}
    assert names == expected, f"missing: {expected - names}; should not be there: {names - expected}"
    assert names >= {f"nanovllm/{name}" for name in MUST_HAVE}


def check_sdist_files(sdist: Path) -> None:
    """The sdist holds what builds, tests and explains the package, as git has it."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("nanovllm", "benchmarks", "tests", "docs", "LICENSE", "README.md", "pyproject.toml", "constraints.txt")
    expected = set().union(*map(tracked_files, folders))
    assert names >= expected, f"missing: {expected - names}"
    extra = {name for name in names - expected if name.split("/")[0] in folders}
    assert not extra, f"not in git: {extra}"


def run(
    command: Sequence[str | Path], cwd: Path, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def check_commands(bin_folder: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """The command line works in an empty folder. The first engine compiles a kernel; the next has no compiler."""
    nanovllm = bin_folder / "nanovllm"
    assert run([nanovllm, "--version"], folder, environment).stdout.strip() == f"nanovllm {__version__}"
    plan = run([nanovllm, "plan", "--model", "qwen3-0.6b", "--gpu", "RTX 4090"], folder, environment).stdout
    assert plan.startswith("plan for 1 x 40,960 tokens of qwen3-0.6b on RTX 4090"), plan

    is_runnable = any(not build.missing_flags(variant, build.cpu_flags()) for variant in build.INSTRUCTION_SETS)
    for compiler, cache in ((build.find_compiler(), "first"), (["/nonexistent/c++"], "second")):
        variables = {"XDG_CACHE_HOME": str(folder / cache), "CXX": shlex.join(compiler or [])}
        answer = run([nanovllm, *GENERATE], folder, {**environment, **variables})
        assert answer.stdout == " 4711\n", answer
        compiles = is_runnable and compiler is not None and cache == "first"
        assert len([*(folder / cache / "nanovllm").glob("*.so")]) == compiles, answer.stderr
        assert answer.stderr.count("there is no C++ compiler") == (is_runnable and not compiles), answer.stderr


def check_server(bin_folder: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """The server has its page, and the container's health check notices when it is ready."""
    with socket.socket() as reserved:  # so that no other process takes the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        check_server_on(reserved.getsockname()[1], bin_folder, folder, environment)


def check_server_on(port: int, bin_folder: Path, folder: Path, environment: Mapping[str, str]) -> None:
    address = f"127.0.0.1:{port}"
    (health_check,) = re.findall(r"^HEALTHCHECK .*?CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    ask, *arguments = [text.replace("127.0.0.1:8000", address) for text in json.loads(health_check)]
    serve = [bin_folder / "nanovllm", "serve", "--model", "demo", "--port", str(port)]
    deadline = time.monotonic() + 240
    with subprocess.Popen(serve, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            while subprocess.run([bin_folder / ask, *arguments], stderr=subprocess.DEVNULL).returncode:
                assert server.poll() is None and time.monotonic() < deadline, "the server is not ready"
                time.sleep(0.5)
            assert b"<title>" in urlopen(f"http://{address}/", timeout=240).read()
        finally:
            server.terminate()
    assert server.returncode == 0, server.returncode


def main() -> None:
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started:4.0f} s  {what}", flush=True)

    tools = Path(sys.executable).parent
    run([tools / "hadolint", "Containerfile"], ROOT)
    run([tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"], ROOT)
    say("Containerfile and compose.yaml are well-formed")
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--sdist", "--outdir", DIST], ROOT)
    (sdist,) = DIST.iterdir()
    check_sdist_files(sdist)
    say(sdist.name)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        with tarfile.open(sdist) as archive:
            archive.extractall(folder)
        (install,) = re.findall(r"^RUN (.*\$VENV.*)", CONTAINERFILE, re.MULTILINE)
        variables = os.environ | {"DIST": str(folder / "dist"), "VENV": str(folder / "venv")}
        run(["sh", "-c", install], folder / sdist.name.removesuffix(".tar.gz"), variables)
        (wheel,) = (folder / "dist").iterdir()
        check_wheel_files(wheel)
        shutil.copy(wheel, DIST)
        run([sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()], ROOT)
        bin_folder, empty = folder / "venv" / "bin", folder / "empty"
        run([bin_folder / "pip", "check"], folder)
        say(f"{wheel.name}, installed")
        empty.mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["XDG_CACHE_HOME"] = str(empty / "first")
        check_commands(bin_folder, empty, environment)
        check_server(bin_folder, empty, environment)
    say("version, plan, generate and serve work")


if __name__ == "__main__":
    main()
