"""Machine: the memory and the rates that bound an engine, and the H200's where nothing was measured.

The figures of the H200 are those of docs/design.md, "The planner". Loads no torch.
"""

from dataclasses import dataclass, replace

H200_GPU_BYTES = 139 * 2**30
H200_LINK_BYTE_PER_S = 54.6e9  # pinned memory to the GPU, 8 MiB copies
H200_MEMORY_BYTE_PER_S = 4.3e12  # a large copy on the GPU, bytes read plus bytes written
H200_FLOP_PER_S = 690e12  # dense bf16


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of the GPUs, and the host. None on a CPU: nothing there is apart from the rest."""

    name: str
    host_bytes: int  # available
    gpu_bytes: int | None
    link_byte_per_s: float | None  # CPU memory to this GPU
    memory_byte_per_s: float | None  # of the GPU; always the H200's figure, like the next
    flop_per_s: float | None
    link_source: str = "H200's"

    @classmethod
    def cpu(cls, host_bytes: int) -> "Machine":
        return cls(
            name="CPU",
            host_bytes=host_bytes,
            gpu_bytes=None,
            link_byte_per_s=None,
            memory_byte_per_s=None,
            flop_per_s=None,
        )

    @classmethod
    def gpu(cls, host_bytes: int, name: str = "an H200, assumed", gpu_bytes: int = H200_GPU_BYTES) -> "Machine":
        """A GPU with the rates of an H200."""
        return cls(
            name=name,
            host_bytes=host_bytes,
            gpu_bytes=gpu_bytes,
            link_byte_per_s=H200_LINK_BYTE_PER_S,
            memory_byte_per_s=H200_MEMORY_BYTE_PER_S,
            flop_per_s=H200_FLOP_PER_S,
        )

    def with_link(self, byte_per_s: float | None, source: str) -> "Machine":
        """The same with this rate of the link; None leaves it as it is."""
        return self if byte_per_s is None else replace(self, link_byte_per_s=byte_per_s, link_source=source)
