"""Tiny models and data, so that a whole run takes seconds."""

import os

# Before the training libraries are imported, and for every child process.
os.environ["HF_HUB_OFFLINE"] = "1"
# The tests are about CPUs, also where there is a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"

import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import types  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from grpo_lab.settings import RunSettings  # noqa: E402

# A shell that starts the suite in the background has it ignore Ctrl-C, and
# every child process would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS = {
    "tiny_qwen": "torch",
    "tiny_llama": "torch",
    "machines": "ray",
    # tests that start something themselves, by the name of their file
    "test_arena_client": "process",
    "test_arena_population": "torch",
    "test_arena_ray": "ray",
    "test_arena_serving": "server",
    "test_check_reward": "process",
    "test_grid": "torch",
    "test_grid_control": "torch",
    "test_grid_faults": "ray",
    "test_grid_halving": "torch",
    "test_grid_pool": "process",
    "test_grid_ray": "ray",
    "test_grid_storage": "process",
    "test_grid_workers": "process",
    "test_lessons": "lesson",
    "test_models": "torch",
    "test_offline": "process",
    "test_real_model": "torch",
    "test_reward_file": "process",
    "test_runner": "lesson",
    "test_speed_gradients": "torch",
    "test_speed_memory": "torch",
    "test_speed_rollouts": "torch",
    "test_sweep": "lesson",
    "test_symbolic": "process",
    "test_training": "torch",
    "test_workers": "process",
}
"""The mark of a test, by a fixture that it uses or by its file."""

LONGEST = (
    "test_lessons", "test_grid_faults", "test_arena_client",
    "test_arena_population", "test_arena_ray", "test_grid_ray",
    "test_grid_storage", "test_grid_halving", "test_grid_workers",
    "test_grid_control", "test_speed_gradients", "test_runner", "test_grid",
    "test_models", "test_training", "test_sweep", "test_workers",
)  # fmt: skip
"""Files of tests that take minutes, the longest first."""


def pytest_collection_modifyitems(items):
    """Mark tests by what they start; those that start nothing are quick.

    Where two processes share the tests, each file stays in one of them, for
    its fixtures, and they end together if the longest files come first.
    """
    for item in items:
        for name in STARTS.keys() & {*item.fixturenames, item.path.stem}:
            item.add_marker(STARTS[name])
        kinds = {mark.name for mark in item.iter_markers()}
        if not kinds & {"torch", "process", "ray", "server", "lesson"}:
            item.add_marker("check")
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


TINY = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 128,
    "seed": 5,
}
"""Shape of the models that the tests train; a step takes about 0.1 s."""


