"""What the lessons on populations and on many workers show."""

import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from fake_grid import graded, written

from grpo_lab import figures, figures_scale, grid, profiles
from grpo_lab.files import read_json, write_json
from grpo_lab.grid import simulation
from grpo_lab.grid.halving import PROMOTED, STOPPED, Rung, note_rung, rung_path

# --- Many workers -----------------------------------------------------------


@pytest.fixture
def halved(tmp_path):
    """One run that is done, one stopped by halving, and a clone of it."""
    base, good = graded("+---"), graded("+++-")
    rows = ["1,1,0,0", "1,1,0,0"]
    first = written(tmp_path, 1e-3, base, good, rows, name="a")
    note_rung(first, Rung(1, 0.75, PROMOTED, None, 1))
    second = written(tmp_path, 1e-4, base, base, rows[:1], name="b")
    (second / "evaluation.json").unlink()
    rung = Rung(1, 0.5, STOPPED, 0.75, 2)
    note_rung(second, rung)
    graded("++--").save(rung_path(second, 1))
    ended = {"status": "stopped", "reason": rung.reason(24)}
    write_json(second / "result.json", ended)
    clone = written(tmp_path, 5e-4, base, good, rows, name="c")
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


def test_a_run_stopped_before_it_was_evaluated_has_no_figures(halved):
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
    frame = figures_scale.halving_table(grid.load(halved)).data
    told = dict(zip(frame["run"], frame["at step 1"], strict=True))
    assert told == {
        "pocket-qwen lr=0.001": "75.0%, the first here: goes on",
        "pocket-qwen lr=0.0001": "50.0%, 75.0% needed (2 here): stopped",
        "pocket-qwen lr=0.0005 (clone from step 1)": "-",
    }
    assert list(frame["made"]) == ["2 steps", "1 steps", "2 steps"]


def test_every_start_has_a_row(tmp_path):
    folder = written(tmp_path, 1e-3, graded("+"), graded("+"))
    assert figures_scale.starts_table(grid.load(tmp_path)).data.empty
    start = {"time": "2026-01-02T03:04:05+0000", "host": "<b>h", "threads": 2}
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
    assert "<b>h" not in styled.to_html()


def test_the_timeline_has_a_line_for_each_run_that_was_told():
    class Live:
        seen = {"a": [], "b": [(10.0, 1), (10.5, 2)]}

    figure = figures_scale.timeline(Live(), rungs=[1])
    [line, rung] = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[10.0, 1], [10.5, 2]]
    assert list(rung.get_ydata()) == [1, 1]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["b"]
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
    row, search = profiles.SCALE_OUT[name], profiles.PROFILES[name]
    assert (row.grid, row.data) == (search.grid, search.data)
    settings = row.settings()
    assert len(settings) == 4
    [steps] = {one.steps(row.train_rows) for one in settings}
    rungs = grid.Halving(steps // 4).rungs(settings[0].max_steps)
    assert len(rungs) == 2


# --- A population -----------------------------------------------------------


def lineage_of(*rows) -> pd.DataFrame:
    """Rows of generation, step, rank, member, parent, born, accuracy."""
    names = ["generation", "step", "rank", "member", "parent", "born"]
    frame = pd.DataFrame(rows, columns=[*names, "accuracy"])
    frame["parent"] = frame["parent"].astype("Int64")
    frame["change"] = ["lr x1.2" if b else "" for b in frame["born"]]
    frame["learning_rate"], frame["beta"] = 1e-3, 1e-3
    frame["low"], frame["high"] = frame["accuracy"] - 0.1, frame["accuracy"]
    frame["mean_reward"] = 1.0
    frame["completions"] = 96 * frame["step"]
    return frame


FAMILY = lineage_of(
    (0, 5, 1, 0, None, 0, 0.4),
    (0, 5, 2, 1, None, 0, 0.3),
    (1, 10, 1, 2, 0, 1, 0.8),
    (1, 10, 2, 0, None, 0, 0.6),
)


def test_the_lineage_says_where_each_member_came_from():
    text = figures_scale.lineage_table(FAMILY).to_html()
    assert text.count("the base model") == 2
    assert "copy of 0, lr x1.2" in text and "itself" in text
    assert "80% [70, 80]" in text


def test_a_copy_is_joined_to_its_parent():
    figure = figures_scale.lineage_figure(FAMILY, base=0.25)
    [axis] = figure.axes
    dashed = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert len(dashed) == 1
    (start, _), (before, after) = dashed[0].get_xdata(), dashed[0].get_ydata()
    assert (start, before, after) == (5, 0.4, 0.8)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "base model" and len(labels) == 4


def test_a_budget_begins_at_the_base_and_shows_the_best():
    figure = figures_scale.budget_figure({"a": FAMILY, "b": FAMILY}, base=0.25)
    first = figure.axes[0].lines[0]
    assert first.get_xydata().tolist() == [[0, 0.25], [480, 0.4], [960, 0.8]]


def test_every_member_has_its_curve():
    metrics = pd.DataFrame(
        [[1, 0, 0.1], [1, 1, 0.2], [2, 0, 0.3], [2, 2, 0.4]],
        columns=["step", "member", "reward"],
    ).assign(frac_reward_zero_std=0.0, clipped_ratio=0.0)
    figure = figures_scale.population_curves(metrics)
    assert [len(axis.lines) for axis in figure.axes] == [3, 3, 3]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3


def test_the_status_of_an_experiment_fits_a_line():
    now = {"status": "running", "reason": "", "doing": "", "step": 3}
    text = figures_scale.status_table(now | {"steps": 0}).to_html()
    assert "running" in text and "3 of ?" in text
    now |= {"steps": 8, "doing": "training member 1", "reward": 0.5}
    assert "3 of 8" in figures_scale.status_table(now).to_html()
