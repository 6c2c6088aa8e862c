"""`nanovllm serve` with faults that a test switches on by files in the folder that $FAULTS names.

`fail`: the next step of an engine fails, and the file is gone. `slow`: each step takes 0.2 s longer while the file
exists, so that an answer of hundreds of tokens outlasts every delay of a busy machine.
"""

import os
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.cli import main

_load = main.load_engine


def load_faulty_engine(faults: Path, args: Namespace) -> Any:
    engine = _load(args)
    step = engine.llm.engine.next_output

    def next_output(*arguments: Any) -> Any:
        if (faults / "slow").exists():
            time.sleep(0.2)
        try:
            (faults / "fail").unlink()
        except FileNotFoundError:
            return step(*arguments)
        raise RuntimeError("injected")

    engine.llm.engine.next_output = next_output
    return engine


if __name__ == "__main__":
    main.load_engine = partial(load_faulty_engine, Path(os.environ["FAULTS"]))
    sys.exit(main.main(sys.argv[1:]))
