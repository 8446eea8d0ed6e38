"""A pool whose workers are actors of a Ray cluster.

Ray finds a place for each worker, sends it what it needs and reports when it
or its machine is lost. What a worker does with a run is what one process does,
in the same run directory, so that results are the same ones.
"""

import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from grpo_lab.grid.cluster import SHARE_OR_STORE, Cluster, connected
from grpo_lab.grid.pool import LEAVE_SECONDS, LOST, WorkerPool
from grpo_lab.grid.worker import Worker


class RayPool(WorkerPool):
    """Workers of a cluster; those that find no room there wait for it.

    Args:
        context, size, functions: as for `WorkerPool`.
        cluster: where the workers are, and what each of them gets.
        mark: a file that all machines have to see; None if none has to.
        advice: what to do where one does not.
    """

    def __init__(
        self,
        context: object,
        cluster: Cluster,
        size: int,
        functions: Sequence[Callable] = (),
        mark: Path | None = None,
        advice: str = SHARE_OR_STORE,
    ) -> None:
        super().__init__(context, size, cluster.retries, functions)
        self.cluster = cluster
        self.connection = connected(cluster, mark, advice)
        self.calls: dict = {}
        self.last_words = ""

    def __enter__(self) -> "RayPool":
        """Have the workers.

        Raises:
            LabError: the cluster can't be used; see `cluster.connected`.
        """
        with contextlib.ExitStack() as own:
            own.enter_context(self.connection)
            self.context = ray.put(self.payload)
            super().__enter__()
            self.own = own.pop_all()
        return self

    def __exit__(self, *error) -> None:
        with self.own:
            self._dismiss()

    def _hire(self) -> Any:
        worker = ray.remote(Worker).options(
            num_cpus=self.cluster.cpus,
            num_gpus=self.cluster.gpus,
            scheduling_strategy="SPREAD",
            # Where it was, there may be no room for it any more, and what
            # waits for it would not be given to another one.
            max_restarts=0,
        ).remote(
            self.context, self.cluster.threads, Path.cwd(), gpus=False
        )  # fmt: skip
        self.calls[worker.ready.remote()] = worker
        return worker

    def _give(self, worker: Any, item: Hashable) -> None:
        self.calls[worker.run.remote(item)] = worker

    def _heard(self, seconds: float) -> list[tuple]:
        if not self.calls:
            time.sleep(seconds)
            return []
        calls, _ = ray.wait(
            list(self.calls), num_returns=1, timeout=seconds, fetch_local=False
        )
        found = []
        for call in calls:
            try:
                message = ray.get(call)
            except RayError as error:
                self.last_words = str(error)
                message = LOST
            found.append((self.calls.pop(call), message))
        return found

    def _end(self, worker: Any) -> str:
        ray.kill(worker)  # if it was only out of reach
        words = [line for line in self.last_words.splitlines() if line.strip()]
        return words[-1].strip() if words else ""

    def _dismiss(self) -> None:
        leaving = [worker.close.remote() for worker in self.idle]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_SECONDS)
        for worker in (*self.starting, *self.idle, *self.busy):
            ray.kill(worker)
