"""What runs in the processes of rewards.contract.reward_file.

The learner's file is imported and called here, and nowhere else.
"""

import contextlib
import dataclasses
import inspect
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewards.contract.reward_file import (
    BESIDE,
    CALL,
    Score,
    finite_score,
    told,
)


class _UnusableError(Exception):
    """The file can't be used; the message says why and what to do."""


def inspector_of(path: str, source: str, folder: str) -> Callable[[Any], str]:
    """Return the handler that says what is wrong with a reward file, or "".

    Called in a worker, which then works below `folder`. Any request has the
    same answer.
    """
    _enter(folder)

    def look(request: Any) -> str:
        try:
            _load(path, source)
        except _UnusableError as error:
            return str(error)
        return ""

    return look


def handler_of(
    path: str, source: str, folder: str
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the handler that scores one completion with a reward file.

    Called in a worker, which then works below `folder`. A request holds the
    three keywords of the function; the reply holds the fields of a Score.
    """
    _enter(folder)
    function = _load(path, source)

    def handle(call: dict[str, Any]) -> dict[str, Any]:
        try:
            score = finite_score(function(**call))
        except MemoryError:
            raise  # the worker knows better what has happened
        except BaseException as error:  # SystemExit must not end the worker
            score = Score(None, "error", told(error, path))
        return dataclasses.asdict(score)

    return handle


def _load(path: str, source: str) -> Callable[..., Any]:
    """Run the file's text as a module and return its function `reward`."""
    code = _compiled(path, source)
    module = types.ModuleType("reward_file")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look there
    sys.path.append(str(Path(path).parent))  # for the helpers beside it
    sys.dont_write_bytecode = True
    try:
        exec(code, module.__dict__)
    except MemoryError:
        raise
    except ModuleNotFoundError as error:
        raise _UnusableError(
            f"it imports {error.name!r}, which is neither installed here nor "
            f"beside the file ({told(error, path)}). Install that package "
            "or do without it"
        ) from None
    except BaseException as error:
        lost = isinstance(error, FileNotFoundError)
        raise _UnusableError(
            f"importing it failed with {told(error, path)}. "
            + (BESIDE if lost else "Mend that line")
        ) from None
    function: Any = module.__dict__.get("reward")
    _check_call(function, module)
    return function


def _compiled(path: str, source: str) -> types.CodeType:
    try:
        return compile(source, path, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()[:60]
        where = f"line {error.lineno or 1}"
        problem = f"{where} is no valid Python ({error.msg}): `{line}`"
    except (ValueError, RecursionError, MemoryError) as error:
        problem = f"Python can't compile it ({type(error).__name__}: {error})"
    raise _UnusableError(f"{problem}. Mend that line")


def _check_call(function: Any, module: types.ModuleType) -> None:
    form = "def reward(question, answer, completion):"
    if not callable(function):
        others = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == "reward_file"
        ]
        found = f"only {', '.join(others[:5])}" if others else "none at all"
        raise _UnusableError(
            f"it must define a function named reward and defines {found}. "
            f"Write `{form}`"
        )
    flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE
    flags |= inspect.CO_ASYNC_GENERATOR
    if getattr(getattr(function, "__code__", None), "co_flags", 0) & flags:
        raise _UnusableError(
            "its function reward is asynchronous or a generator (it has "
            "`async` or `yield`), so a call gives no number. Write a plain "
            f"`{form}` that returns one"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(CALL))
    except (TypeError, ValueError) as error:
        raise _UnusableError(
            f"its function reward{_signature(function)} can't be called as "
            f"reward(question=..., answer=..., completion=...): {error}. "
            f"Write `{form}`"
        ) from None


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:  # one written in C has none
        return ""


def _enter(folder: str) -> None:
    """Make an empty folder below `folder`, and stay in it.

    A worker that takes the place of a lost one takes its folder, emptied.
    """
    own = os.path.join(os.path.realpath(folder), str(os.getppid()))
    shutil.rmtree(own, ignore_errors=True)
    os.makedirs(own, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # no working directory
        sys.path[:] = [
            os.path.abspath(place) if os.path.exists(place or ".") else place
            for place in sys.path
        ]
    os.chdir(own)
    tempfile.tempdir = own
    os.environ.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), own))
