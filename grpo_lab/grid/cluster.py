"""What a Ray cluster is asked for."""

from dataclasses import dataclass

from grpo_lab.errors import LabError


@dataclass(frozen=True)
class Cluster:
    """Where the workers of a grid are, and what each of them gets.

    Attributes:
        address: of a running cluster, such as "auto" (the one that this
            machine belongs to) or "10.0.0.1:6379". "" takes the one that this
            process is connected to; if there is none it starts one on this
            machine alone and ends it afterwards.
        cpus: CPU cores of each run; a run computes with so many threads.
        gpus: GPUs of each run, such as 1, or 0.5 for two runs on one.
        retries: times that a run goes on elsewhere after its worker was lost.
        storage: "" if all machines see the grid's directory under one path
            (one machine, NFS); else where the runs are kept between workers,
            such as "s3://bucket/grids", see `storage.Storage`.
    """

    address: str = ""
    cpus: float = 1
    gpus: float = 0
    retries: int = 3
    storage: str = ""

    def __post_init__(self) -> None:
        """Refuse what no machine could give."""
        if self.cpus <= 0 or self.gpus < 0 or self.retries < 0:
            raise LabError(
                f"A run can't have {self.cpus:g} CPU cores, {self.gpus:g} "
                f"GPUs and {self.retries} retries. Type for example cpus=1, "
                "gpus=0.5, retries=3."
            )
