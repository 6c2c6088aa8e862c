"""Machine: the memory and the rates that bound an engine, and the table of GPUs for which a plan can be made.

The table's rates are from the vendor's data sheets and architecture papers: memory bandwidth, and dense bf16 arithmetic
on tensor cores with fp32 accumulation, which GeForce cards do at half the rate of fp16 accumulation. No kernel reaches
these peaks. Only the H200's rates are measured (docs/planning.md, "The formulas"); the measured rates are lower than
the 4.8 TB/s and 989 TFLOP/s of the data sheet. The memory is the total that CUDA reports, as quoted in public bug
reports; a card without a report has the memory of a card of the same size. This total is less than the card's nominal
memory, and varies a little with the driver and with ECC. A laptop's GPU has the rate of its highest boost clock.

Only the H200's link was measured, at 54.6 of the 63.0 GB/s of PCIe 5 x16. Other links are projected to reach the same
fraction of their peak.

The rate of CPU memory is the rate at which the link and the CPU read together, and a bound for each of them alone. A
server's rate was measured on the host of an H200: the CPU attended at 70 to 78 GB/s while the link carried 50 to 52. A
desktop with two channels of DDR5-5600 and Grace with 512 GB/s are projected to reach two thirds of their peak.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nanovllm.errors import ConfigError
from nanovllm.plan.step_limits import MIN_CAPABILITY

LINK_PEAK_GB_PER_S = {  # one direction, after line coding
    "PCIe 3 x16": 15.75,
    "PCIe 4 x8": 15.75,
    "PCIe 4 x16": 31.5,
    "PCIe 5 x8": 31.5,
    "PCIe 5 x16": 63.0,
    "NVLink-C2C": 450.0,
}
MEASURED_LINK_GB_PER_S = 54.6  # the H200's PCIe 5 x16: pinned memory to the GPU, copies of 8 MiB
LINK_SHARE = MEASURED_LINK_GB_PER_S / LINK_PEAK_GB_PER_S["PCIe 5 x16"]
CPU_GB_PER_S = {"desktop": 60.0, "server": 125.0, "Grace": 340.0}


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    name: str
    memory_gib: float
    memory_gb_per_s: float
    bf16_tflop_per_s: float
    link: str  # a key of LINK_PEAK_GB_PER_S
    capability: tuple[int, int]
    cuda_names: tuple[str, ...]  # the names that CUDA reports, without "NVIDIA"
    aliases: tuple[str, ...] = ()
    is_measured: bool = False

    @property
    def host(self) -> str:
        """The kind of machine that this GPU usually runs in: a key of CPU_GB_PER_S."""
        if self.link == "NVLink-C2C":
            return "Grace"
        return "desktop" if "GeForce" in self.cuda_names[0] else "server"


H200 = Gpu("H200", 139, 4300, 690, "PCIe 5 x16", (9, 0), ("H200",), is_measured=True)
GPUS = (
    Gpu("RTX 3060 12GB", 11.6, 360, 25.5, "PCIe 4 x16", (8, 6), ("GeForce RTX 3060",), ("RTX 3060",)),
    Gpu("RTX 3060 Ti", 7.6, 448, 32.4, "PCIe 4 x16", (8, 6), ("GeForce RTX 3060 Ti",)),
    Gpu("RTX 3070", 7.6, 448, 40.6, "PCIe 4 x16", (8, 6), ("GeForce RTX 3070",)),
    Gpu("RTX 3070 Ti", 7.6, 608, 43.5, "PCIe 4 x16", (8, 6), ("GeForce RTX 3070 Ti",)),
    Gpu("RTX 3080 10GB", 9.6, 760, 59.5, "PCIe 4 x16", (8, 6), ("GeForce RTX 3080",), ("RTX 3080",)),
    Gpu("RTX 3080 12GB", 11.6, 912, 61.3, "PCIe 4 x16", (8, 6), ("GeForce RTX 3080",)),
    Gpu("RTX 3080 Ti", 11.6, 912, 68.2, "PCIe 4 x16", (8, 6), ("GeForce RTX 3080 Ti",)),
    Gpu("RTX 3090", 23.6, 936, 71.2, "PCIe 4 x16", (8, 6), ("GeForce RTX 3090",)),
    Gpu("RTX 3090 Ti", 23.6, 1008, 80.0, "PCIe 4 x16", (8, 6), ("GeForce RTX 3090 Ti",)),
    Gpu("RTX 4060", 7.6, 272, 30.2, "PCIe 4 x8", (8, 9), ("GeForce RTX 4060",)),
    Gpu("RTX 4060 Ti 16GB", 15.5, 288, 44.1, "PCIe 4 x8", (8, 9), ("GeForce RTX 4060 Ti",), ("RTX 4060 Ti",)),
    Gpu("RTX 4060 Ti 8GB", 7.6, 288, 44.1, "PCIe 4 x8", (8, 9), ("GeForce RTX 4060 Ti",)),
    Gpu("RTX 4070", 11.6, 504, 58.3, "PCIe 4 x16", (8, 9), ("GeForce RTX 4070",)),
    Gpu("RTX 4070 SUPER", 11.6, 504, 71.0, "PCIe 4 x16", (8, 9), ("GeForce RTX 4070 SUPER",)),
    Gpu("RTX 4070 Ti", 11.6, 504, 80.2, "PCIe 4 x16", (8, 9), ("GeForce RTX 4070 Ti",)),
    Gpu("RTX 4070 Ti SUPER", 15.6, 672, 88.2, "PCIe 4 x16", (8, 9), ("GeForce RTX 4070 Ti SUPER",)),
    Gpu("RTX 4080", 15.6, 717, 97.5, "PCIe 4 x16", (8, 9), ("GeForce RTX 4080",)),
    Gpu("RTX 4080 SUPER", 15.6, 736, 104.4, "PCIe 4 x16", (8, 9), ("GeForce RTX 4080 SUPER",)),
    Gpu("RTX 4090", 23.5, 1008, 165.2, "PCIe 4 x16", (8, 9), ("GeForce RTX 4090",)),
    Gpu("RTX 4060 Laptop", 7.6, 256, 29.1, "PCIe 4 x8", (8, 9), ("GeForce RTX 4060 Laptop GPU",)),
    Gpu("RTX 4070 Laptop", 7.6, 256, 40.1, "PCIe 4 x8", (8, 9), ("GeForce RTX 4070 Laptop GPU",)),
    Gpu("RTX 4080 Laptop", 11.6, 432, 67.7, "PCIe 4 x16", (8, 9), ("GeForce RTX 4080 Laptop GPU",)),
    Gpu("RTX 4090 Laptop", 15.6, 576, 79.4, "PCIe 4 x16", (8, 9), ("GeForce RTX 4090 Laptop GPU",)),
    Gpu("RTX 5060", 7.5, 448, 38.4, "PCIe 5 x8", (12, 0), ("GeForce RTX 5060",)),
    Gpu("RTX 5060 Ti 16GB", 15.4, 448, 47.4, "PCIe 5 x8", (12, 0), ("GeForce RTX 5060 Ti",), ("RTX 5060 Ti",)),
    Gpu("RTX 5060 Ti 8GB", 7.5, 448, 47.4, "PCIe 5 x8", (12, 0), ("GeForce RTX 5060 Ti",)),
    Gpu("RTX 5070", 11.5, 672, 61.7, "PCIe 5 x16", (12, 0), ("GeForce RTX 5070",)),
    Gpu("RTX 5070 Ti", 15.4, 896, 87.9, "PCIe 5 x16", (12, 0), ("GeForce RTX 5070 Ti",)),
    Gpu("RTX 5080", 15.4, 960, 112.6, "PCIe 5 x16", (12, 0), ("GeForce RTX 5080",)),
    Gpu("RTX 5090", 31.3, 1792, 209.5, "PCIe 5 x16", (12, 0), ("GeForce RTX 5090",)),
    Gpu("RTX A4000", 15.6, 448, 76.7, "PCIe 4 x16", (8, 6), ("RTX A4000",)),
    Gpu("RTX A5000", 23.5, 768, 111.1, "PCIe 4 x16", (8, 6), ("RTX A5000",)),
    Gpu("RTX A6000", 47.4, 768, 154.8, "PCIe 4 x16", (8, 6), ("RTX A6000",)),
    Gpu("RTX 6000 Ada", 47.3, 960, 364.2, "PCIe 4 x16", (8, 9), ("RTX 6000 Ada Generation",)),
    Gpu(
        *("RTX PRO 6000 Blackwell", 94.9, 1792, 503.8, "PCIe 5 x16", (12, 0)),
        ("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ("RTX PRO 6000",),
    ),
    Gpu("A10", 22.0, 600, 125, "PCIe 4 x16", (8, 6), ("A10",)),
    Gpu("A40", 44.3, 696, 149.7, "PCIe 4 x16", (8, 6), ("A40",)),
    Gpu("A100 40GB", 39.3, 1555, 312, "PCIe 4 x16", (8, 0), ("A100-SXM4-40GB", "A100-PCIE-40GB")),
    Gpu("A100 80GB", 79.1, 2039, 312, "PCIe 4 x16", (8, 0), ("A100-SXM4-80GB",), ("A100 80GB SXM",)),
    Gpu("A100 80GB PCIe", 79.1, 1935, 312, "PCIe 4 x16", (8, 0), ("A100 80GB PCIe",)),
    Gpu("L4", 22.0, 300, 121, "PCIe 4 x16", (8, 9), ("L4",)),
    Gpu("L40", 44.3, 864, 181, "PCIe 4 x16", (8, 9), ("L40",)),
    Gpu("L40S", 44.3, 864, 362, "PCIe 4 x16", (8, 9), ("L40S",)),
    Gpu("H100 PCIe", 79.1, 2000, 756, "PCIe 5 x16", (9, 0), ("H100 PCIe",)),
    Gpu("H100 NVL", 93.0, 3938, 835, "PCIe 5 x16", (9, 0), ("H100 NVL",)),
    Gpu("H100 SXM", 79.1, 3350, 989, "PCIe 5 x16", (9, 0), ("H100 80GB HBM3",)),
    H200,
    Gpu("B200", 178.3, 8000, 2250, "PCIe 5 x16", (10, 0), ("B200",)),
    Gpu("GH200", 94.5, 4000, 989, "NVLink-C2C", (9, 0), ("GH200 480GB",)),  # with 96 GB of HBM3
)
TOO_OLD = {"V100": (7, 0), "T4": (7, 5)}


def find_gpu(name: str) -> Gpu:
    """Return the GPU that a user calls `name`; case, spaces and "NVIDIA GeForce RTX" do not matter.

    Raises ConfigError for a GPU that is too old or not in the table; the message then lists the known names.
    """
    wanted = _key(name)
    for gpu in GPUS:  # some sizes of a GPU share a CUDA name
        if wanted in {_key(known) for known in (gpu.name, *gpu.cuda_names, *gpu.aliases)}:
            return gpu
    for old, (major, minor) in TOO_OLD.items():
        if wanted == _key(old):
            raise ConfigError(
                f"gpu={name!r} has compute capability {major}.{minor}, but the attention kernels need "
                f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}; choose one of {known_names()}"
            )
    raise ConfigError(
        f"gpu={name!r} is unknown; choose one of {known_names()}, or the nearest of them and correct it with "
        "gpu_memory_gb and link_gb_per_s"
    )


def gpu_of_cuda_name(name: str, gpu_bytes: int = 0) -> Gpu | None:
    """Return the GPU whose CUDA name is `name`, or None if the table does not have the GPU. Of several sizes, return
    the nearest to `gpu_bytes`.
    """
    known = [gpu for gpu in GPUS if name.removeprefix("NVIDIA ") in gpu.cuda_names]
    return min(known, key=lambda gpu: abs(gpu.memory_gib - gpu_bytes / 2**30), default=None)


def known_names() -> str:
    return ", ".join(gpu.name for gpu in GPUS)


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and its host.

    The GPU fields are None when running on the CPU, which has no separate device memory. Unknown rates are None.
    Every rate has a field that names its source.
    """

    name: str
    host_bytes: int  # available now
    gpu_bytes: int | None = None
    used_gpu_bytes: int = 0  # memory of the GPU that other programs use now
    capability: tuple[int, int] | None = None  # compute capability
    link_byte_per_s: float | None = None  # from CPU memory to the GPU
    memory_byte_per_s: float | None = None  # bandwidth of the GPU's memory
    flop_per_s: float | None = None  # dense bf16
    link_source: str = ""
    cpu_byte_per_s: float | None = None  # from CPU memory, read by the links and the CPU together
    cpu_source: str = ""
    rates_source: str = ""  # the source of the memory and arithmetic rates

    @classmethod
    def cpu(cls, host_bytes: int) -> "Machine":
        return cls(name="CPU", host_bytes=host_bytes)

    @classmethod
    def gpu(cls, host_bytes: int, gpu: Gpu = H200, name: str | None = None) -> "Machine":
        """Return a machine with a GPU of the table and `host_bytes` of available CPU memory."""
        measured = f"measured on an {gpu.name}" if gpu.is_measured else None
        return cls(
            name=name or gpu.name,
            host_bytes=host_bytes,
            gpu_bytes=int(gpu.memory_gib * 2**30),
            capability=gpu.capability,
            link_byte_per_s=LINK_PEAK_GB_PER_S[gpu.link] * LINK_SHARE * 1e9,
            memory_byte_per_s=gpu.memory_gb_per_s * 1e9,
            flop_per_s=gpu.bf16_tflop_per_s * 1e12,
            link_source=f"{gpu.link}, {measured or 'projected'}",
            cpu_byte_per_s=CPU_GB_PER_S[gpu.host] * 1e9,
            cpu_source=measured or f"a {gpu.host}'s, projected",
            rates_source=measured or "data sheet",
        )

    @classmethod
    def found_gpu(
        cls, host_bytes: int, cuda_name: str, gpu_bytes: int, capability: tuple[int, int], used_gpu_bytes: int = 0
    ) -> "Machine":
        """Return this machine, with the memory of its GPU and the rates of the table if the table has the GPU."""
        known = gpu_of_cuda_name(cuda_name, gpu_bytes)
        machine = cls(name=cuda_name, host_bytes=host_bytes) if known is None else cls.gpu(host_bytes, known, cuda_name)
        return replace(machine, gpu_bytes=gpu_bytes, capability=capability, used_gpu_bytes=used_gpu_bytes)

    def usable_gpu_bytes(self, utilization: float) -> int | None:
        """Return the GPU memory that an engine may use, or None on a CPU. utilization: as gpu_memory_utilization,
        the share of the memory that the engine and other programs may use together.
        """
        return None if self.gpu_bytes is None else int(self.gpu_bytes * utilization) - self.used_gpu_bytes

    def with_link(self, byte_per_s: float | None, source: str) -> "Machine":
        """Return this machine with another link rate, or unchanged if `byte_per_s` is None."""
        return self if byte_per_s is None else replace(self, link_byte_per_s=byte_per_s, link_source=source)

    def with_cpu(self, byte_per_s: float | None, source: str) -> "Machine":
        """Return this machine with another rate of CPU memory, or unchanged if `byte_per_s` is None."""
        return self if byte_per_s is None else replace(self, cpu_byte_per_s=byte_per_s, cpu_source=source)


# -- the host memory that this process can still use -------------------------------------------------------------------

# The limit and the usage of the container that this process runs in
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),  # v2
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),  # v1
)


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # v2 writes "max" for no limit


def available_host_bytes(cgroup_files: Sequence[tuple[str, str]] = CGROUP_FILES) -> int:
    """Return the bytes that can still be allocated: the lesser of the machine's free memory and the room below the
    container's limit.

    A container's usage includes its page cache. Inactive pages can be reclaimed, so they count as available.
    """
    available = _meminfo_bytes("MemAvailable")
    for limit_file, usage_file in cgroup_files:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, limit - usage + _reclaimable_bytes(Path(usage_file).parent))
    return max(available, 0)


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {key}")


def _reclaimable_bytes(cgroup: Path) -> int:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    return int(stat.get("inactive_file", 0))
