"""Compiles the CPU attention kernels when the package is installed or a wheel is built.

A wheel with compiled kernels is for this kind of machine only. Without a compiler the wheel is pure Python.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sys.path.insert(0, self.root)  # the package is not installed yet
        try:
            from nanovllm.cpu_attention.build import build
        finally:
            sys.path.remove(self.root)
        libraries = build(root / "nanovllm" / "cpu_attention")
        if libraries:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["artifacts"] += [f"/{library.relative_to(root).as_posix()}" for library in libraries]
