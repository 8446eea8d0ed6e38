"""A Ray cluster: what is asked of it, and whether it can give it."""

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from grpo_lab.environment import usable_cores, versions
from grpo_lab.errors import LabError

# Read by Ray at its first import, which is always after that of this module.
for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody is told that it is used
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # we tell it
}.items():
    os.environ.setdefault(_name, _value)

LOOPBACK = "127.0.0.1"

SHARE_OR_STORE = (
    "Choose an OUTPUT_DIR on a disk that all machines share, or name an "
    "object store: storage='s3://bucket/folder'."
)
"""What to do where a machine does not see a grid's directory."""

ANSWER_SECONDS = 10.0
"""How long a cluster may take to answer a first knock."""

QUIET = {"log_to_driver": False, "logging_level": "ERROR"}

SHIPPED = (
    "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY",
    "TOKENIZERS_PARALLELISM", "GOMP_SPINCOUNT",
)  # fmt: skip
"""Environment variables that workers elsewhere get from here; no secrets."""


@dataclass(frozen=True)
class Cluster:
    """Where the workers of a grid are, and what each of them gets.

    Attributes:
        address: of a running cluster, such as "auto" (the one that this
            machine belongs to) or "10.0.0.1:6379". "" takes the one that this
            process is connected to; if there is none it starts one on this
            machine alone, with the GPUs that `CUDA_VISIBLE_DEVICES` names
            (`environment.prepare` sets it to the first one), and ends it
            afterwards.
        cpus: CPU cores of each run; a run computes with so many threads.
        gpus: GPUs of each run, such as 1, or 0.5 for two runs on one. With 0
            a run trains on the CPU, which is refused where there are GPUs.
        retries: times that a run goes on elsewhere after its worker was lost.
        storage: "" if all machines see the grid's directory under one path
            (one machine, NFS); else where the runs are kept between workers,
            such as "s3://bucket/grids", see `storage.Mirror`.
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

    @property
    def threads(self) -> int:
        """CPU threads of a run."""
        return max(1, int(self.cpus))


def cluster_of(options: dict[str, Any], **defaults: Any) -> Cluster:
    """The cluster that somebody asks for with the engine "ray".

    Args:
        options: values of `Cluster` by name.
        defaults: those that can't be chosen.

    Raises:
        LabError: Ray is not installed, or there is no such option.
    """
    if importlib.util.find_spec("ray") is None:
        raise LabError(
            "The engine 'ray' needs Ray, which is not installed here. Type "
            "`pip install 'ray==2.60.0'`, or use engine='process'."
        )
    known = [f.name for f in fields(Cluster) if f.name not in defaults]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise LabError(
            f"The engine 'ray' has no option {unknown[0]!r}. It has "
            f"{', '.join(known)}; type for example engine='ray', "
            "address='auto', cpus=1."
        )
    return Cluster(**options, **defaults)


@contextlib.contextmanager
def connected(
    cluster: Cluster,
    mark: Path | None = None,
    advice: str = SHARE_OR_STORE,
) -> Iterator[None]:
    """Be connected to a cluster that can train runs.

    Args:
        mark: a file of the runs' directory, by which a machine shows that it
            sees that; None if none has to.
        advice: what to do where one does not.

    Raises:
        LabError: there is none, no machine is large enough, or a machine has
            other versions or does not see the directory.
    """
    import ray

    with _handlers_kept(), contextlib.ExitStack() as own:
        if not ray.is_initialized():
            _refuse_nobody(cluster.address)
            _connect(cluster.address, own)
            own.callback(ray.shutdown)
        _refuse_small(cluster)
        _refuse_strangers(mark, advice)
        yield


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Give back the signal handlers that Ray puts in their place.

    Only the main thread may, and elsewhere they are not changed.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _refuse_nobody(address: str) -> None:
    """Ray itself would look for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, why: str) -> LabError:
    return LabError(
        f"There is no Ray cluster at {address!r}: {why}. Start one with `ray "
        "start --head`, which tells its address, or leave ADDRESS empty to "
        "use this machine alone."
    )


