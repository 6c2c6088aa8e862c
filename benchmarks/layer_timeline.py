"""What happens in one layer of a streamed decode step, and what bounds it: python -m benchmarks.layer_timeline

It decodes one long sequence whose keys are mostly in CPU memory, and records a few steps with torch's profiler. Printed
is the layer in the middle of the last one, from the first kernel behind its q, k and v projection to that of the next
layer: when each resource was busy, for how long, and how much of the layer it was idle. The calls of torch's operator
on the CPU are recorded too (--kernel torch). Compiled kernels leave only the time in which the GPU waits for them.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common import add_model_arguments, greedy, model_of_length, random_prompt
from nanovllm import LLM
from nanovllm.cpu_attention import torch_operator
from nanovllm.cpu_attention.kernels import KERNEL_NAMES, choose_kernel
from nanovllm.runner import cpu_rates

WARM_UP_STEPS, RECORDED_STEPS = 10, 3
LAYER_KERNEL = "_norm_rotate_store_kernel"  # runs once in each layer
JOIN_US = 20.0  # shorter gaps between two copies or kernels are not shown
ANCHOR = "anchor of the host's clock"


class Interval(NamedTuple):
    """Microseconds."""

    start: float
    end: float
    resource: str


def joined(intervals: Iterable[Interval], join_us: float = JOIN_US) -> Iterator[Interval]:
    """The same for one resource, with those that nearly touch made into one."""
    current: Interval | None = None
    for interval in sorted(intervals):
        if current is not None and interval.start - current.end <= join_us:
            current = current._replace(end=max(current.end, interval.end))
        else:
            if current is not None:
                yield current
            current = interval
    if current is not None:
        yield current


def busy_us(intervals: Iterable[Interval]) -> float:
    return sum(interval.end - interval.start for interval in joined(intervals, join_us=0.0))


def resource_of(name: str) -> str:
    """The resource that an event on the GPU uses, told by the event's name."""
    if "Memcpy HtoD" in name:
        return "link"
    return "copies out" if "Memcpy DtoH" in name else "kernels"


def record_steps(llm: LLM) -> tuple[list[Interval], list[float]]:
    """All intervals of a few steps, and when their layers begin."""
    calls: list[tuple[int, int]] = []  # of torch's operator, by the host's clock
    attend = torch_operator.JobViews.attend

    def timed_attend(self: Any, *args: Any) -> None:
        start_ns = time.perf_counter_ns()
        attend(self, *args)
        calls.append((start_ns, time.perf_counter_ns()))

    torch_operator.JobViews.attend = timed_attend  # type: ignore[method-assign]
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            anchor_ns = time.perf_counter_ns()
            with record_function(ANCHOR):
                pass
            for _ in range(RECORDED_STEPS):
                llm.step()
            torch.cuda.synchronize()
    finally:
        torch_operator.JobViews.attend = attend  # type: ignore[method-assign]
    events = recorded.events()
    assert events is not None
    anchor_us = next(event.time_range.start for event in events if event.name == ANCHOR)
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    intervals = [Interval(e.time_range.start, e.time_range.end, resource_of(e.name)) for e in on_gpu]
    for start_ns, end_ns in calls:
        start_us, end_us = (anchor_us + (ns - anchor_ns) / 1e3 for ns in (start_ns, end_ns))
        intervals.append(Interval(start_us, end_us, "CPU"))
    return intervals, sorted(e.time_range.start for e in on_gpu if LAYER_KERNEL in e.name)


def print_layer(intervals: list[Interval], start_us: float, end_us: float) -> None:
    """From `start_us` to `end_us`."""
    inside = [
        Interval(max(i.start, start_us), min(i.end, end_us), i.resource)
        for i in intervals
        if i.start < end_us and i.end > start_us
    ]
    by_resource = {name: [i for i in inside if i.resource == name] for name in ("link", "CPU", "kernels", "copies out")}
    shown = [i for some in by_resource.values() for i in joined(some)]
    print(f"a layer of {(end_us - start_us) / 1e3:.3f} ms; times from its first kernel, ms")
    for interval in sorted(shown):
        first, last = ((us - start_us) / 1e3 for us in (interval.start, interval.end))
        print(f"  {first:7.3f} to {last:7.3f}  {interval.resource}")
    for name, some in by_resource.items():
        if some:
            print(f"{name}: busy {busy_us(some) / 1e3:.3f} ms, {busy_us(some) / (end_us - start_us):.0%} of the layer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--num-gpu-blocks", type=int, default=8, help="slots on the GPU")
    parser.add_argument("--cpu-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--kernel", choices=KERNEL_NAMES, help="on the CPU; default: the best")
    args = parser.parse_args()
    if args.kernel:
        cpu_rates.choose_kernel = partial(choose_kernel, name=args.kernel)  # type: ignore[attr-defined]
    with LLM(
        model_of_length(args.model, args.max_model_len),
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        max_num_seqs=8,
        attn_backend=args.backend,
        tensor_parallel_size=args.tp,
        enable_cpu_offload=True,
        num_gpu_blocks=args.num_gpu_blocks,
        cpu_attention=args.cpu_attention,
    ) as llm:
        num_decoded = 2 * (WARM_UP_STEPS + RECORDED_STEPS)
        prompt = random_prompt(random.Random(0), args.max_model_len - num_decoded, llm.model_config.vocab_size)
        llm.add_request(prompt, greedy(num_decoded))
        while not llm.step().num_decode_tokens:
            pass
        for _ in range(WARM_UP_STEPS):
            llm.step()
        intervals, layers_us = record_steps(llm)
        print(f"CPU attention: {llm.stats().get('cpu_attention')}")
        num_layers = llm.model_config.num_layers
        middle = len(layers_us) - num_layers + num_layers // 2
        print_layer(intervals, layers_us[middle - 1], layers_us[middle])


if __name__ == "__main__":
    main()
