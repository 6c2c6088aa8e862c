"""What `--help` says of each flag, by group. flags.py makes the flags themselves from the fields of dataclasses."""

MODEL_HELP = "a directory, a hub name (owner/name), demo (built in), or a preset with --load-format dummy"
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model and device": {
        "device": "auto, cpu, cuda or cuda:N",
        "dtype": "of weights and KV: auto (the model's own), float32, bfloat16 or float16",
        "load_format": "auto, safetensors, or dummy (random weights, for benchmarks)",
        "hf_overrides": "entries that replace those of the model's config.json, as a JSON object",
        "attn_backend": "attention kernels: auto (the fastest here), flash, cudnn, triton or torch",
        "enforce_eager": "no CUDA graphs",
        "tensor_parallel_size": "processes the model is spread over, one device each, 1 to 8",
        "generation_config": "sampling defaults of the model's generation_config.json: auto (use them) or none",
        "seed": "seed for random weights and for requests that set no seed",
    },
    "KV cache": {
        "max_model_len": "most tokens of prompt and answer together; unset: the model's own limit",
        "kvcache_block_size": "tokens per block, a multiple of 256; unset: 256, or 4096 where num_gpu_blocks is given",
        "enable_prefix_caching": "reuse the KV of earlier prompts that begin the same way",
        "gpu_memory_utilization": "share of the GPU's memory the engine may use",
        "num_kvcache_blocks": "blocks on the GPU without offload; -1: what fits",
    },
    "CPU offload": {
        "enable_cpu_offload": "keep all KV in CPU memory and only some blocks on the GPU",
        "num_gpu_blocks": "slots on the GPU, 2 or more; unset: what fits",
        "num_cpu_blocks": "blocks in CPU memory; unset: two sequences of max_model_len, or as many as slots if more",
        "cpu_memory_gb": "the same as a size in GiB",
    },
    "scheduling": {
        "max_num_batched_tokens": "most new tokens in one step (default: 16384; generate and chat on a CPU: 512)",
        "max_num_seqs": "most sequences running at once",
        "chunked_prefill": "prompts and decodes share steps; off: prompts first",
    },
}
SAMPLING_HELP: dict[str, dict[str, str]] = {
    "sampling (what the model's generation_config.json names has its defaults from there)": {
        "temperature": "0 always takes the likeliest token",
        "max_tokens": "most new tokens (default: 64; in a chat, as many as the context has room for)",
        "top_k": "only the K likeliest tokens; 0: all",
        "top_p": "only the likeliest tokens that together reach this probability",
        "min_p": "only tokens at least this many times as likely as the likeliest",
        "stop": "end the text before any of these strings",
        "stop_token_ids": "end at any of these tokens too",
        "ignore_eos": "go on past the model's end token",
        "seed": "the same seed gives the same tokens",
        "skip_special_tokens": "leave special tokens out of the text",
        "include_stop_str_in_output": "show the stop string or end token that ended the text",
    }
}
DEMO_HELP: dict[str, dict[str, str]] = {
    "the text": {
        "num_tokens": "length of the prompt",
        "depth": "where the passkey stands: 0 the start, 1 the end",
        "passkey": "what to hide; unset: drawn from the seed",
        "seed": "seed from which the passkey is drawn",
    },
    "the engine": {
        "num_gpu_blocks": "slots, 2 or more; unset: a fifth of the prompt's blocks",
        "device": "auto, cpu, cuda or cuda:N",
        "dtype": "float32 or bfloat16",
    },
}
PLAN_HELP: dict[str, dict[str, str]] = {
    "the work": {
        "context": "tokens of each sequence; unset: max_model_len",
        "sequences": "sequences that run together",
    },
    "the machine, where it is not this one": {
        "gpu": "name of a GPU, such as 'RTX 4090'; unset: the one here, else an H200",
        "gpu_memory_gb": "memory of one GPU in GiB; unset: the GPU's own",
        "host_memory_gb": "CPU memory available in GiB; unset: what is available here",
        "link_gb_per_s": "CPU memory to GPU in GB/s; unset: the GPU's, measured or projected",
    },
}
