"""The output of every benchmark: samples of a figure, the versions that it depends on, and the result as the last line.

Does not import torch, so that a load generator starts fast and needs no engine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Samples:
    """One quantity, measured in several runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:,.1f} ({min(self.values):,.1f} to {max(self.values):,.1f})"

    def as_json(self, key: str) -> dict[str, float]:
        return {key: self.median, f"{key}_min": min(self.values), f"{key}_max": max(self.values)}


def versions() -> dict[str, str]:
    """The versions that a measurement depends on, and the commit of the code."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    )
    # NANOVLLM_COMMIT names the commit if the tree is a copy without git.
    commit = os.environ.get("NANOVLLM_COMMIT") or found or "unknown"
    return {"python": platform.python_version(), "torch": metadata.version("torch"), "commit": commit}


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of this run, without the file that the result is written to and without secrets."""
    return {name: value for name, value in vars(args).items() if name not in ("json", "api_key")}


def report(result: dict[str, Any], json_file: str | None) -> None:
    """Print the result as the last line of the benchmark, and write it to a file if one is given."""
    line = json.dumps(result)
    if json_file:
        Path(json_file).write_text(line + "\n")
    print(line)
