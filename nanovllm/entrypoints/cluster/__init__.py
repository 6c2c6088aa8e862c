"""Jobs over files, and several engines on one machine or many, which Ray places, feeds and restarts.

One engine has one GPU, or a tensor-parallel group of GPUs. `nanovllm batch` runs files through one engine, without Ray,
or through several, and `nanovllm serve --num-replicas` serves requests with several engines. Ray is an extra. Only this
folder imports Ray, and only when a command asks for several engines or for a cluster.
"""

import os

# Otherwise a thread that Ray Data does not end would connect again, or start Ray, with its next call. Ray reads this
# variable when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
