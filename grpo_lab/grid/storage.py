"""Runs of machines that share no disk, kept in an object store.

A store is a URI: `s3://BUCKET/PREFIX?region=eu-central-1`, or with
`?scheme=http&endpoint_override=HOST:PORT` any server that speaks S3;
`gs://BUCKET/PREFIX` or `abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX`.
Credentials come from where the provider's own tools look for them. What the
network refuses is tried again by the store's client.

A finished checkpoint never changes: it is copied once, and the object
`checkpoint-N.complete` beside it, without which the copy does not count,
comes last. Everything else is small and is overwritten when it has changed;
`result.json` comes last of all.
"""

import contextlib
import functools
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow
from pyarrow import fs
from transformers import TrainerCallback

from grpo_lab.errors import LabError, first_line
from grpo_lab.files import read_json, write_json

KEPT = 2
"""Newest complete checkpoints of a run that stay in the store."""

TRIES = 10
"""Of each request to S3, with pauses of up to 20 s: about a minute."""

REQUESTS = ("stop", "exempt")
"""Files of a run by which somebody asks for something; they may go again."""

DECIDED = (*REQUESTS, "rungs.json")
"""Files of a run that only the driver writes."""

RESULT = "result.json"

_DISK = fs.LocalFileSystem()
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MARK = re.compile(r"checkpoint-(\d+)\.complete")
_NOT_SMALL = re.compile(
    r"(part-)?checkpoint-\d+(/|\.complete$)|(.*/)?[^/]*\.(part|lock)(/|$)"
)


def _reported(method: Callable) -> Callable:
    """A method of `Mirror` whose failures say what to do about them."""

    @functools.wraps(method)
    def reported(self, *arguments):
        try:
            return method(self, *arguments)
        except (OSError, pyarrow.ArrowException) as error:
            raise LabError(
                f"The store {shown(self.uri)} or this disk has failed: "
                f"{first_line(error)[:300]} See that there is room on both, "
                "that this machine reaches the store, and that its "
                "credentials may read, write and delete there; then run this "
                "again: it goes on where it stopped."
            ) from error

    return reported


