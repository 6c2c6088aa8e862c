"""`nanovllm serve`, but the next step of an engine fails once the file that $FAILURE names exists. It fails once."""

import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.cli import main, serve

_load = serve.load_engine


def load_failing_engine(failure: Path, args: Namespace) -> Any:
    engine = _load(args)
    step = engine.llm.engine.next_output

    def next_output(*arguments: Any) -> Any:
        try:
            failure.unlink()
        except FileNotFoundError:
            return step(*arguments)
        raise RuntimeError("injected")

    engine.llm.engine.next_output = next_output
    return engine


if __name__ == "__main__":
    serve.load_engine = partial(load_failing_engine, Path(os.environ["FAILURE"]))
    sys.exit(main.main(sys.argv[1:]))
