"""Several engines, on one machine or many: Ray places them, feeds them and restarts them.

One engine has one GPU, or a tensor-parallel group of GPUs. `nanovllm batch` runs files through engines, and `nanovllm
serve --num-replicas` serves several. Ray is an extra, which only this folder imports, and only when a command asks for
several engines.
"""

import os

# Otherwise a thread that Ray Data leaves behind would connect again, or start Ray, with its next call. Ray reads this
# when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
