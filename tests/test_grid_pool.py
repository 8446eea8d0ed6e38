"""How many processes a grid gets on a machine, and what can be sent there."""

import threading

import pytest
from conftest import quick_settings
from killed_grid import variety

from grpo_lab import environment, grid, memory
from grpo_lab.errors import LabError
from grpo_lab.grid import execute


@pytest.fixture
def machine(monkeypatch):
    """Pretend a machine: `machine(cores, GiB, is_gpu)`."""

    def pretend(cores: int, gib: float, is_gpu: bool = False) -> None:
        device = memory.Device("here", gib, is_gpu)
        monkeypatch.setattr(memory, "device_memory", lambda: device)
        monkeypatch.setattr(environment, "usable_cores", lambda: cores)

    return pretend


def test_a_cpu_trains_as_many_runs_as_it_has_cores_and_memory_for(
    machine, tiny_qwen
):
    runs = [quick_settings(tiny_qwen, seed=n) for n in range(4)]
    machine(2, 64)
    need = memory.resolve(runs[0], execute.PROMPT_TOKENS).memory
    assert execute.fitting_workers(runs) == 2
    machine(8, 64)
    assert execute.fitting_workers(runs) == 4
    assert execute.fitting_workers(runs[:1]) == 1
    machine(8, 3.5 * need / (1 - execute.SPARE_SHARE))
    assert execute.fitting_workers(runs) == 3
    machine(8, need / 2)
    assert execute.fitting_workers(runs) == 1
    machine(8, 80, is_gpu=True)
    assert execute.fitting_workers(runs) == 1


def test_a_container_has_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "CONTROL_GROUP", tmp_path)
    cores, bytes_ = environment.usable_cores(), environment.usable_memory()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{bytes_ // 2}\n")
    assert environment.usable_cores() == 1
    assert environment.usable_memory() == bytes_ // 2
    for name in ("cpu.max", "memory.max"):
        (tmp_path / name).write_text("max 100000\n")
    assert environment.usable_cores() == cores
    assert environment.usable_memory() == bytes_


def test_a_reward_that_belongs_to_this_process_is_refused(
    tiny_qwen, tiny_splits, tmp_path
):
    lock = threading.Lock()

    def locked(completions, **kwargs):
        with lock:
            return variety(completions)

    runs = [quick_settings(tiny_qwen, seed=n) for n in range(2)]
    task = grid.Task(tiny_splits, [locked])
    with pytest.raises(LabError, match="inside the function.*workers=1"):
        grid.run(runs, task, tmp_path, workers=2)


def test_runs_side_by_side_are_those_of_one_process(
    machine, tiny_qwen, tiny_splits, tmp_path
):
    """By default: two cores, two runs, with a reward of this function."""
    runs = [quick_settings(tiny_qwen, seed=n) for n in range(2)]
    task = grid.Task(
        tiny_splits, [lambda completions, **k: variety(completions)]
    )
    task.rewards[0].__name__ = "mine"
    machine(2, 64)
    both = grid.run(runs, task, tmp_path / "both")
    both.raise_failures()
    alone = grid.run(runs, task, tmp_path / "alone", workers=1)
    for one, other in zip(both.runs, alone.runs, strict=True):
        assert (one.directory / "worker.log").exists()
        same = [
            r.metrics.drop(columns=["seconds", "memory_gib"])
            for r in (one, other)
        ]
        assert same[0].equals(same[1])
        assert one.evaluation.answers == other.evaluation.answers
