"""A hash of reward functions, by their source."""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_lab.evaluation import NUMBERS, Grader


def reward_fingerprint(
    rewards: Sequence[Callable], grader: Grader = NUMBERS
) -> str:
    """Hash of the rewards' source, and of the package that grades answers.

    A function from a package counts with every module of that package,
    since its helpers decide what it pays; one from a notebook with its own
    text, that of the notebook's functions that it calls, and the plain
    values that it reads. Options that were set count too.
    """
    digest = hashlib.sha256()
    for reward in [*rewards, grader.correct]:
        function, layers = unwrapped(reward)
        digest.update(f"{function.__module__}.{function.__name__}".encode())
        digest.update(repr(layers).encode())
        # a reward file is no module that is imported: its text and deadline
        for name in ("source", "seconds"):
            digest.update(str(getattr(function, name, "")).encode())
        for text in _sources(function):
            digest.update(text.encode())
    return digest.hexdigest()


def unwrapped(reward: Callable) -> tuple[Callable, list]:
    """A reward's function, and what was bound to it, the outermost first.

    That is what `rewards.with_options` and `rewards.reward_set` set.
    """
    layers = []
    while isinstance(reward, functools.partial):
        values = [value for value in reward.args if not callable(value)]
        layers.append((values, sorted(reward.keywords.items())))
        reward = getattr(reward, "__wrapped__", reward.func)
    return reward, layers


def _sources(function: Callable) -> list[str]:
    file = getattr(inspect.getmodule(function), "__file__", None)
    if file is not None and "." in function.__module__:
        modules = sorted(Path(file).parent.glob("*.py"))
        return [path.read_text(encoding="utf-8") for path in modules]
    texts, waiting, seen = [], [function], {function}
    while waiting:
        one = waiting.pop()
        # of its code: else a decorated function would give what is inside
        texts.append(inspect.getsource(one.__code__))
        for name, value in sorted(_used(one).items()):
            if isinstance(value, str | int | float | re.Pattern):
                texts.append(f"{name} = {value!r}")
            elif (
                inspect.isfunction(value)
                and value.__module__ == function.__module__
                and value not in seen
            ):
                waiting.append(value)
                seen.add(value)
    return texts


def _used(function: Callable) -> dict[str, object]:
    """The values outside a function that it, or a part of it, names."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if inspect.iscode(c)]
    found = {n: v for n, v in function.__globals__.items() if n in names}
    return found | dict(inspect.getclosurevars(function).nonlocals)


def file_fingerprint(path: Path) -> str:
    """Hash of a reward file's text."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
