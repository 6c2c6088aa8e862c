"""BatchOptions: the flags of `nanovllm batch` that concern the cluster and the rows."""

from dataclasses import dataclass

from nanovllm.cluster.ray_address import RAY_ADDRESS_HELP, check_ray_address
from nanovllm.errors import ConfigError
from nanovllm.utils.options import option

MAX_ENGINES = 10_000
_JOB = "the job"  # group


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The `help` of each field says what it means. A bad value raises ConfigError."""

    num_engines: int | None = option(
        None,
        help="engines that run at once, each on tensor_parallel_size GPUs; by default, as many as the cluster has GPUs "
        "for, and one on a CPU",
        group=_JOB,
    )
    document_column: str | None = option(
        None,
        help="column that names the document that a row asks about; rows of one document meet in one engine, one after "
        "another, and share the document's KV",
        group=_JOB,
    )
    ray_address: str | None = option(None, help=RAY_ADDRESS_HELP, group=_JOB)

    def __post_init__(self) -> None:
        if self.num_engines is not None and not 1 <= self.num_engines <= MAX_ENGINES:
            raise ConfigError(f"num_engines={self.num_engines} must be between 1 and {MAX_ENGINES}")
        if self.document_column == "":
            raise ConfigError("document_column='' must be the name of a column")
        check_ray_address(self.ray_address)
