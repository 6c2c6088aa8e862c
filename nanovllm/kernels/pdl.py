"""Programmatic dependent launch (PDL): a kernel may start while the one before it in the stream still runs.

A kernel launched with `launch_pdl` starts once every program of its predecessor has called `let_next_start` or ended,
instead of once all of them have ended and their writes are flushed. `wait_for_previous` then waits for exactly that, so
what comes before it overlaps: the launch, address arithmetic, and loads of weights, which no kernel writes. CUDA
Programming Guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0.

What always holds in a kernel launched with `pdl_options`:

- Every program calls `wait_for_previous`, on every path, the idle ones too. Hence a kernel that has ended has waited
  for its predecessor, which had waited for its own: behind the wait, everything enqueued earlier is done and visible.
  A kernel may read what any earlier one wrote, and overwrite what any earlier one read, as if PDL were off.
- Before the wait it loads nothing but weights and stores nothing. Several predecessors may still run there, so a weight
  must be at rest: written before a copy, a synchronisation or an ordinary kernel, not by the kernel just before. The
  engine loads weights long before the first step. Biases, small and needed last, are loaded behind the wait.
- `let_next_start` comes first. It only lets programs start that then wait, and only after all of ours have started:
  they take room that we leave, never a place one of ours still needs.

Neighbours need not know. An ordinary kernel, a copy, an event recorded or a graph's end waits for full completion of
the kernel before it, which by the above is completion of all. A PDL kernel after an ordinary kernel starts when the
programs of that have ended, and waits for its writes; after a copy or an event waited for, it starts when those are
done. A wait across streams thus keeps its meaning on both sides: the relaxed edge is the one to the preceding kernel of
the same stream only, and later kernels of the chain start after that kernel has. Captured into a CUDA graph, that edge
becomes a programmatic edge and all others stay full ones; successive replays are ordered as a whole.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.device import kernel_target


def is_supported(device: torch.device) -> bool:
    """On Hopper and later; not in Triton's interpreter. Tests replace this function to turn PDL off. Hot."""
    return kernel_target.target_of(device).has_dependent_launches


def pdl_options(device: torch.device) -> dict[str, bool]:
    """What a launch on `device` passes: the kernel's `PDL`, and Triton's option where it is on. Hot: every launch."""
    return {"PDL": True, "launch_pdl": True} if is_supported(device) else {"PDL": False}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start its programs, once all of ours have called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the previous kernel, hence every earlier one, has ended and its writes are visible."""
    if PDL:
        gdc_wait()