def _connect(address: str, own: contextlib.ExitStack) -> None:
    """Join a cluster, or start one on this machine."""
    import ray

    if not address:
        own.enter_context(_loopback_only())
        ray.init(
            "local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            **QUIET,
        )
        return
    if address.startswith(f"{LOOPBACK}:"):
        own.enter_context(_loopback_only())
    passed = {k: os.environ[k] for k in SHIPPED if k in os.environ}
    try:
        ray.init(address, runtime_env={"env_vars": passed}, **QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        # The last: another version of Ray or Python there.
        why = str(error).splitlines()[0].rstrip(".")
        raise _no_cluster(address, why) from error


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Let the processes of a cluster that starts now listen here alone.

    Ray replaces 127.0.0.1 by the address that other machines reach, and
    listens on all of them, but where it takes it that there is no cluster.
    """
    from ray._private import ray_constants

    name, before = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", dict(os.environ)
    clustered = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clustered
        os.environ.pop(name)
        if name in before:
            os.environ[name] = before[name]


class PretendedCluster:
    """Several machines of a cluster, pretended on this one.

    They are separate Ray nodes that listen on the loopback address, so that
    what holds for machines can be tried and broken without any.

    Args:
        machines: how many; the first is the head.
        cpus: CPU cores that each of them offers.
    """

    def __init__(self, machines: int = 2, cpus: int = 1) -> None:
        from ray.cluster_utils import Cluster as Nodes

        # Ray warns that it forgets another cluster of this machine.
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._own = contextlib.ExitStack()
        self._own.enter_context(_loopback_only())
        node = {"num_cpus": cpus, "node_ip_address": LOOPBACK}
        with _handlers_kept():
            self._nodes = Nodes(
                initialize_head=True,
                head_node_args={**node, "include_dashboard": False},
            )
            self._own.callback(self._nodes.shutdown)
            self.machines = [self._nodes.head_node]
            for _ in range(machines - 1):
                self.machines.append(self._nodes.add_node(**node))

    @property
    def address(self) -> str:
        """What `grid.run` takes as `address`."""
        return self._nodes.address

    def lose(self, machine: int) -> None:
        """Kill every process of a machine, as a power cut would."""
        node = self.machines[machine]
        self._nodes.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all machines."""
        self._own.close()

    def __enter__(self) -> "PretendedCluster":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _refuse_small(cluster: Cluster) -> None:
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(node.get("GPU", 0) for node in nodes)
    if gpus and not cluster.gpus:
        raise LabError(
            f"The machines of this cluster have {gpus:g} GPUs, but each run "
            "asks for none and would train on a CPU. Type gpus=1, or gpus=0.5 "
            "for two runs on each; if the CPUs are meant, start Ray with "
            "--num-gpus 0."
        )
    fits = any(
        node.get("CPU", 0) >= cluster.cpus
        and node.get("GPU", 0) >= cluster.gpus
        for node in nodes
    )
    if not fits:
        there = "; ".join(
            f"{node.get('CPU', 0):g} CPU cores and {node.get('GPU', 0):g} GPUs"
            for node in nodes
        )
        raise LabError(
            f"Each run asks for {cluster.cpus:g} CPU cores and "
            f"{cluster.gpus:g} GPUs of one machine, but the machines of this "
            f"cluster have {there}, so no run would ever start. Ask for less."
        )


def _refuse_strangers(mark: Path | None, advice: str) -> None:
    """Ask each machine what it has installed, and what it sees."""
    import ray
    from ray.exceptions import NodeDiedError, TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look(path: str | None, names: list[str]) -> dict:
        import importlib.metadata
        import os
        import platform

        found = {}
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        sees = path is None or os.path.exists(path)
        return {"host": platform.node(), "sees": sees, "versions": found}

    wanted = {**versions()}
    wanted.pop("python")
    names = [*wanted, "grpo-lab"]
    asked = [
        ray.remote(num_cpus=0)(look)
        .options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                node["NodeID"], soft=False
            )
        )
        .remote(mark and str(mark), names)
        for node in ray.nodes()
        if node["Alive"]
    ]
    wanted["grpo-lab"] = importlib.metadata.version("grpo-lab")
    for answer in asked:
        # Of a machine that was lost just now Ray does not know it at once.
        with contextlib.suppress(NodeDiedError, TaskUnschedulableError):
            _refuse_stranger(ray.get(answer), wanted, mark, advice)


def _refuse_stranger(
    told: dict, wanted: dict, mark: Path | None, advice: str
) -> None:
    host = told["host"]
    if mark and not told["sees"]:
        raise LabError(
            f"The machine {host} does not see {mark.parent}, so nothing that "
            f"it trains would arrive here. {advice}"
        )
    for name, version in wanted.items():
        found = told["versions"].get(name, "missing")
        if found != version:
            raise LabError(
                f"On the machine {host} the package {name} is {found}, here "
                f"it is {version}, so its runs would be other ones. Install "
                "the same there: pip install -r requirements.txt, then pip "
                "install --no-deps -e . in the folder of this project."
            )
