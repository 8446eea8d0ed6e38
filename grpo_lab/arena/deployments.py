"""Which policies are served, from the merged weights to the process.

    deployments/
      NAME/step_10/       merged weights, which a server reads
      NAME/server.log     what the server printed
      .NAME.lock          held while a server is started or stopped

A deployment is named after its experiment and keeps one checkpoint. Its record
in the registry holds the server's process, so that whoever comes later finds
it, or starts it again.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from grpo_lab.arena import experiment as experiments
from grpo_lab.arena.store import Store
from grpo_lab.files import read_json

# `serving` takes seconds to import, so it comes in where it is needed.

AGREEMENT_ROWS = 50
"""Held-out questions that merged weights are compared with an adapter on."""


class Deployments:
    """The deployments of an arena.

    Args:
        store: the arena's registry.
        home: the arena's directory.
    """

    def __init__(self, store: Store, home: Path) -> None:
        self.store = store
        self.folder = home / "deployments"

    def deploy(
        self, name: str, experiment: Path, checkpoint: str, port: int | None
    ) -> dict:
        """Merge a checkpoint, compare it with its adapter, and serve it.

        A deployment that is there goes on until the new weights are ready;
        on a GPU it is stopped before, since there would be no room.

        Args:
            name: the experiment's and the deployment's.
            experiment: its directory.
            checkpoint: one of its checkpoints.
            port: on this machine, or None for a free one.

        Returns:
            The deployment, as `all` lists it.

        Raises:
            LabError: the port is in use, or merging or serving failed.
        """
        from grpo_lab.arena import serving

        with self._holding(name):
            before = self._server(name)
            if before is None or before.port != port:
                serving.refuse_port_in_use(port)
            if before is not None and serving.shares_a_gpu():
                serving.stop(before)
            agreement = self._merge(name, experiment, checkpoint)
            if before is not None:
                serving.stop(before)
            self._register(name, checkpoint, agreement)
            self._serve(name, port)
            self._forget_other_weights(name, checkpoint)
        return self._listed(self.store.get("deployment", name))

    def all(self) -> list[dict]:
        """Every deployment: `name`, `checkpoint`, `status`, `url`, `pid`."""
        return [self._listed(one) for one in self.store.all("deployment")]

    def running(self, name: str):
        """The server of a deployment, started if it is down.

        Raises:
            LabError: there is no such deployment, or it can't be started.
        """
        from grpo_lab.arena import serving

        record = self.store.get("deployment", name)
        with self._holding(name):
            server = self._server(name)
            # An arena may have been moved while its server ran.
            here = self._weights(name, record["checkpoint"])
            ours = server is not None and server.folder == here
            if not (ours and serving.healthy(server)):
                if server is not None:
                    serving.stop(server)
                self._serve(name)
        return self._server(name)

    def stop(self, name: str) -> None:
        """Stop the server of a deployment; its weights stay.

        Raises:
            LabError: there is no such deployment.
        """
        from grpo_lab.arena import serving

        self.store.get("deployment", name)
        with self._holding(name):
            server = self._server(name)
            if server is not None:
                serving.stop(server)
            self.store.update("deployment", name, server=None)

    def delete(self, name: str) -> None:
        """Stop a deployment and delete its weights.

        Raises:
            LabError: there is no such deployment.
        """
        self.stop(name)
        self.store.delete("deployment", name)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    @contextlib.contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        """Start and stop the server of a deployment one at a time."""
        self.folder.mkdir(exist_ok=True)
        with filelock.FileLock(self.folder / f".{name}.lock"):
            yield

    def _server(self, name: str):
        """The server that was last started, whether or not it runs."""
        from grpo_lab.arena import serving

        if not self.store.has("deployment", name):
            return None
        saved = self.store.get("deployment", name)["server"]
        return serving.Server.from_dict(saved) if saved else None

    def _weights(self, name: str, checkpoint: str) -> Path:
        """Where the merged weights of a checkpoint lie."""
        return self.folder / name / checkpoint

    def _merge(self, name: str, experiment: Path, checkpoint: str) -> dict:
        """Merge a checkpoint; whether it answers as its adapter did."""
        from grpo_lab.arena import serving

        model = read_json(experiment / "plan.json")["settings"]["model"]
        adapter = experiment / "checkpoints" / checkpoint
        target = self._weights(name, checkpoint)
        try:
            serving.merge(model, adapter, target)
            return self._agreement(experiment, adapter, target)
        except BaseException:  # Ctrl-C as well
            if not self.store.has("deployment", name):
                # No verb would ever find what was merged.
                shutil.rmtree(target.parent, ignore_errors=True)
            raise

    def _agreement(
        self, experiment: Path, adapter: Path, merged: Path
    ) -> dict:
        from grpo_lab.arena import serving

        plan = read_json(experiment / "plan.json")["settings"]
        rows = experiments.fitness_rows(experiment)
        found = serving.check_merged(
            plan["model"],
            plan["load_in_4bit"],
            adapter,
            merged,
            rows.select(range(min(AGREEMENT_ROWS, len(rows)))),
            plan["max_completion_length"],
            plan["completions_per_step"],
        )
        if found.worse:
            print(
                "The merged weights answer worse than the adapter: "
                f"{found.merged_correct} instead of {found.adapter_correct} "
                f"of {found.questions} questions. They are served all the "
                "same; train with network.load_in_4bit: false to avoid it."
            )
        return found.to_dict()

    def _register(self, name: str, checkpoint: str, agreement: dict) -> None:
        record = {"checkpoint": checkpoint, "agreement": agreement}
        if self.store.has("deployment", name):
            self.store.update("deployment", name, **record, server=None)
        else:
            self.store.add("deployment", name, record | {"server": None})

    def _serve(self, name: str, port: int | None = None) -> None:
        from grpo_lab.arena import serving

        checkpoint = self.store.get("deployment", name)["checkpoint"]

        def began(server) -> None:
            self.store.update("deployment", name, server=server.to_dict())

        serving.start(
            self._weights(name, checkpoint),
            self.folder / name / "server.log",
            port=port,
            began=began,
        )

    def _forget_other_weights(self, name: str, checkpoint: str) -> None:
        """Delete what earlier deployments of an experiment have merged."""
        for other in (self.folder / name).glob("step_*"):
            if other.is_dir() and other.name != checkpoint:
                shutil.rmtree(other, ignore_errors=True)

    def _listed(self, record: dict) -> dict:
        from grpo_lab.arena import serving

        server = self._server(record["name"])
        well = server is not None and serving.healthy(server)
        return {
            "name": record["name"],
            "checkpoint": record["checkpoint"],
            "agreement": record["agreement"],
            "status": "serving" if well else "down",
            "url": server.url if well else None,
            "pid": server.pid if well else None,
        }
