"""Runs of machines that share no disk, kept in an object store.

A store is a URI: `s3://BUCKET/PREFIX?region=eu-central-1`, or with
`?scheme=http&endpoint_override=HOST:PORT` any server that speaks S3;
`gs://BUCKET/PREFIX`, `abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX`,
or `file:///PATH` for a disk that all machines see. Credentials come from
where the provider's own tools look for them. What the network refuses is
tried again by the store's client.

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
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow
from pyarrow import fs
from transformers import TrainerCallback

from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json

KEPT = 2
"""Newest complete checkpoints of a run that stay in the store."""

TRIES = 10
"""Of each request to S3, with pauses of up to 20 s: about a minute."""

REQUESTS = ("stop", "exempt")
"""Files of a run by which somebody asks for something; they may go again."""

RUNGS, RESULT = "rungs.json", "result.json"

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
                f"{_first_line(error)}. See that there is room on both, that "
                "this machine reaches the store, and that its credentials "
                "may read, write and delete there; then run this again: it "
                "goes on where it stopped."
            ) from error

    return reported


class Mirror:
    """Keeps the runs of a grid in an object store.

    The driver's directory holds records, decisions and results; a worker
    trains in a temporary one. It sends its run to the store after each step,
    and whoever takes the run up next begins with that. Can be pickled.

    Args:
        uri: see the module.
        output_dir: the grid's directory. Each grid has a folder of its own in
            the store, whose name is kept in `grid.store.json`.

    Raises:
        LabError: the URI names no store, or nothing can be written to it.
            From every method: the store or the disk has failed.
    """

    def __init__(self, uri: str, output_dir: Path) -> None:
        self.uri = str(uri)
        self.folder = _folder(output_dir, self.uri)
        self.sent: dict[str, tuple[int, int]] = {}
        self._check()

    def __getstate__(self) -> dict:
        """Each process has its own connection and its own directory."""
        return {"uri": self.uri, "folder": self.folder}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, sent={})

    @functools.cached_property
    def _store(self) -> fs.SubTreeFileSystem:
        """What is below the grid's folder in the store."""
        store, top = _open(self.uri)
        return fs.SubTreeFileSystem(f"{top.rstrip('/')}/{self.folder}", store)

    @_reported
    def _check(self) -> None:
        self._store.create_dir("runs")
        name = f"runs/check-{uuid.uuid4().hex}"
        with self._store.open_output_stream(name) as stream:
            stream.write(b"ok")
        self._store.delete_file(name)

    # --- by the driver, or by whoever steers

    @_reported
    def send_run(self, directory: Path) -> None:
        """Give a run to the workers: its record, and what is decided."""
        name = _name(directory)
        for file in ("settings.json", *REQUESTS, RUNGS, RESULT):
            self._send_or_delete(directory / file, f"{name}/{file}")
        for folder in ("parent", "reward_files"):
            for path in _files(directory / folder):
                self._send(path, f"{name}/{_below(path, directory)}")

    @_reported
    def exchange(self, directory: Path) -> None:
        """Pass on requests and decisions, and fetch the newest metrics."""
        name = _name(directory)
        for file in (*REQUESTS, RUNGS):
            if (directory / file).exists() or f"{name}/{file}" in self.sent:
                self._send_or_delete(directory / file, f"{name}/{file}")
        self._fetch(f"{name}/metrics.csv", directory / "metrics.csv")

    @_reported
    def has_finished(self, directory: Path) -> bool:
        """Whether a run is done, though no driver has noted it."""
        with tempfile.TemporaryDirectory() as place:
            found = Path(place, RESULT)
            self._fetch(f"{_name(directory)}/{RESULT}", found)
            return (read_json(found) or {}).get("status") == "done"

    @_reported
    def collect(self, directory: Path) -> None:
        """Fetch everything of a run but its checkpoints."""
        self._fetch_files(_name(directory), directory, (*REQUESTS, RUNGS))
        self._fetch_files("base", directory.parent.parent / "base")

    @_reported
    def fetch_checkpoints(self, directory: Path, place: Path) -> None:
        """Fetch the newest complete checkpoints of a run to another place.

        One that a worker has replaced by newer ones meanwhile is left out.
        """
        for step in self._steps(_MARK, _name(directory))[:KEPT]:
            name = f"{_name(directory)}/checkpoint-{step}"
            part = place / f"part-checkpoint-{step}"
            with contextlib.suppress(FileNotFoundError):
                self._copy_here(name, part)
                if self._is_stored(f"{name}.complete"):
                    part.rename(place / f"checkpoint-{step}")
            shutil.rmtree(part, ignore_errors=True)

    # --- by a worker

    @functools.cached_property
    def root(self) -> Path:
        """This process's own copy of the grid's directory."""
        return Path(tempfile.mkdtemp(prefix="grpo-lab-grid-"))

    def forget(self) -> None:
        """Delete this process's copy of the runs; the store has them."""
        shutil.rmtree(self.root / "runs", ignore_errors=True)

    def close(self) -> None:
        """Delete everything that this process has copied."""
        shutil.rmtree(self.root, ignore_errors=True)

    @_reported
    def fetch_run(self, run: str) -> Path:
        """The directory of a grid in which a run can be trained here."""
        directory = self.root / "runs" / run
        # First, for the metrics of a checkpoint's steps were sent before it.
        self.fetch_checkpoints(directory, directory)
        self._fetch_files(_name(directory), directory)
        self._fetch_files("base", self.root / "base")
        return self.root

    @_reported
    def before(self, directory: Path) -> None:
        """Fetch what was asked for meanwhile, or is asked for no more."""
        for file in REQUESTS:
            if not self._fetch(f"{_name(directory)}/{file}", directory / file):
                (directory / file).unlink(missing_ok=True)

    @_reported
    def after(self, directory: Path) -> None:
        """Send everything but what the driver writes.

        The answers of the base model first: a run that is done has them.
        """
        name = _name(directory)
        self._send_files(self.root / "base", "base")
        self._send_files(directory, name, (*REQUESTS, RUNGS, RESULT))
        self._send_checkpoints(directory, name)
        if (directory / RESULT).exists():
            self._send(directory / RESULT, f"{name}/{RESULT}")

    def callback(self, directory: Path) -> TrainerCallback:
        """Sends each checkpoint, and looks for a request to stop."""
        return _Sending(self, directory)

    # --- small files

    def _send_or_delete(self, file: Path, name: str) -> None:
        if file.exists():
            self._send(file, name)
        elif self._is_stored(name):
            self._store.delete_file(name)
            self.sent.pop(name, None)

    def _send_files(
        self, folder: Path, name: str, skip: tuple[str, ...] = ()
    ) -> None:
        for file in _files(folder):
            path = _below(file, folder)
            if not _NOT_SMALL.match(path) and path not in skip:
                self._send(file, f"{name}/{path}")

    def _send(self, file: Path, name: str) -> None:
        """Store a file if it has changed; it appears whole or not at all."""
        stamp = _stamp(file)
        if self.sent.get(name) == stamp:
            return
        if self._store.base_fs.type_name == "local":
            self._store.create_dir(os.path.dirname(name))
            self._copy_there(file, f"{name}.part")
            self._store.move(f"{name}.part", name)
        else:  # an object of any other store appears whole
            self._copy_there(file, name)
        self.sent[name] = stamp

    def _fetch_files(
        self, name: str, folder: Path, skip: tuple[str, ...] = ()
    ) -> None:
        """Fetch small files, the result last."""
        paths = self._list(name, fs.FileType.File)
        for path in sorted(paths, key=lambda path: (path == RESULT, path)):
            if not _NOT_SMALL.match(path) and path not in skip:
                self._fetch(f"{name}/{path}", folder / path)

    def _fetch(self, name: str, file: Path) -> bool:
        """Get a file, whole or not at all; False if it is not stored."""
        if not self._is_stored(name):
            return False
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._copy_here(name, part)
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)
        self.sent[name] = _stamp(file)
        return True

    # --- checkpoints and the store

    def _send_checkpoints(self, directory: Path, name: str) -> None:
        """Store what is new, the newest first, then delete what is old."""
        stored = self._steps(_MARK, name)
        marks = directory.glob("checkpoint-*/complete")
        for step in _numbers(_CHECKPOINT, (m.parent.name for m in marks)):
            if step not in stored:
                place = f"checkpoint-{step}"
                self._copy_there(directory / place, f"{name}/{place}")
                mark = f"{name}/{place}.complete"
                self._store.open_output_stream(mark).close()
        newest = self._steps(_MARK, name)[:KEPT]
        for step in self._steps(_CHECKPOINT, name):
            if newest and step < newest[-1]:
                mark = f"{name}/checkpoint-{step}.complete"
                if self._is_stored(mark):
                    self._store.delete_file(mark)
                self._store.delete_dir(f"{name}/checkpoint-{step}")

    def _steps(self, pattern: re.Pattern, name: str) -> list[int]:
        """The steps of a run's checkpoints or marks, the newest first."""
        return _numbers(pattern, self._list(name))

    def _list(self, name: str, only: fs.FileType | None = None) -> list[str]:
        """What lies in a folder; or all files below it, by their paths."""
        wanted = fs.FileSelector(
            name, allow_not_found=True, recursive=only is not None
        )
        found = self._store.get_file_info(wanted)
        return [
            info.path[len(name) + 1 :]
            for info in found
            if only in (None, info.type)
        ]

    def _is_stored(self, name: str) -> bool:
        return self._store.get_file_info(name).is_file

    def _copy_there(self, source: Path, name: str) -> None:
        # Arrow makes the folders below a folder, but not that one.
        is_disk = self._store.base_fs.type_name == "local"
        if source.is_dir() and is_disk:
            self._store.create_dir(name)
        fs.copy_files(str(source), name, _DISK, self._store)

    def _copy_here(self, name: str, target: Path) -> None:
        if self._store.get_file_info(name).type == fs.FileType.Directory:
            target.mkdir(parents=True, exist_ok=True)
        fs.copy_files(name, str(target), self._store, _DISK)


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


