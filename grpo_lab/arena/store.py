"""What is registered in an arena: a directory for each, with its record.

    HOME/datasets/NAME/record.json
    HOME/projects/NAME/record.json
    HOME/experiments/NAME/record.json
    HOME/deployments/NAME/record.json

The directories are the registry. A new one is made beside its place under a
hidden name and then renamed, so it appears whole or not at all, and of two
processes that take one name at once one fails. A record holds what was
decided when it was registered; what changes while an experiment runs is in
the experiment's own files.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_lab.errors import LabError, nearest
from grpo_lab.files import read_json, readable, write_json, write_whole

KINDS = {
    "dataset": "create_dataset",
    "project": "create_project",
    "experiment": "submit_experiment",
    "deployment": "deploy_agent",
}
"""What can be registered, and the call that does it."""

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,78}[A-Za-z0-9_-])?")
RECORD = "record.json"


class Store:
    """The registry of an arena.

    Args:
        home: the arena's directory; made if missing.

    Raises:
        LabError: it can't be written to.
    """

    def __init__(self, home: Path) -> None:
        self.home = Path(home)
        try:
            self.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(
                f"The arena can't be kept in {readable(self.home)}: "
                f"{error.strerror}. Choose a directory that you may write to "
                "with LocalArena(home=...) or --home."
            ) from error

    def folder(self, kind: str, name: str) -> Path:
        """The directory of something that is registered, or may be."""
        return self.home / f"{kind}s" / name

    def has(self, kind: str, name: str) -> bool:
        """Whether something is registered under a name."""
        return (self.folder(kind, name) / RECORD).is_file()

    def all(self, kind: str) -> list[dict]:
        """All records of a kind, each with its `name`, the oldest first."""
        found = [
            {"name": file.parent.name, **record}
            for file in self.folder(kind, "").glob(f"[!.]*/{RECORD}")
            if (record := read_json(file))  # else it was deleted meanwhile
        ]
        return sorted(found, key=lambda one: (one["created"], one["name"]))

    def get(self, kind: str, name: str) -> dict:
        """A record, with its `name` and the time when it was `created`.

        Raises:
            LabError: there is none of that name.
        """
        every = {one["name"]: one for one in self.all(kind)}
        if name in every:
            return every[name]
        near = nearest(name, every)
        advice = f"Type {near!r}." if near else f"Make one with {KINDS[kind]}."
        raise LabError(
            f"There is no {kind} {name!r} in the arena "
            f"{readable(self.home)}; those that are there: "
            f"{', '.join(sorted(every)) or 'none'}. {advice}"
        )

    def refuse_taken(self, kind: str, name: str) -> None:
        """Refuse a name before any work is done for it.

        Raises:
            LabError: it is taken, or it can't be the name of a folder.
        """
        if not NAME.fullmatch(str(name)):
            raise LabError(
                f"{name!r} can't be the name of a {kind}, since folders are "
                "named so: it must begin with a letter or digit and "
                "have at most 80 letters, digits, spaces, dots, hyphens and "
                "underscores. Type for example 'gsm8k-grpo-v1'."
            )
        if self.folder(kind, name).exists():
            raise self._taken(kind, name)

    def _taken(self, kind: str, name: str) -> LabError:
        return LabError(
            f"The {kind} {name!r}, {readable(self.folder(kind, name))}, is "
            "there already, and nothing is written over it. Choose another "
            f"name, such as {name + '-2'!r}."
        )

    @contextlib.contextmanager
    def new(self, kind: str, name: str) -> Iterator[tuple[Path, dict]]:
        """A directory and a record that appear together, or not at all.

        Yields:
            The directory to write files to, and a dict to fill.

        Raises:
            LabError: the name is taken, or the disk is full.
        """
        folder = self.folder(kind, name)
        part = folder.with_name(f".{name}.{os.getpid()}.part")
        record: dict = {}
        try:
            part.mkdir(parents=True)
            yield part, record
            write_json(part / RECORD, record | {"created": time.time()})
            # Fails if it is there: a directory that is not empty stays.
            part.rename(folder)
        except OSError as error:
            if folder.exists():
                raise self._taken(kind, name) from error
            raise LabError(
                f"The {kind} {name!r} could not be written: "
                f"{error.strerror or error}. Free some space, or choose "
                "another home for the arena; nothing was registered."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def put(self, kind: str, name: str, **values: object) -> None:
        """Change values of a record in a directory that is there already."""
        file = self.folder(kind, name) / RECORD
        before = read_json(file) or {"created": time.time()}
        write_json(file, before | values)

    def delete(self, kind: str, name: str) -> None:
        """Delete a directory, so that a crash leaves no half of it."""
        folder = self.folder(kind, name)
        gone = folder.with_name(f".{name}.{os.getpid()}.gone")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def set_default(self, kind: str, name: str) -> None:
        """Make one the default of its kind.

        Raises:
            LabError: there is none of that name.
        """
        self.get(kind, name)
        write_whole(self.folder(kind, ".default"), name)

    def default(self, kind: str) -> str | None:
        """The name that was made the default, if it is still there."""
        file = self.folder(kind, ".default")
        name = file.read_text() if file.exists() else ""
        return name if name and self.has(kind, name) else None
