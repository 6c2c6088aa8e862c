"""Several engines, on one machine or many: Ray places them, feeds them and restarts them.

One engine has one GPU, or a tensor-parallel group of GPUs. `nanovllm batch` runs files through engines, and `nanovllm
serve --num-replicas` serves several. Nothing outside this folder imports Ray, which is an extra; the folder is imported
only where several engines are asked for.
"""