def _folder(output_dir: Path, uri: str) -> str:
    """The name of a grid's folder in the store, made at the first start."""
    _open(uri)  # nothing is written for a place that is none
    note = output_dir / "grid.store.json"
    found = read_json(note)
    if found is None:
        found = {"folder": f"{output_dir.resolve().name}-{uuid.uuid4().hex}"}
        write_json(note, found)
    return found["folder"]


def _name(directory: Path) -> str:
    """Of a run in the store."""
    return f"runs/{directory.name}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _below(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _stamp(file: Path) -> tuple[int, int]:
    """What says that a file has not changed: its size and its mtime."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _numbers(pattern: re.Pattern, names) -> list[int]:
    """The numbers of those names that have the form, the largest first."""
    found = (pattern.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _first_line(error: Exception) -> str:
    """Of an error's text; some go on for pages."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(". ")


def _open(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system that a URI names, and the path in it.

    Raises:
        LabError: it names none.
    """
    try:
        parts = urlsplit(uri)
        place = parts.path if parts.scheme == "file" else parts.netloc
        if not place.strip("/"):
            raise ValueError("it has no bucket or directory")
        if parts.scheme == "s3":
            return _open_s3(uri)
        return fs.FileSystem.from_uri(uri)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        words = _first_line(error).replace(uri, shown(uri))
        # Without its cause, which may show the URI with its secret.
        raise LabError(
            f"{shown(uri)!r} can't be used as a store: {words}. Name a place "
            "such as s3://bucket/prefix, gs://bucket/prefix or "
            "file:///directory, with a space written as %20."
        ) from None


def _typed(name: str, text: str) -> str | bool | float:
    """An option of a URI as `pyarrow.fs.S3FileSystem` takes it."""
    if name.endswith("_timeout"):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _open_s3(uri: str) -> tuple[fs.FileSystem, str]:
    """By hand, for a URI can't say how often to try."""
    parts = urlsplit(uri)
    options = {
        name: _typed(name, text) for name, text in parse_qsl(parts.query)
    }
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
