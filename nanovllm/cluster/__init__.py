"""Several engines, on one machine or many: Ray places them, feeds them and restarts them.

One engine has one GPU, or a tensor-parallel group of GPUs. `nanovllm batch` runs files through engines (batch_*.py), and
`nanovllm serve --num-replicas` serves several (service_*.py). Nothing outside this folder imports Ray, and the folder is
imported only by what needs several engines: Ray is an extra.
"""
