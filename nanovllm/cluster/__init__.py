"""Several engines, on one machine or many: Ray places them, feeds them and restarts them.

One engine has one GPU, or a tensor-parallel group of GPUs. `nanovllm batch` runs files through engines, and `nanovllm
serve --num-replicas` serves several. Ray is an extra. Apart from this folder only `executor/ray_*.py` imports it, which
starts the ranks of one engine on one machine; both are imported only where they are asked for.
"""
