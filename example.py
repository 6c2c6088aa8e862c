"""The Python API in one page. Give a model directory or hub name; without one, the model built into the package runs.

python example.py [MODEL]
"""

import sys

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.models.retrieval_model import build_retrieval_model


def main() -> None:
    if len(sys.argv) > 1:
        model, prompts = sys.argv[1], ["The capital of France is", "Three primes above 100:"]
    else:
        model = str(build_retrieval_model())
        prompts = [build_haystack(4000, depth, passkey) for depth, passkey in ((0.2, "q7m2x9kd"), (0.8, "4f9zt61b"))]
    params = SamplingParams(temperature=0, max_tokens=16, stop="\n")

    # All KV in CPU memory, and only four blocks of 256 tokens in slots on the GPU.
    options = {"kvcache_block_size": 256, "num_gpu_blocks": 4, "num_cpu_blocks": 64}
    with LLM(model, max_model_len=8192, enable_cpu_offload=True, **options) as llm:
        for output in llm.generate(prompts, params):
            print(repr(output["text"]), output["finish_reason"], f"{output['num_prompt_tokens']} prompt tokens")
        for piece in llm.stream(prompts[0], params):  # the second time, its KV is found in CPU memory
            print(piece, end="", flush=True)
        print()
        stats = llm.stats()
    print(f"blocks: {stats['num_hit_blocks']} hit, {stats['num_missed_blocks']} missed")


if __name__ == "__main__":  # with tensor_parallel_size > 1 the workers import this file
    main()
