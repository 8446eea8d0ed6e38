"""What a public name of `rewards` must say: what, an example, its source."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import rewards
from rewards import published

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(rewards.__path__, "rewards.")
    if not found.name.endswith("__main__")
]
# What only a worker process calls, and what is no function to call alone.
WITHOUT_EXAMPLE = {
    "Unreadable", "RewardError", "Example", "Probe", "Score", "FileReward",
    "Trial", "Verdict", "inspector_of", "handler_of", "handler", "main",
    "lines", "write_all",
}  # fmt: skip


def public(module):
    """The functions, and the classes that do something, of a module."""
    for name, value in vars(module).items():
        if name.startswith("_") or name in WITHOUT_EXAMPLE:
            continue
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or "__init__" in vars(value):
            yield name, value


@pytest.mark.parametrize(
    "module", [rewards, *MODULES], ids=lambda m: m.__name__
)
def test_every_public_function_shows_an_example_that_runs(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    for name, value in public(module):
        if not hasattr(value, "__dataclass_fields__"):  # plain data
            assert ">>> " in (value.__doc__ or ""), name


@pytest.mark.parametrize("name", rewards.__all__)
def test_every_exported_function_names_its_source(name):
    value = getattr(rewards, name)
    if not inspect.isfunction(value):
        pytest.skip("a constant or a class")
    assert "Source:" in value.__doc__
    assert value.__doc__.split("\n")[0].endswith(".")


def test_the_published_ones_are_described_with_their_faults():
    for reward in (
        *published.FIVE_PART_AS_PUBLISHED,
        *published.COOKBOOK_AS_PUBLISHED,
        published.published_arena_reward,
    ):
        assert reward.__name__ in published.__doc__
        assert not hasattr(rewards, reward.__name__)
        assert "Source:" in reward.__doc__
