"""`python -m nanovllm`."""

import sys

from nanovllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
