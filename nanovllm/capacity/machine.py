"""Machine: the memory and the rates that bound an engine, found on this machine or assumed. Does not load torch."""

from dataclasses import dataclass, replace

from nanovllm.capacity.gpus import H200, Gpu, gpu_of_cuda_name


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and its host.

    The GPU fields are None when running on the CPU, which has no separate device memory. Rates are None if unknown.
    Every rate has a field that names its source.
    """

    name: str
    host_bytes: int  # available now
    gpu_bytes: int | None = None
    capability: tuple[int, int] | None = None  # compute capability
    link_byte_per_s: float | None = None  # from CPU memory to the GPU
    memory_byte_per_s: float | None = None  # bandwidth of the GPU's memory
    flop_per_s: float | None = None  # dense bf16
    link_source: str = ""
    cpu_byte_per_s: float | None = None  # of keys and values that the CPU attends to beside the link; measured only
    rates_source: str = ""  # where the memory and arithmetic rates come from

    @classmethod
    def cpu(cls, host_bytes: int) -> "Machine":
        return cls(name="CPU", host_bytes=host_bytes)

    @classmethod
    def gpu(cls, host_bytes: int, gpu: Gpu = H200, name: str | None = None) -> "Machine":
        """A GPU from the table, on a host with `host_bytes` of memory available."""
        return cls(
            name=name or gpu.name,
            host_bytes=host_bytes,
            gpu_bytes=int(gpu.memory_gib * 2**30),
            capability=gpu.capability,
            link_byte_per_s=gpu.link_byte_per_s,
            memory_byte_per_s=gpu.memory_gb_per_s * 1e9,
            flop_per_s=gpu.bf16_tflop_per_s * 1e12,
            link_source=f"{gpu.link}, {gpu.link_source}",
            rates_source=gpu.rates_source,
        )

    @classmethod
    def found_gpu(cls, host_bytes: int, cuda_name: str, gpu_bytes: int, capability: tuple[int, int]) -> "Machine":
        """This machine's GPU: its own memory, and the rates from the table if the GPU is in it."""
        known = gpu_of_cuda_name(cuda_name)
        machine = cls(name=cuda_name, host_bytes=host_bytes) if known is None else cls.gpu(host_bytes, known, cuda_name)
        return replace(machine, gpu_bytes=gpu_bytes, capability=capability)

    def with_link(self, byte_per_s: float | None, source: str) -> "Machine":
        """This machine with another link rate, or unchanged if `byte_per_s` is None."""
        return self if byte_per_s is None else replace(self, link_byte_per_s=byte_per_s, link_source=source)

    def with_cpu(self, byte_per_s: float | None) -> "Machine":
        """This machine with a CPU that was measured, or unchanged if `byte_per_s` is None."""
        return self if byte_per_s is None else replace(self, cpu_byte_per_s=byte_per_s)
