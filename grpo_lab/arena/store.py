"""What is registered in an arena: names and plain records, in SQLite.

The files of a data set or an experiment lie beside it, in folders of its
name. A record holds what was decided when it was registered; what changes
while an experiment runs is in the experiment's own files.
"""

import contextlib
import difflib
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_lab.errors import LabError
from grpo_lab.files import readable

VERSION = 1
"""Of the tables; a newer one than this is refused."""

KINDS = {
    "dataset": "create_dataset",
    "project": "create_project",
    "experiment": "submit_experiment",
    "deployment": "deploy_agent",
}
"""What can be registered, and the call that does it."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}")

BUSY_SECONDS = 30
"""How long a call waits for another process that writes."""


class Store:
    """The registry of an arena.

    Args:
        home: the arena's directory; made if missing.

    Raises:
        LabError: it can't be written to, or was written by a newer version.
    """

    def __init__(self, home: Path) -> None:
        self.home = Path(home)
        self.path = self.home / "arena.sqlite"
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._prepare()
        except OSError as error:
            raise LabError(
                f"The arena can't be kept in {readable(self.home)}: "
                f"{error.strerror}. Choose a directory that you may write to "
                "with LocalArena(home=...) or --home."
            ) from error

    def _prepare(self) -> None:
        with self._open(write=False) as database:
            [(found,)] = database.execute("PRAGMA user_version")
            if found > VERSION:
                raise LabError(
                    f"The arena in {readable(self.home)} was written by a "
                    f"newer version of this package (state {found}, and this "
                    f"one knows {VERSION}), so nothing in it is touched. "
                    "Update the package, or choose another directory with "
                    "LocalArena(home=...) or --home."
                )
            if found == VERSION:
                return  # so that a full or read-only disk can still be read
            database.execute(
                "CREATE TABLE IF NOT EXISTS records (kind TEXT, name TEXT, "
                "created REAL, record TEXT, PRIMARY KEY (kind, name))"
            )
            database.execute(f"PRAGMA user_version = {VERSION}")

    @contextlib.contextmanager
    def _open(self, write: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        database = None
        try:
            database = sqlite3.connect(self.path, timeout=BUSY_SECONDS)
            with database:
                if write:
                    database.execute("BEGIN IMMEDIATE")
                yield database
        except sqlite3.IntegrityError:
            raise
        except (OSError, sqlite3.Error) as error:
            raise LabError(
                f"The arena's state in {readable(self.path)} can't be used: "
                f"{error}. Choose a directory that you may write to with "
                "LocalArena(home=...) or --home; if the disk is full, free "
                "some space; if the file is broken, move the whole arena "
                "away and begin a new one."
            ) from error
        finally:
            if database is not None:
                database.close()

    def add(self, kind: str, name: str, record: dict) -> None:
        """Register something under a new name.

        Raises:
            LabError: the name is taken.
        """
        row = kind, name, time.time(), json.dumps(record)
        try:
            with self._open() as database:
                database.execute("INSERT INTO records VALUES (?,?,?,?)", row)
        except sqlite3.IntegrityError:
            raise _taken(kind, name) from None

    def refuse_taken(self, kind: str, name: str) -> None:
        """Refuse a name before any work is done for it.

        Raises:
            LabError: it is taken, or it can't be the name of a folder.
        """
        if not NAME.fullmatch(str(name)) or str(name).endswith((" ", ".")):
            raise LabError(
                f"{name!r} can't be the name of {_a(kind)}, since folders are "
                "named so: it must begin with a letter or digit and "
                "have at most 80 letters, digits, spaces, dots, hyphens and "
                "underscores. Type for example 'gsm8k-grpo-v1'."
            )
        if self.has(kind, name):
            raise _taken(kind, name)

    def has(self, kind: str, name: str) -> bool:
        """Whether something is registered under a name."""
        return any(one["name"] == name for one in self.all(kind))

    def get(self, kind: str, name: str) -> dict:
        """A record, with its `name` and the time when it was `created`.

        Raises:
            LabError: there is none of that name.
        """
        every = {one["name"]: one for one in self.all(kind)}
        if name in every:
            return every[name]
        near = difflib.get_close_matches(name, every, n=1, cutoff=0.4)
        known = ", ".join(sorted(every)) or "none"
        advice = (
            f"Type {near[0]!r}." if near else f"Make one with {KINDS[kind]}."
        )
        raise LabError(
            f"There is no {kind} {name!r} in the arena "
            f"{readable(self.home)}; those that are there: {known}. {advice}"
        )

    def all(self, kind: str) -> list[dict]:
        """All records of a kind, the oldest first."""
        with self._open(write=False) as database:
            rows = database.execute(
                "SELECT name, created, record FROM records WHERE kind = ? "
                "ORDER BY created, name",
                (kind,),
            ).fetchall()
        return [
            {"name": name, "created": created, **json.loads(record)}
            for name, created, record in rows
        ]

    def update(self, kind: str, name: str, **changes: object) -> None:
        """Change some values of a record."""
        with self._open() as database:
            [(text,)] = database.execute(
                "SELECT record FROM records WHERE kind = ? AND name = ?",
                (kind, name),
            ).fetchall()
            database.execute(
                "UPDATE records SET record = ? WHERE kind = ? AND name = ?",
                (json.dumps(json.loads(text) | changes), kind, name),
            )

    def delete(self, kind: str, name: str) -> None:
        """Forget a record; no error if there is none."""
        with self._open() as database:
            database.execute(
                "DELETE FROM records WHERE kind = ? AND name = ?",
                (kind, name),
            )


def _taken(kind: str, name: str) -> LabError:
    return LabError(
        f"The name {name!r} is that of {_a(kind)} that is there already, and "
        "nothing is written over it. Choose another name, such as "
        f"{name + '-2'!r}."
    )


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