class Mirror:
    """Keeps the runs of a grid in an object store.

    The driver's directory holds records, decisions and results; a worker
    trains in a temporary one. It sends its run to the store after each step,
    and whoever takes the run up next begins with that. Can be pickled; each
    process then has its own connection and its own directory.

    Args:
        uri: see the module.
        output_dir: the grid's directory. Each grid has a folder of its own in
            the store, whose name is kept in `grid.store.json`.

    Raises:
        LabError: the URI names no store, or nothing can be written to it.
            From every method: the store or the disk has failed.
    """

    def __init__(self, uri: str, output_dir: Path) -> None:
        _open(uri)  # nothing is written for a place that is none
        note = Path(output_dir) / "grid.store.json"
        name = f"{Path(output_dir).resolve().name}-{uuid.uuid4().hex}"
        found = read_json(note) or {"folder": name}
        write_json(note, found)
        self.uri, self.folder = uri, found["folder"]
        self.sent: dict[str, tuple[int, int]] = {}
        self._check()

    def __getstate__(self) -> dict:
        return {"uri": self.uri, "folder": self.folder, "sent": {}}

    @functools.cached_property
    def _store(self) -> fs.SubTreeFileSystem:
        """What is below the grid's folder in the store."""
        store, top = _open(self.uri)
        return fs.SubTreeFileSystem(f"{top.rstrip('/')}/{self.folder}", store)

    @_reported
    def _check(self) -> None:
        name = f"check-{uuid.uuid4().hex}"
        with self._store.open_output_stream(name) as stream:
            stream.write(b"ok")
        self._store.delete_file(name)

    # --- by the driver, or by whoever steers

    @_reported
    def send_run(self, directory: Path) -> None:
        """Give a run to the workers: its record, and what is decided."""
        stored = self._list(f"runs/{directory.name}")
        names = ("settings.json", *DECIDED, RESULT)
        self._send_or_delete(directory, names, stored)
        for folder in ("parent", "reward_files"):
            place = f"runs/{directory.name}/{folder}"
            self._send_files(directory / folder, place, all_of_it=True)

    @_reported
    def exchange(self, directory: Path) -> None:
        """Pass on requests and decisions, and fetch the newest metrics."""
        place = f"runs/{directory.name}"
        stored = [file for file in DECIDED if f"{place}/{file}" in self.sent]
        self._send_or_delete(directory, DECIDED, stored)
        self._fetch(f"{place}/metrics.csv", directory / "metrics.csv")

    @_reported
    def has_finished(self, directory: Path) -> bool:
        """Whether a run is done, though no driver has noted it."""
        with tempfile.TemporaryDirectory() as place:
            found = Path(place, RESULT)
            self._fetch(f"runs/{directory.name}/{RESULT}", found)
            return (read_json(found) or {}).get("status") == "done"

    @_reported
    def collect(self, directory: Path) -> None:
        """Fetch everything of a run but its checkpoints."""
        self._fetch_files(f"runs/{directory.name}", directory, DECIDED)
        self._fetch_files("base", directory.parent.parent / "base")

    @_reported
    def fetch_checkpoints(self, directory: Path, place: Path) -> None:
        """Fetch the newest complete checkpoints of a run to another place.

        One that a worker has replaced by newer ones meanwhile is left out.
        """
        run = f"runs/{directory.name}"
        for step in _numbers(_MARK, self._list(run))[:KEPT]:
            part = place / f"part-checkpoint-{step}"
            part.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._copy_here(f"{run}/checkpoint-{step}", part)
                if step in _numbers(_MARK, self._list(run)):
                    part.rename(place / f"checkpoint-{step}")
            shutil.rmtree(part, ignore_errors=True)

    # --- by a worker

    @functools.cached_property
    def root(self) -> Path:
        """This process's own copy of the grid's directory."""
        return Path(tempfile.mkdtemp(prefix="grpo-lab-grid-"))

    def close(self) -> None:
        """Delete everything that this process has copied."""
        shutil.rmtree(self.root, ignore_errors=True)

    @_reported
    def fetch_run(self, run: str) -> Path:
        """A grid's directory in which this run alone can be trained here."""
        shutil.rmtree(self.root / "runs", ignore_errors=True)
        directory = self.root / "runs" / run
        # First, for the metrics of a checkpoint's steps were sent before it.
        self.fetch_checkpoints(directory, directory)
        self._fetch_files(f"runs/{run}", directory)
        self._fetch_files("base", self.root / "base")
        return self.root

    @_reported
    def before(self, directory: Path) -> None:
        """Fetch what was asked for meanwhile, or is asked for no more."""
        for file in REQUESTS:
            place = f"runs/{directory.name}/{file}"
            if not self._fetch(place, directory / file):
                (directory / file).unlink(missing_ok=True)

    @_reported
    def after(self, directory: Path) -> None:
        """Send everything but what the driver writes.

        The answers of the base model first: a run that is done has them.
        """
        place = f"runs/{directory.name}"
        self._send_files(self.root / "base", "base")
        self._send_files(directory, place, (*DECIDED, RESULT))
        self._send_checkpoints(directory, place)
        if (directory / RESULT).exists():
            self._send(directory / RESULT, f"{place}/{RESULT}")

    def callback(self, directory: Path) -> TrainerCallback:
        """Sends each checkpoint, and looks for a request to stop."""
        return _Sending(self, directory)

    # --- files and checkpoints

    def _send_or_delete(
        self, directory: Path, names: Iterable[str], stored: Collection[str]
    ) -> None:
        for file in names:
            place = f"runs/{directory.name}/{file}"
            if (directory / file).exists():
                self._send(directory / file, place)
            elif file in stored:
                self._store.delete_file(place)
                self.sent.pop(place, None)

    def _send_files(
        self,
        folder: Path,
        place: str,
        skip: Collection[str] = (),
        all_of_it: bool = False,
    ) -> None:
        for file in sorted(
            path for path in folder.rglob("*") if path.is_file()
        ):
            name = file.relative_to(folder).as_posix()
            if all_of_it or not (_NOT_SMALL.match(name) or name in skip):
                self._send(file, f"{place}/{name}")

    def _send(self, file: Path, place: str) -> None:
        """Store a file if it has changed; it appears whole or not at all."""
        if self.sent.get(place) != _stamp(file):
            stamp = _stamp(file)
            self._copy_there(file, place)
            self.sent[place] = stamp

    def _fetch_files(
        self, place: str, folder: Path, skip: Collection[str] = ()
    ) -> None:
        """Fetch small files, the result last."""
        names = self._list(place, files_below=True)
        for name in sorted(names, key=lambda name: (name == RESULT, name)):
            if not _NOT_SMALL.match(name) and name not in skip:
                self._fetch(f"{place}/{name}", folder / name)

    def _fetch(self, place: str, file: Path) -> bool:
        """Get a file, whole or not at all; False if it is not stored."""
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._copy_here(place, part)
            os.replace(part, file)
        except FileNotFoundError:
            return False
        finally:
            part.unlink(missing_ok=True)
        self.sent[place] = _stamp(file)
        return True

    def _send_checkpoints(self, directory: Path, place: str) -> None:
        """Store what is new, the newest first, then delete what is old."""
        stored = _numbers(_MARK, self._list(place))
        marks = directory.glob("checkpoint-*/complete")
        for step in _numbers(_CHECKPOINT, [m.parent.name for m in marks]):
            if step not in stored:
                name = f"checkpoint-{step}"
                self._copy_there(directory / name, f"{place}/{name}")
                mark = f"{place}/{name}.complete"
                self._store.open_output_stream(mark).close()
        names = self._list(place)
        newest = _numbers(_MARK, names)[:KEPT]
        for step in _numbers(_CHECKPOINT, names):
            if newest and step < newest[-1]:
                if f"checkpoint-{step}.complete" in names:
                    mark = f"{place}/checkpoint-{step}.complete"
                    self._store.delete_file(mark)
                self._store.delete_dir(f"{place}/checkpoint-{step}")

    def _list(self, place: str, files_below: bool = False) -> list[str]:
        """What lies in a folder; or all files below it, by their paths."""
        found = self._store.get_file_info(
            fs.FileSelector(place, allow_not_found=True, recursive=files_below)
        )
        return [
            info.path[len(place) + 1 :]
            for info in found
            if info.is_file or not files_below
        ]

    def _copy_there(self, source: Path, place: str) -> None:
        fs.copy_files(str(source), place, _DISK, self._store)

    def _copy_here(self, place: str, target: Path) -> None:
        fs.copy_files(place, str(target), self._store, _DISK)


