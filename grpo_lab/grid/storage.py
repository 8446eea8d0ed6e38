"""Run directories of machines that share no disk, kept in an object store.

A store is named by a URI that `pyarrow.fs` understands:

    s3://BUCKET/PREFIX?region=eu-central-1
    s3://BUCKET/PREFIX?scheme=http&endpoint_override=HOST:PORT
    gs://BUCKET/PREFIX
    abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX
    file:///PATH    a disk that all machines see

Credentials come from where the provider's own tools look for them.

A folder `checkpoint-N` counts only with the file `complete` in it, and a run
is over only with `result.json`. Whichever way a directory goes, and wherever
a crash cuts it short: these files go first when something of theirs changes
or disappears, and come last.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import pyarrow
from pyarrow import fs

from grpo_lab.errors import LabError

COMPLETE = "complete"
"""The file that marks a checkpoint which was written to its end."""

RESULT = "result.json"
"""The file that says how a run ended."""

NEVER = ("*.part", "*.lock", "part-checkpoint-*")
"""What is only of use to the process that writes it: it stays where it is."""

KEPT = 2
"""Newest complete checkpoints that `Storage.pull` fetches."""

PAUSES = (0.5, 1.0, 2.0)
"""Seconds between the tries of what the store or the network refused."""

GOOGLE_SECONDS = 60
"""For how long Google's client tries by itself; else it is 15 minutes."""

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "file")
_WHOLE = ("s3", "gcs", "abfs")
"""Kinds of stores in which a file appears only once it is whole."""

_CHUNK = 8 * 2**20
_CHECKPOINT = re.compile(r"(?:^|.*/)checkpoint-(\d+)(?=/)")
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError,
)  # fmt: skip
_FINAL_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_FINAL_WORDS = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "PERMISSION_DENIED")

_Stamp = tuple[int, int]
"""A local file's size in bytes and its mtime in ns."""