@pytest.fixture(scope="session", autouse=True)
def threads():
    """CPU threads of torch: one, unless `make test-cpus` asks for more.

    With more, two threads that add up parts of a sum still do so in one
    order, so that runs of one process family stay equal bit for bit.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("GRPO_LAB_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def grids_train_here(monkeypatch):
    """A grid trains in this process, unless a test asks for workers."""
    from grpo_lab import environment

    monkeypatch.setattr(environment, "usable_cores", lambda: 1)


@pytest.fixture(autouse=True)
def no_handler_left():
    """No code leaves a signal handler behind, which every fork inherits.

    With one of Python for SIGTERM, a pool of processes that are ended just
    as they start to wait does not end: about one time in 400.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def make_tiny_model(folder: Path, family: str) -> Path:
    """A freshly initialised model with its tokenizer, as a local folder."""
    from tools.pocket_train import Recipe, build_model, build_tokenizer

    recipe = Recipe(name=folder.name, family=family, **TINY)
    tokenizer = build_tokenizer(recipe)
    build_model(recipe, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory) -> Path:
    """Folder of an untrained Qwen2 model."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-qwen", "qwen2"
    )


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Folder of an untrained Llama model."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-llama", "llama"
    )


@pytest.fixture(scope="session")
def tiny_splits():
    """Ten questions to train on and six to hold out."""
    from grpo_lab.data import load_splits

    return load_splits("pocket", train_rows=10, eval_rows=6, seed=1)


@pytest.fixture(scope="session")
def task(tiny_splits):
    """Those questions, with a reward that has a spread."""
    from killed_grid import variety

    from grpo_lab import grid

    return grid.Task(tiny_splits, [variety])


@pytest.fixture(scope="session")
def questions():
    """Word problems for the pocket models: 24 to train on, 40 held out."""
    from grpo_lab.data import load_splits

    return load_splits("pocket", train_rows=24, eval_rows=40, seed=5)


@pytest.fixture(scope="session")
def machines():
    """Two machines of one core each, as Ray sees it."""
    from grpo_lab.grid.cluster import PretendedCluster

    with PretendedCluster() as two:
        yield two


@pytest.fixture(scope="session")
def both(tiny_qwen, tiny_llama) -> list[str]:
    """The models of a small grid."""
    return [str(tiny_qwen), str(tiny_llama)]


@pytest.fixture(scope="session")
def here(both, tmp_path_factory):
    """The grid of `ray_grid`, in this process on one thread."""
    from killed_grid import variety
    from ray_grid import plan, questions

    from grpo_lab import grid

    place = tmp_path_factory.mktemp("here")
    return grid.run(plan(both), grid.Task(questions(), [variety]), place)


class SmallDisk:
    """A real file system of its own, of 200 kB unless it is resized."""

    def __init__(self, place: Path) -> None:
        """Mount it, or skip the test where that is not allowed."""
        self.place = place
        place.mkdir()
        self._mount("size=200k")

    def resize(self, size: str) -> None:
        """Make it larger, with everything that it holds."""
        self._mount(f"remount,size={size}")

    def _mount(self, options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.place)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr}")


@pytest.fixture
def small_disk(tmp_path):
    """For what happens when it is full."""
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    # Lazily: a worker may still have a file open there.
    subprocess.run(["umount", "-l", str(disk.place)], check=True)


@pytest.fixture
def plain_main(monkeypatch):
    """A `__main__` that multiprocessing can start from.

    What runs a notebook's code in this process may leave one behind that has
    no `__spec__`.
    """
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


@pytest.fixture
def quick(tiny_qwen) -> RunSettings:
    """Three steps, two questions each, two short completions per question."""
    return quick_settings(tiny_qwen)


def quick_settings(model: Path | str, **overrides) -> RunSettings:
    """A run of a few seconds."""
    values = {
        "model": str(model),
        "learning_rate": 1e-3,
        "num_generations": 2,
        "completions_per_step": 4,
        "micro_batch": 4,
        "max_steps": 3,
        "max_completion_length": 8,
        "lora_r": 4,
        "lora_alpha": 8,
        "max_grad_norm": 1.0,
    }
    return RunSettings(**{**values, **overrides})


def refusal(function, *arguments, **options) -> str:
    """The message of the error that a call ends in; one paragraph."""
    from grpo_lab.errors import LabError

    with pytest.raises(LabError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def pretend_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    """Let PyTorch say that there is a GPU of that compute capability."""
    from torch import cuda

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_capability", lambda *_: capability)
    # A T4 says True here, because bf16 is emulated.
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda *_, **__: True)


def four_bit_layers(model) -> list:
    """The quantised layers of a model."""
    from bitsandbytes.nn import Linear4bit

    return [m for m in model.modules() if isinstance(m, Linear4bit)]


def resolved(settings: RunSettings, tokenizer, rows):
    """What is decided for a run on these rows, on this machine."""
    from grpo_lab import memory, prompts

    longest = prompts.longest_prompt(tokenizer, rows["prompt"])
    return memory.resolve(settings, longest)


def count_loads(monkeypatch) -> list[tuple]:
    """What each base model is loaded with, from now on."""
    from grpo_lab import models

    return count_calls(monkeypatch, models, "load_policy")


def count_calls(monkeypatch, owner: object, name: str) -> list[tuple]:
    """The positional arguments of each call of a function, from now on."""
    calls, real = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls
