"""Jobs over files, and several engines on one machine or many, which Ray places, feeds and restarts.

One engine has one GPU, or a tensor-parallel group of GPUs. `nanovllm batch` runs files through one engine, without Ray,
or through several, and `nanovllm serve --num-replicas` serves requests with several engines. Ray is an extra. Only this
folder imports Ray, and only when a command asks for several engines or for a cluster.
"""

import os

# Ray reads these variables when it is imported.
# A thread that Ray Data does not end would otherwise connect again, or start Ray, with its next call.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Ray copies the logs of replicas to ours. By default it leaves out a line that equals another replica's line in all but
# its numbers, so that requests would be missing from the log.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