@dataclass
class Storage:
    """A place in an object store, for directories and single files.

    Can be pickled; it connects when it is first used. A name is a path below
    the URI, such as "runs/NAME"; one thread at a time may use it.

    Args:
        uri: where; see the module.

    Raises:
        LabError: from the constructor, it is no URI of a known store; from
            every method, the store or the local disk refused something (what
            may pass is tried again a few times), or the name leads out of
            the place.
    """

    uri: str

    def __post_init__(self) -> None:
        self.uri = str(self.uri)
        _refuse_uri(self.uri)
        self._opened: tuple[fs.FileSystem, str] | None = None
        # What the store has of each name, as far as this object has seen it.
        self._same: dict[str, dict[str, _Stamp]] = {}

    def __getstate__(self) -> dict:
        return {"uri": self.uri}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def __repr__(self) -> str:
        return f"Storage({self.shown!r})"

    @property
    def shown(self) -> str:
        """The URI without key, secret and options, to be shown."""
        return _shown(self.uri)

    def check(self) -> None:
        """Write, read and delete one small file.

        Raises:
            LabError: that does not work.
        """
        name, text = f".check-{os.urandom(4).hex()}", b"ok"
        try:
            with self._writing(name) as stream:
                stream.write(text)
            with self._reading(name) as stream:
                found = stream.read()
            self._delete_one(name)
        except (OSError, pyarrow.ArrowException) as error:
            raise LabError(
                f"{self.shown} can't be used to store runs: "
                f"{_words(error)}. See that the bucket or directory exists, "
                "that this machine reaches it, and that its credentials "
                "may read, write and delete there; then run this again."
            ) from error
        if found != text:
            raise LabError(
                f"{self.shown} does not give back what was written to it: "
                "a file of 2 bytes came back as another. Choose another "
                "place to store the runs."
            )

    # --- Directories ---------------------------------------------------------

    def push(
        self,
        folder: Path,
        name: str,
        skip: tuple[str, ...] = (),
        delete: bool = True,
    ) -> None:
        """Make the stored directory the same as a local one.

        Sends what is new or has changed, then deletes what is gone here. A
        checkpoint without its mark, and files of `NEVER`, are not sent. A
        machine that takes over a run pulls it first: what it lacks is
        deleted.

        Args:
            folder: the local directory; its files may come and go meanwhile.
            name: of the stored one.
            skip: patterns of relative paths, or of folders, that are neither
                sent nor deleted: what others write there.
            delete: False where others store files of their own as well.
        """
        folder, here = Path(folder), self._scan(Path(folder))
        with self._telling(f"store {folder}"):
            _Push(self, folder, name, here, skip).run(delete)

    def pull(
        self,
        name: str,
        folder: Path,
        skip: tuple[str, ...] = (),
        delete: bool = True,
    ) -> None:
        """Make a local directory the same as the stored one.

        Fetches what is not here with the same size and an mtime as new or
        newer, of checkpoints the newest `KEPT`, and deletes what the store
        does not have. If nothing is stored there, nothing happens.

        Args:
            name: of the stored directory.
            folder: the local one; made if missing.
            skip: patterns of relative paths, or of folders, that are neither
                fetched nor deleted, such as "checkpoint-*".
            delete: False to keep what is here only.
        """
        with self._telling(f"fetch {name} into {folder}"):
            _Pull(self, name, Path(folder), skip).run(delete)

    # --- Single files --------------------------------------------------------

    def send(self, file: Path, name: str) -> None:
        """Store one file; it appears whole or not at all."""
        with self._telling(f"store {file}"):
            self._send(Path(file), name)

    def fetch(self, name: str, file: Path) -> bool:
        """Get one file, whole or not at all; False if it is not stored."""
        with self._telling(f"fetch {name} to {file}"):
            return self._fetch(name, Path(file), None)

    def delete(self, name: str) -> None:
        """Delete a stored file, if it is there."""
        with self._telling(f"delete {name}"):
            self._delete(name)

    # --- The store -----------------------------------------------------------

    def _open(self) -> tuple[fs.FileSystem, str]:
        """The file system, and the path in it that the URI names."""
        if self._opened is None:
            try:
                self._opened = fs.FileSystem.from_uri(_with_limit(self.uri))
            except (pyarrow.ArrowInvalid, NotImplementedError) as error:
                words = _words(error).replace(self.uri, self.shown)
                raise LabError(
                    f"{self.shown} can't be understood: {words}. {_EXAMPLES}"
                ) from error
        return self._opened

    def _join(self, name: str) -> str:
        parts = str(name).split("/")
        if not all(parts) or {".", ".."} & {*parts} or "\\" in str(name):
            raise LabError(
                f"{name!r} is no name in a store. Name a path below "
                f"{self.shown} with single slashes, such as runs/first."
            )
        return "/".join((self._open()[1].rstrip("/"), *parts))

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pyarrow.ArrowException) as error:
            raise LabError(
                f"Could not {what} ({self.shown}): {_words(error)}. What was "
                "finished before is still there. See that there is room on "
                "this disk and in the store, and that this machine reaches "
                "the store and may write to it; then run this again: it "
                "goes on where it stopped."
            ) from error

    def _retry(self, call: Callable, *arguments):
        for pause in PAUSES:
            try:
                return call(*arguments)
            except OSError as error:
                if _is_final(error):
                    raise
                time.sleep(pause)
        return call(*arguments)

    def _is_file(self, name: str) -> bool:
        info = self._open()[0].get_file_info(self._join(name))
        return info.type == fs.FileType.File

    def _list(self, name: str) -> dict[str, fs.FileInfo]:
        """All files and folders below a name, by their paths from there."""
        top = self._join(name)
        selector = fs.FileSelector(top, allow_not_found=True, recursive=True)
        found = self._retry(self._open()[0].get_file_info, selector)
        paths = {info.path[len(top) :].strip("/"): info for info in found}
        return {path: info for path, info in paths.items() if path}

    def _reading(self, name: str) -> pyarrow.NativeFile:
        # Else a name that ends in .gz would have it unpacked.
        return self._open()[0].open_input_stream(
            self._join(name), compression=None
        )

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[pyarrow.NativeFile]:
        """A stream to a file that appears whole or not at all."""
        store, path = self._open()[0], self._join(name)
        whole = store.type_name in _WHOLE
        part = path if whole else f"{path}.part"
        if not whole:
            store.create_dir(path.rpartition("/")[0], recursive=True)
        stream = store.open_output_stream(part, compression=None)
        try:
            yield stream
        except BaseException:
            # A stream can't be given up: closing it, which its end does as
            # well, makes the file appear, cut short.
            with contextlib.suppress(OSError):
                stream.close()
                store.delete_file(part)
            raise
        stream.close()
        if not whole:
            store.move(part, path)

    def _send(self, file: Path, name: str) -> None:
        self._retry(self._send_once, file, name)

    def _send_once(self, file: Path, name: str) -> None:
        with file.open("rb") as source:
            # Before the store hears of it: a small file is whole by now.
            chunk = source.read(_CHUNK)
            with self._writing(name) as target:
                while chunk:
                    target.write(chunk)
                    chunk = source.read(_CHUNK)

    def _fetch(self, name: str, file: Path, mtime: int | None) -> bool:
        """Get a file with the mtime in ns that it has in the store."""
        return self._retry(self._fetch_once, name, file, mtime)

    def _fetch_once(self, name: str, file: Path, mtime: int | None) -> bool:
        try:
            source = self._reading(name)
        except FileNotFoundError:
            return False
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with source, part.open("wb") as target:
                _copy(source, target)
            if mtime is not None:
                os.utime(part, ns=(mtime, mtime))
            os.replace(part, file)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        return True

    def _delete(self, name: str) -> None:
        self._retry(self._delete_one, name)

    def _delete_one(self, name: str) -> None:
        # Not every store says so when there is no such file.
        if self._is_file(name):
            with contextlib.suppress(FileNotFoundError):
                self._open()[0].delete_file(self._join(name))

    def _delete_folder(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retry(self._open()[0].delete_dir, self._join(name))

    def _scan(self, folder: Path) -> dict[str, _Stamp]:
        if not folder.is_dir():
            raise LabError(
                f"There is no directory {folder} to store, and what "
                f"{self.shown} has of it is left as it is. Name a directory "
                "that is there."
            )
        with self._telling(f"read {folder}"):
            return _complete_files(folder)


class _Push:
    """One `Storage.push`; see there."""

    def __init__(
        self,
        storage: Storage,
        folder: Path,
        name: str,
        here: dict[str, _Stamp],
        skip: tuple[str, ...],
    ) -> None:
        self.storage, self.folder, self.name = storage, folder, name
        self.skip, self.here = skip, _without(here, skip)
        found = storage._list(name)
        self.there = _without(found, skip)
        self.spared = found.keys() - self.there.keys()
        self.same = storage._same.setdefault(name, {})

    def run(self, delete: bool) -> None:
        """Send, then delete; the result goes first and comes last."""
        result_is_due = delete or RESULT in self.here
        if result_is_due and RESULT in self.there and self._changed(RESULT):
            self._forget(RESULT)
        for checkpoint, paths in _by_checkpoint(self.here):
            if checkpoint:
                self._send_checkpoint(checkpoint, paths)
            else:
                for path in paths:
                    if path != RESULT and self._changed(path):
                        self._send(path)
        if delete:
            self._delete_gone()
        if RESULT in self.here and self._changed(RESULT):
            self._send(RESULT)

    def _changed(self, path: str) -> bool:
        """Whether the store lacks a file, or may have another one."""
        stamp, stored = self.here.get(path), self.there.get(path)
        known = stamp and stamp == self.same.get(path)
        return not (known and stored and stored.size == stamp[0])

    def _send(self, path: str) -> bool:
        """Send a file; False if it has gone meanwhile."""
        self.same.pop(path, None)
        try:
            self.storage._send(self.folder / path, f"{self.name}/{path}")
        except FileNotFoundError:
            if (self.folder / path).exists():
                raise  # it is the store that lacks something
            return False
        self.same[path] = self.here[path]
        return True

    def _send_checkpoint(self, checkpoint: str, paths: list[str]) -> None:
        mark = f"{checkpoint}/{COMPLETE}"
        changed = [p for p in paths if p != mark and self._changed(p)]
        lost = self._stored_files(checkpoint) - {*paths}
        if (changed or lost) and mark in self.there:
            self._forget(mark)
        sent = [self._send(path) for path in changed]
        # Else the trainer may be deleting it just now.
        if not self._changed(mark) or lost or not all(sent):
            return
        if self._untouched(checkpoint, paths):
            self._send(mark)

    def _stored_files(self, checkpoint: str) -> set[str]:
        return {
            path
            for path, info in self.there.items()
            if path.startswith(f"{checkpoint}/")
            and info.type == fs.FileType.File
            and not _is_never(path)
        }

    def _untouched(self, checkpoint: str, paths: list[str]) -> bool:
        now = _local_files(self.folder / checkpoint)
        after = {f"{checkpoint}/{path}": now[path] for path in now}
        before = {path: self.here[path] for path in paths}
        return before == _without(after, self.skip)

    def _delete_gone(self) -> None:
        """Delete what is not here: marks, then folders, then files."""
        gone = {path for path in self.there if path not in self.here}
        kept = self.here.keys() | self.spared
        used = {str(above) for path in kept for above in Path(path).parents}
        folders = {
            path
            for path in gone - used
            if self.there[path].type == fs.FileType.Directory
        }
        for path in filter(_is_mark, gone):
            self._forget(path)
        for path in sorted(folders):
            if not _below(path, folders):
                self.storage._delete_folder(f"{self.name}/{path}")
        for path in sorted(gone - used - folders):
            if path in self.there and not _below(path, folders):
                self._forget(path)

    def _forget(self, path: str) -> None:
        """Delete a stored file."""
        self.storage._delete(f"{self.name}/{path}")
        self.same.pop(path, None)
        del self.there[path]


class _Pull:
    """One `Storage.pull`; see there."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        folder: Path,
        skip: tuple[str, ...],
    ) -> None:
        self.storage, self.name, self.folder = storage, name, folder
        self.there = _wanted(storage._list(name), skip)
        self.here = _without(_local_files(folder), skip)
        self.same = storage._same.setdefault(name, {})

    def run(self, delete: bool) -> None:
        """Delete, then fetch; the result goes first and comes last."""
        if not self.there:
            return
        result_is_due = delete or RESULT in self.there
        if result_is_due and RESULT in self.here and self._differs(RESULT):
            self._drop(RESULT)
        if delete:
            self._delete_gone()
        for checkpoint, paths in _by_checkpoint(self.there):
            if checkpoint:
                self._fetch_checkpoint(checkpoint, paths)
            else:
                for path in paths:
                    if path != RESULT:
                        self._fetch(path)
        if RESULT in self.there:
            self._fetch(RESULT)

    def _differs(self, path: str) -> bool:
        """Whether a file is not here as it is stored."""
        stored, stamp = self.there.get(path), self.here.get(path)
        if stored is None or stamp is None or stored.mtime_ns is None:
            return True
        return stored.size != stamp[0] or stored.mtime_ns > stamp[1]

    def _fetch(self, path: str) -> bool:
        """Get a file if it differs; False if the store has lost it."""
        stored, file = self.there[path], self.folder / path
        if self._differs(path):
            name = f"{self.name}/{path}"
            if not self.storage._fetch(name, file, stored.mtime_ns):
                return False
            self.here[path] = _stamp_of(file)
        # A newer file of the same size may still be another one.
        if self.here[path] == (stored.size, stored.mtime_ns):
            self.same[path] = self.here[path]
        return True

    def _fetch_checkpoint(self, checkpoint: str, paths: list[str]) -> None:
        mark = f"{checkpoint}/{COMPLETE}"
        others = [path for path in paths if path != mark]
        if any(map(self._differs, others)) and mark in self.here:
            self._drop(mark)
        fetched = [self._fetch(path) for path in others]
        if all(fetched):
            self._fetch(mark)

    def _delete_gone(self) -> None:
        gone = [path for path in self.here if path not in self.there]
        for path in sorted(gone, key=lambda path: not _is_mark(path)):
            self._drop(path)
            self._drop_empty((self.folder / path).parent)

    def _drop_empty(self, folder: Path) -> None:
        # The first that is not empty ends it.
        with contextlib.suppress(OSError):
            while folder != self.folder:
                folder.rmdir()
                folder = folder.parent

    def _drop(self, path: str) -> None:
        """Delete a local file."""
        (self.folder / path).unlink(missing_ok=True)
        del self.here[path]
        self.same.pop(path, None)


# --- Local files -------------------------------------------------------------


def _stamp_of(file: Path) -> _Stamp:
    """What tells that a local file has not changed."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _local_files(folder: Path) -> dict[str, _Stamp]:
    """The files below a folder but for `NEVER`, by their relative paths."""
    found = {}
    for above, _, names in os.walk(folder, onerror=_unless_gone):
        for name in names:
            file = Path(above, name)
            path = file.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if not _is_never(path):
                    found[path] = _stamp_of(file)
    return found


def _complete_files(folder: Path) -> dict[str, _Stamp]:
    """The same without checkpoints that are not complete.

    A file that says that others are there counts only if it was there before
    these were looked for.
    """
    before, found = _local_files(folder), _local_files(folder)
    return {
        path: stamp
        for path, stamp in found.items()
        if (_checkpoint_of(path) is None or _mark_of(path) in before)
        and (path != RESULT or path in before)
    }


def _unless_gone(error: OSError) -> None:
    # A folder that can't be read is not one that is gone: what is stored of
    # it would be deleted.
    if not isinstance(error, FileNotFoundError):
        raise error


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while chunk := source.read(_CHUNK):
        target.write(chunk)


# --- Paths -------------------------------------------------------------------


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a relative path, or a folder above it, has such a name."""
    above = [str(one) for one in Path(path).parents][:-1]
    return any(
        fnmatchcase(one, pattern)
        for one in (path, *above)
        for pattern in patterns
    )


def _without(paths: dict, patterns: tuple[str, ...]) -> dict:
    """What `_matches` none of some patterns."""
    return {
        path: value
        for path, value in paths.items()
        if not _matches(path, patterns)
    }


def _is_never(path: str) -> bool:
    """Whether a file, or a folder above it, is one of `NEVER`."""
    return any(_matches(part, NEVER) for part in path.split("/"))


def _checkpoint_of(path: str) -> str | None:
    """The folder of the checkpoint that a file belongs to, if to one."""
    found = _CHECKPOINT.match(path)
    return found.group() if found else None


def _mark_of(path: str) -> str:
    return f"{_checkpoint_of(path)}/{COMPLETE}"


def _is_mark(path: str) -> bool:
    return path == _mark_of(path)


def _step_of(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2])


def _newest(paths: dict) -> set[str | None]:
    """The newest `KEPT` complete checkpoints of each run; None for no one."""
    by_run: dict[str, list[str]] = {}
    for path in paths:
        if _is_mark(path):
            checkpoint = _checkpoint_of(path)
            run = checkpoint.rpartition("/")[0]
            by_run.setdefault(run, []).append(checkpoint)
    kept = (sorted(found, key=_step_of)[-KEPT:] for found in by_run.values())
    return {None}.union(*kept)


def _wanted(
    found: dict[str, fs.FileInfo], skip: tuple[str, ...]
) -> dict[str, fs.FileInfo]:
    """The stored files that are worth fetching."""
    files = {
        path: info
        for path, info in _without(found, skip).items()
        if info.type == fs.FileType.File and not _is_never(path)
    }
    kept = _newest(files)
    return {
        path: info
        for path, info in files.items()
        if _checkpoint_of(path) in kept
    }


def _by_checkpoint(paths: dict) -> list[tuple[str | None, list[str]]]:
    """What is of no checkpoint, then each checkpoint, the newest first.

    In this order, for a checkpoint is of use only with the metrics of the
    steps before it, and an old one only until there is a newer one.
    """
    groups: dict[str | None, list[str]] = {}
    for path in sorted(paths):
        groups.setdefault(_checkpoint_of(path), []).append(path)
    loose = groups.pop(None, [])
    newest_first = sorted(
        groups.items(), key=lambda group: _step_of(group[0]), reverse=True
    )
    return [(None, loose), *newest_first]


def _below(path: str, folders: set[str]) -> bool:
    return any(str(above) in folders for above in Path(path).parents)


# --- Words -------------------------------------------------------------------

_EXAMPLES = (
    "Name a place such as s3://bucket/prefix, gs://bucket/prefix or "
    "file:///directory, with a space written as %20."
)


def _refuse_uri(uri: str) -> None:
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise LabError(
            f"{_shown(uri)} is no URI: {error}. {_EXAMPLES}"
        ) from error
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise LabError(
            f"{_shown(uri)!r} names no store that these lessons know: it "
            f"begins with none of {known}. {_EXAMPLES}"
        )
    local = parts.scheme == "file"
    if (not parts.path.strip("/")) if local else not parts.netloc:
        raise LabError(
            f"{_shown(uri)} names no {'directory' if local else 'bucket'}. "
            f"{_EXAMPLES}"
        )


def _shown(uri: str) -> str:
    """A URI without what may be secret in it."""
    bare = uri.partition("?")[0].partition("#")[0]
    # All but an Azure container, which stands where others have a key.
    if bare.startswith("abfs"):
        return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1@", bare)
    return re.sub(r"//[^/]*@", "//", bare)


def _with_limit(uri: str) -> str:
    """A URI for Google with `GOOGLE_SECONDS`, unless it has another limit."""
    option = "retry_limit_seconds"
    if not uri.startswith(("gs:", "gcs:")) or option in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}{option}={GOOGLE_SECONDS}"


def _is_final(error: OSError) -> bool:
    """Whether an error would be the same the next time."""
    return (
        isinstance(error, _FINAL)
        or error.errno in _FINAL_NUMBERS
        or any(word in str(error) for word in _FINAL_WORDS)
    )


def _words(error: Exception) -> str:
    """The first line of an error; some go on for pages."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(". ")
