"""What the lesson on many workers shows: stopped runs, clones, starts."""

import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from fake_grid import graded, written

from grpo_lab import figures, figures_scale, grid, profiles
from grpo_lab.files import read_json, write_json
from grpo_lab.grid import simulation
from grpo_lab.grid.halving import PROMOTED, STOPPED, Rung, note_rung, rung_path
from grpo_lab.profiles import RunSettings
from rewards import FIVE_PART

PARTS = [part.__name__ for part in FIVE_PART]


def stop(folder, step, rungs, answers) -> None:
    """Turn a finished run into one that halving has stopped."""
    (folder / "evaluation.json").unlink()
    for rung in rungs:
        note_rung(folder, rung)
    answers.save(rung_path(folder, step))
    reason = rungs[-1].reason(24)
    write_json(folder / "result.json", {"status": "stopped", "reason": reason})


@pytest.fixture
def halved(tmp_path):
    """One run that is done, one stopped by halving, and a clone of it."""
    base, good = graded("+---"), graded("+++-")
    rows = ["1,1,0,0", "1,1,0,0"]
    first = written(tmp_path, 1e-3, base, good, rows, name="a")
    note_rung(first, Rung(1, 0.75, PROMOTED, None, 1))
    second = written(tmp_path, 1e-4, base, base, rows[:1], name="b")
    stop(second, 1, [Rung(1, 0.5, STOPPED, 0.75, 2)], graded("++--"))
    clone = written(tmp_path, 5e-4, base, graded("+++-"), rows, name="c")
    record = read_json(clone / "settings.json")
    record["clone"] = {"parent": "b", "step": 1, "rewards": []}
    write_json(clone / "settings.json", record)
    return tmp_path


def test_the_leaderboard_says_who_was_stopped_and_who_is_a_clone(halved):
    text = figures.leaderboard_text(grid.load(halved).leaderboard())
    by_run = text.set_index("run")
    assert by_run["ended"].to_dict() == {
        "pocket-qwen lr=0.001": "done, 2 steps",
        "pocket-qwen lr=0.0005 (clone from step 1)": "done, 2 steps",
        "pocket-qwen lr=0.0001": "by halving after step 1 of 24",
    }
    assert list(by_run["clone of"]) == ["-", "pocket-qwen lr=0.0001", "-"]
    assert list(by_run["after"].str[:5]) == ["75.0%", "75.0%", "50.0%"]


def test_a_grid_of_finished_runs_is_told_as_ever(tmp_path):
    written(tmp_path, 1e-3, graded("+-"), graded("++"))
    text = figures.leaderboard_text(grid.load(tmp_path).leaderboard())
    assert not {"ended", "clone of"} & set(text)


def test_a_run_stopped_before_it_was_asked_has_no_figures(halved):
    for file in (halved / "runs/b/rungs").iterdir():
        file.unlink()
    (halved / "runs/b/rungs.json").unlink()
    write_json(
        halved / "runs/b/result.json",
        {"status": "stopped", "reason": "stopped by hand after step 1 of 2"},
    )
    board = grid.load(halved).leaderboard()
    row = figures.leaderboard_text(board).iloc[-1]
    assert row["ended"] == "by hand after step 1 of 2"
    assert {row[name] for name in ("before", "after", "p", "clipped")} == {"-"}
    assert len(figures.leaderboard_figure(board).axes[0].get_yticks()) == 3


def test_each_rung_of_each_run(halved):
    frame = figures_scale.halving_table(grid.load(halved)).data.set_index(
        "run"
    )
    assert list(frame) == ["at step 1", "made"]
    assert frame["at step 1"].to_dict() == {
        "pocket-qwen lr=0.001": "75.0%, the first here: goes on",
        "pocket-qwen lr=0.0001": "50.0%, 75.0% needed (2 here): stopped",
        "pocket-qwen lr=0.0005 (clone from step 1)": "-",
    }
    assert list(frame["made"]) == ["2 steps", "1 steps", "2 steps"]


def test_every_start_has_a_row(tmp_path):
    folder = written(tmp_path, 1e-3, graded("+"), graded("+"))
    start = {
        "time": "2026-01-02T03:04:05+0000",
        "host": "<b>host</b>",
        "threads": 2,
    }
    starts = [
        {**start, "process": 7, "step": 0},
        {**start, "process": 81234, "step": 3},
    ]
    write_json(folder / "environment.json", starts)
    styled = figures_scale.starts_table(grid.load(tmp_path))
    assert list(styled.data["start"]) == ["1 of 2", "2 of 2"]
    assert list(styled.data["process"]) == ["7", "81234"]
    assert list(styled.data["from step"]) == [0, 3]
    assert set(styled.data["at"]) == {"03:04:05"}
    assert "<b>host" not in styled.to_html()


