"""Runs on machines that share no disk: what goes where, and when.

The driver's directory holds records, decisions and results; the workers train
in temporary ones. Between them stands an object store: a worker pushes its run
there after each step, and whoever takes it up next begins with that.
"""

import shutil
import tempfile
import uuid
from functools import cached_property
from pathlib import Path

from transformers import TrainerCallback

from grpo_lab.files import read_json, write_json
from grpo_lab.grid.storage import Storage

ASKED = ("stop", "exempt")
"""Files of a run by which somebody asks for something; they may go again."""

DECIDED = "rungs.json"
RESULT = "result.json"


class Mirror:
    """Keeps the runs of a grid in an object store.

    Args:
        uri: see `Storage`.
        output_dir: the grid's directory. Each grid has a folder of its own in
            the store, whose name is kept in `grid.store.json`.

    Raises:
        LabError: the store can't be written to.
    """

    def __init__(self, uri: str, output_dir: Path) -> None:
        self.storage = Storage(uri)
        self.storage.check()
        self.folder = _folder(output_dir)
        self.sent: dict[Path, int] = {}

    # --- by the driver, or by whoever steers

    def send_run(self, directory: Path) -> None:
        """Give a run to the workers: its record, and what is decided."""
        name = self.name(directory)
        for file in ("settings.json", *ASKED, DECIDED, RESULT):
            if (directory / file).exists():
                self.storage.send(directory / file, f"{name}/{file}")
            else:
                self.storage.delete(f"{name}/{file}")
        for folder in ("parent", "reward_files"):
            if (directory / folder).is_dir():
                self.storage.push(directory / folder, f"{name}/{folder}")

    def exchange(self, directory: Path) -> None:
        """Pass on requests and decisions, and fetch the newest metrics."""
        name = self.name(directory)
        for file in (*ASKED, DECIDED):
            path = directory / file
            written = path.stat().st_mtime_ns if path.exists() else 0
            if written == self.sent.get(path, 0):
                continue
            if written:
                self.storage.send(path, f"{name}/{file}")
            else:
                self.storage.delete(f"{name}/{file}")
            self.sent[path] = written
        self.storage.fetch(f"{name}/metrics.csv", directory / "metrics.csv")

    def has_finished(self, directory: Path) -> bool:
        """Whether a run is done, though no driver has noted it."""
        with tempfile.TemporaryDirectory() as place:
            found = Path(place) / RESULT
            self.storage.fetch(f"{self.name(directory)}/{RESULT}", found)
            return (read_json(found) or {}).get("status") == "done"

    def collect(self, directory: Path) -> None:
        """Fetch everything of a run but its checkpoints."""
        skip = ("checkpoint-*", *ASKED, DECIDED)
        self.storage.pull(
            self.name(directory), directory, skip=skip, delete=False
        )
        base = directory.parent.parent / "base"
        self.storage.pull(f"{self.folder}/base", base, delete=False)

    def fetch_checkpoints(self, directory: Path, place: Path) -> None:
        """Fetch what the store has of a run, to another place."""
        self.storage.pull(self.name(directory), place)

    def name(self, directory: Path) -> str:
        """Of a run in the store."""
        return f"{self.folder}/runs/{directory.name}"

    # --- by a worker

    @cached_property
    def root(self) -> Path:
        """This process's own copy of the grid's directory."""
        return Path(tempfile.mkdtemp(prefix="grpo-lab-grid-"))

    def __getstate__(self) -> dict:
        """Each process has its own directory."""
        return {"storage": self.storage, "folder": self.folder, "sent": {}}

    def forget(self) -> None:
        """Delete this process's copy of the runs; the store has them."""
        shutil.rmtree(self.root / "runs", ignore_errors=True)

    def close(self) -> None:
        """Delete everything that this process has copied."""
        shutil.rmtree(self.root, ignore_errors=True)

    def fetch_run(self, run: str) -> Path:
        """The directory of a grid in which a run can be trained here."""
        directory = self.root / "runs" / run
        self.storage.pull(self.name(directory), directory)
        base = self.root / "base"
        self.storage.pull(f"{self.folder}/base", base, delete=False)
        return self.root

    def before(self, directory: Path) -> None:
        """Fetch what was asked for meanwhile, or is asked for no more."""
        for file in ASKED:
            name = f"{self.name(directory)}/{file}"
            if not self.storage.fetch(name, directory / file):
                (directory / file).unlink(missing_ok=True)

    def after(self, directory: Path) -> None:
        """Push everything but what the driver writes.

        The answers of the base model first: a run that is done has them.
        """
        if (self.root / "base").exists():
            name = f"{self.folder}/base"
            self.storage.push(self.root / "base", name, delete=False)
        skip = (*ASKED, DECIDED)
        self.storage.push(directory, self.name(directory), skip=skip)

    def callback(self, directory: Path) -> TrainerCallback:
        """Pushes each checkpoint, and looks for a request to stop."""
        return _Pushing(self, directory)


def _folder(output_dir: Path) -> str:
    """The name of a grid's folder in the store, made at the first start."""
    note = output_dir / "grid.store.json"
    found = read_json(note)
    if found is None:
        found = {"folder": f"{output_dir.resolve().name}-{uuid.uuid4().hex}"}
        write_json(note, found)
    return found["folder"]


class _Pushing(TrainerCallback):
    def __init__(self, mirror: Mirror, directory: Path) -> None:
        self.mirror, self.directory = mirror, directory

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """The checkpoint of the last step is marked as complete by now."""
        if state.global_step:
            self.mirror.before(self.directory)
            self.mirror.after(self.directory)
