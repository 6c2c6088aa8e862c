"""Writes what `nanovllm plan` prints below each of its commands in docs/install.md: `python tests/package/recipes.py`.

`make docs` does this, too.
"""

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

from nanovllm.entrypoints.cli import main as cli

INSTALL = Path(__file__).parents[2] / "docs" / "install.md"
SHOWN = ("weights", "slots", "KV cache", "GPU memory", "CPU pool", "experts", "sequences", "decode", "prefill", "chose")
RECIPE = re.compile(r"^\$ nanovllm (plan (?:.*\\\n)*.*\n)((?:  .*\n)*)", re.MULTILINE)


def plan_output(arguments: str) -> str:
    """The lines of a plan that the document shows. The plan must work."""
    out = io.StringIO()
    with redirect_stdout(out):
        status = cli.main(shlex.split(arguments.replace("\\\n", " ")))
    assert status == 0, f"nanovllm {arguments} ends with status {status}"
    begins = tuple(f"  {label} " for label in SHOWN)
    return "".join(line for line in out.getvalue().splitlines(keepends=True) if line.startswith(begins))


def write_outputs(text: str) -> str:
    return RECIPE.sub(lambda recipe: f"$ nanovllm {recipe[1]}{plan_output(recipe[1])}", text)


if __name__ == "__main__":
    INSTALL.write_text(write_outputs(INSTALL.read_text(encoding="utf-8")), encoding="utf-8")