class _Sending(TrainerCallback):
    def __init__(self, mirror: Mirror, directory: Path) -> None:
        self.mirror, self.directory = mirror, directory

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """The checkpoint of the last step is marked as complete by now."""
        if state.global_step:
            self.mirror.before(self.directory)
            self.mirror.after(self.directory)


def shown(uri: str) -> str:
    """A URI without key, secret and options, to be shown or logged."""
    bare = re.split(r"[?#]", uri, maxsplit=1)[0]
    # An Azure container stands where others have a key.
    kept = r"//[^/@:]*" if bare.startswith("abfs") else "//"
    return re.sub(rf"({kept})[^/]*(?=@)", r"\1", bare).replace("//@", "//")


def _stamp(file: Path) -> tuple[int, int]:
    """What says that a file has not changed: its size and its mtime."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _numbers(pattern: re.Pattern, names: Iterable[str]) -> list[int]:
    """The numbers of those names that have the form, the largest first."""
    found = (pattern.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _open(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system that a URI names, and the path in it.

    Raises:
        LabError: it names none.
    """
    try:
        parts = urlsplit(uri)
        if parts.scheme == "file" or not parts.netloc:
            raise ValueError("it has no bucket")
        if parts.scheme == "s3":
            return _open_s3(uri)
        return fs.FileSystem.from_uri(uri)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        words = first_line(error)[:300].replace(uri, shown(uri))
        # Without its cause, which may show the URI with its secret.
        raise LabError(
            f"{shown(uri)!r} can't be used as a store: {words} Name a place "
            "such as s3://bucket/prefix or gs://bucket/prefix, with a space "
            "written as %20."
        ) from None


def _open_s3(uri: str) -> tuple[fs.FileSystem, str]:
    """By hand, for a URI can't say how often to try."""
    parts = urlsplit(uri)
    options: dict = dict(parse_qsl(parts.query))
    bucket = parts.netloc.rpartition("@")[2]
    if not {"region", "endpoint_override"} & options.keys():
        options["region"] = fs.resolve_s3_region(bucket)
    store = fs.S3FileSystem(
        access_key=unquote(parts.username) if parts.username else None,
        secret_key=unquote(parts.password) if parts.password else None,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=TRIES),
        **options,
    )
    return store, bucket + unquote(parts.path)