def test_a_grid_that_never_started_has_no_starts(tmp_path):
    written(tmp_path, 1e-3, graded("+"), graded("+"))
    assert figures_scale.starts_table(grid.load(tmp_path)).data.empty


class Handle:
    """What a notebook gives for an output that can be replaced."""

    def __init__(self):
        self.pages = []

    def update(self, page):
        self.pages.append(page.data)


@pytest.fixture
def live(monkeypatch):
    handle = Handle()
    monkeypatch.setattr(figures, "display", lambda *args, **kwargs: handle)
    settings = [RunSettings("m", 1e-3), RunSettings("m", 1e-4)]
    return figures.LiveTable(settings, FIVE_PART), settings, handle.pages


def row(step, **changes) -> dict:
    names = ["reward", "frac_reward_zero_std", "clipped_ratio", *PARTS]
    values = {**dict.fromkeys(names, 0.25), "step": step, "seconds": 1.0}
    return {**values, **changes}


def test_a_clone_gets_a_row_of_the_live_table(live):
    """It is made in a terminal, while the notebook looks on."""
    table, settings, pages = live
    table.update(settings[0], 2, 2, row(2))
    clone = row(2)
    del clone[PARTS[1]]  # it may be paid by some of the rewards only
    table.update(RunSettings("m", 5e-4), 2, 2, clone)
    assert "m lr=0.0005 (clone)" in pages[-1]
    assert pages[-1].count("2/2") == 2
    assert ">-<" in pages[-1] and "nan" not in pages[-1]
    assert list(table.seen) == ["m lr=0.001", "m lr=0.0001",
                                "m lr=0.0005 (clone)"]  # fmt: skip


def test_at_the_end_the_live_table_says_who_was_stopped(live, tmp_path):
    """Its last step too, however soon it came after the one before."""
    table, settings, pages = live
    for step in (1, 2, 3):
        table.update(settings[0], step, 24, row(step))
    ran = grid.Run("m", settings[0], tmp_path, "stopped", "by halving")
    other = grid.Run("o", RunSettings("o", 1e-3), tmp_path, "failed")
    table.end(grid.Grid(tmp_path, (ran, other)))
    assert "3/24" in pages[-1] and ">stopped<" in pages[-1]
    assert "failed" not in pages[-1] and pages[-1].count("waits") == 1


def test_the_timeline_has_a_line_for_each_run_that_was_told(live):
    table, settings, _ = live
    table.made -= 10
    for step in (1, 2):
        table.update(settings[1], step, 2, row(step))
    figure = figures_scale.timeline(table, rungs=[1])
    [line, rung] = figure.axes[0].lines
    assert list(line.get_ydata()) == [1, 2]
    assert all(10 <= second < 11 for second in line.get_xdata())
    assert list(rung.get_ydata()) == [1, 1]
    [legend] = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["m lr=0.0001"]
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    ("seconds", "hours"), [(1, r"0\.\d\d"), (36000, r"\d+\.\d")]
)
def test_plans_in_hours(seconds, hours):
    plans = pd.DataFrame(
        simulation.simulate(
            4, 2, steps=10, step_seconds=seconds, halving=halving,
            price_per_worker_hour=2,
        )
        for halving in (None, grid.Halving(2))
    )  # fmt: skip
    page = figures_scale.plan_table(plans).to_html()
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert len(cells) == 2 * 8
    assert re.fullmatch(hours, cells[3].replace(",", ""))
    assert cells[6] == "100%"
    assert "Simulated" in page
    # without a price there is no cost to show
    free = figures_scale.plan_table(plans.assign(**{"cost in USD": 0.0}))
    assert "cost in USD" in page and "cost in USD" not in free.to_html()


@pytest.mark.parametrize("name", profiles.SCALE_OUT)
def test_rows_of_the_lesson_on_many_workers(name):
    row = profiles.SCALE_OUT[name]
    search = profiles.PROFILES[name]
    assert (row.grid, row.data) == (search.grid, search.data)
    settings = row.settings()
    assert len(settings) == 4
    steps = {one.steps(row.train_rows) for one in settings}
    assert len(steps) == 1
    rungs = grid.Halving(steps.pop() // 4).rungs(settings[0].max_steps)
    assert len(rungs) == 2
