"""Runs on machines that share no disk: what goes where, and when.

The driver's directory holds records, decisions and results; the workers train
in temporary ones. Between them stands an object store: a worker pushes its run
there after each step, and whoever takes it up next begins with that.
"""

import tempfile
from functools import cached_property
from pathlib import Path

from transformers import TrainerCallback

from grpo_lab.grid.storage import Storage

CONTROL = ("stop", "exempt", "rungs.json", "result.json")
"""Files of a run that the driver writes; the last one the worker too."""


class Mirror:
    """Keeps the runs of a grid in an object store.

    Args:
        uri: see `Storage`.

    Raises:
        LabError: it can't be written to.
    """

    def __init__(self, uri: str) -> None:
        self.storage = Storage(uri)
        self.storage.check()

    # --- by the driver

    def send_run(self, directory: Path) -> None:
        """Give a run to the workers: its record, and what is decided."""
        name = f"runs/{directory.name}"
        for file in ("settings.json", *CONTROL):
            if (directory / file).exists():
                self.storage.send(directory / file, f"{name}/{file}")
            else:
                self.storage.delete(f"{name}/{file}")
        for folder in ("parent", "reward_files"):
            if (directory / folder).is_dir():
                self.storage.push(directory / folder, f"{name}/{folder}")

    def exchange(self, directory: Path) -> None:
        """Pass on a request or a decision, and fetch the newest metrics."""
        name = f"runs/{directory.name}"
        for file in ("stop", "rungs.json"):
            if (directory / file).exists():
                self.storage.send(directory / file, f"{name}/{file}")
        self.storage.fetch(f"{name}/metrics.csv", directory / "metrics.csv")

    def collect(self, directory: Path) -> None:
        """Fetch everything of a run but its checkpoints."""
        self.storage.pull(
            f"runs/{directory.name}",
            directory,
            skip=("checkpoint-*", *CONTROL[:-1]),
            delete=False,
        )
        base = directory.parent.parent / "base"
        self.storage.pull("base", base, delete=False)

    # --- by a worker

    @cached_property
    def root(self) -> Path:
        """This process's own copy of the grid's directory."""
        return Path(tempfile.mkdtemp(prefix="grpo-lab-grid-"))

    def __getstate__(self) -> dict:
        """Each process has its own directory."""
        return {"storage": self.storage}

    def fetch_run(self, name: str) -> Path:
        """The directory of a grid in which a run can be trained here."""
        self.storage.pull(f"runs/{name}", self.root / "runs" / name)
        self.storage.pull("base", self.root / "base", delete=False)
        return self.root

    def before(self, directory: Path) -> None:
        """Fetch what the driver has decided meanwhile."""
        for file in CONTROL:
            self.storage.fetch(
                f"runs/{directory.name}/{file}", directory / file
            )

    def after(self, directory: Path) -> None:
        """Push everything."""
        # What the driver has written meanwhile is not there to be deleted.
        name = f"runs/{directory.name}"
        self.storage.push(directory, name, skip=CONTROL[:-1])
        if (self.root / "base").exists():
            self.storage.push(self.root / "base", "base", delete=False)

    def callback(self, directory: Path) -> TrainerCallback:
        """Pushes each checkpoint, and looks for a request to stop."""
        return _Pushing(self, directory)


class _Pushing(TrainerCallback):
    def __init__(self, mirror: Mirror, directory: Path) -> None:
        self.mirror, self.directory = mirror, directory

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """The checkpoint of the last step is marked as complete by now."""
        if state.global_step:
            self.mirror.before(self.directory)
            self.mirror.after(self.directory)
