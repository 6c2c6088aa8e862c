"""Programmatic dependent launch (PDL): a kernel may start while the one before it in the stream still runs.

A kernel launched with `launch_pdl` can start once every program of its predecessor has called `let_next_start` or
ended. An ordinary kernel starts only once all of them have ended and their writes are flushed. `wait_for_previous`
waits for that point. So everything before the wait overlaps with the predecessor: the launch, address arithmetic, and
loads of weights, which no kernel writes. See the CUDA Programming Guide, "Programmatic Dependent Launch and
Synchronization". It needs compute capability 9.0.

What always holds in a kernel launched with `pdl_options`:

- Every program calls `wait_for_previous` on every path, even if it has nothing to do. Hence a kernel that has ended has
  waited for its predecessor, which had waited for its own. So after the wait, everything enqueued earlier is done and
  visible. A kernel may read what any earlier one wrote, and overwrite what any earlier one read, as if PDL were off.
- Before the wait it loads only weights, and stores nothing. Several predecessors may still be running then, so a weight
  must be at rest: a copy, a synchronisation or an ordinary kernel must lie between writing it and this kernel. The
  engine loads weights long before the first step. Biases are loaded after the wait, because they are small and needed
  last.
- `let_next_start` comes first. That is safe: the next kernel's programs start only once all of ours have, so they take
  only resources that we leave idle, and then they wait for us.

Other work in the stream needs no change. An ordinary kernel, a copy, a recorded event and the end of a graph wait
until the kernel before them is complete, which by the above means that all earlier kernels are. A PDL kernel after an
ordinary kernel starts when the programs of that kernel have ended, and waits for its writes. After a copy or a wait for
an event it starts when those are done. A wait across streams thus keeps its meaning on both sides: only the edge to the
preceding kernel of the same stream is relaxed, and later kernels of the chain start after that kernel has. In a CUDA
graph that edge becomes a programmatic edge and all others stay full ones; successive replays are ordered as a whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.device import kernel_target


def is_supported(device: torch.device) -> bool:
    """True on Hopper and later, but not in Triton's interpreter. Tests replace this function to turn PDL off. Hot."""
    return kernel_target.target_of(device).has_dependent_launches


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options for `device`: the kernel's `PDL` argument and, if on, Triton's own option. Hot: every launch."""
    return {"PDL": True, "launch_pdl": True} if is_supported(device) else {"PDL": False}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel's programs start once all of ours have called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel, hence every earlier one, has ended and its writes are visible."""
    if PDL:
        gdc_wait()
