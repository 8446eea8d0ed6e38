"""Plots and tables: nothing is missing, nothing is hidden from the reader."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fake_grid import graded, written

from grpo_lab import figures, figures_scale, grid
from grpo_lab.evaluation import Answer, Evaluation
from grpo_lab.profiles import RunSettings
from grpo_lab.training import METRICS
from rewards import FIVE_PART, MAX_REWARD

PARTS = [part.__name__ for part in FIVE_PART]


def metrics(steps: int, start: float) -> pd.DataFrame:
    columns = ["step", *METRICS, *PARTS]
    columns += ["failed_share", "seconds", "memory_gib"]
    frame = pd.DataFrame(index=range(steps), columns=columns, dtype=float)
    for at, column in enumerate(columns):
        frame[column] = start + at + np.arange(steps) / 10
    frame["step"] = np.arange(1, steps + 1)
    frame["kl"] = None
    return frame


@pytest.fixture
def some_grid(tmp_path):
    """Two models at two rates; one of the runs stopped after three steps."""
    base = graded("+---------")
    for at, (model, rate) in enumerate(
        (model, rate)
        for model in ("pocket-qwen", "owner/other")
        for rate in (1e-3, 1e-4)
    ):
        after = graded("+" * (3 + 2 * at) + "-" * (7 - 2 * at))
        folder = written(
            tmp_path, rate, base, after, model=model, name=f"run_{at}"
        )
        frame = metrics(3 if at == 3 else 12, start=at)
        frame.to_csv(folder / "metrics.csv", index=False)
    return grid.load(tmp_path)


def check_curves(figure, some_grid, titles) -> None:
    shown = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in shown] == titles
    for axis in shown:
        assert len(axis.lines) == 2 * len(some_grid.runs)  # raw and smooth
        for line in axis.lines:
            assert np.isfinite(line.get_ydata().astype(float)).all()
            assert len(line.get_xdata()) in (3, 12)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [run.name for run in some_grid.runs]
    # Every run looks different from every other one.
    smooth = [line for line in shown[0].lines if line.get_alpha() is None]
    looks = {(line.get_color(), line.get_linestyle()) for line in smooth}
    assert len(looks) == len(some_grid.runs)
    assert not plt.get_fignums()  # closed, so that it is shown once


def test_reward_curves(some_grid):
    figure = figures.reward_curves(some_grid, FIVE_PART)
    check_curves(
        figure,
        some_grid,
        [
            "Reward (sum of the parts)", "Correctness", "Integer",
            "Strict format", "Soft format", "Tag count",
        ],
    )  # fmt: skip
    first = figure.axes[0].lines[1]
    raw = some_grid.runs[0].metrics["reward"]
    assert first.get_ydata()[0] == raw[0]
    assert first.get_ydata()[-1] == pytest.approx(raw[-5:].mean())


def test_health_curves(some_grid):
    check_curves(
        figures.health_curves(some_grid),
        some_grid,
        list(figures.HEALTH.values()),
    )


def test_a_reward_that_never_applied_is_drawn_as_nothing(tmp_path):
    base = graded("+-")
    folder = written(tmp_path, 1e-3, base, base)
    frame = metrics(4, start=0)
    frame[PARTS[1]] = None
    frame.to_csv(folder / "metrics.csv", index=False)
    figure = figures.reward_curves(grid.load(tmp_path), FIVE_PART)
    assert len(figure.axes[2].lines) == 2


def test_a_run_without_a_step_is_left_out(some_grid, tmp_path):
    (some_grid.runs[0].directory / "metrics.csv").unlink()
    figure = figures.health_curves(grid.load(tmp_path))
    assert len(figure.axes[0].lines) == 2 * 3


def test_the_leaderboard_in_words(some_grid):
    text = figures.leaderboard_text(some_grid.leaderboard())
    assert list(text["run"]) == [
        "other lr=0.0001", "other lr=0.001",
        "pocket-qwen lr=0.0001", "pocket-qwen lr=0.001",
    ]  # fmt: skip
    best = text.iloc[0]
    assert best["before"] == "10.0% [2, 40]"
    assert best["after"] == "90.0% [60, 98]"
    # 8 gained, none lost: (9 - 1) / 12 and its half width.
    half = 1.96 * ((10 / 12 - (8 / 12) ** 2) / 12) ** 0.5
    low, high = 100 * (8 / 12 - half), 100 * (8 / 12 + half)
    assert best["gain in points"] == f"+80.0 [{low:+.0f}, {high:+.0f}]"
    assert best["p"] == "0.008"  # 2 / 2**8
    assert not text.map(lambda cell: "nan" in cell).any().any()
    page = figures.leaderboard_table(some_grid.leaderboard()).to_html()
    assert page.count("<tr>") == 5


def test_the_leaderboard_as_a_picture(some_grid):
    board = some_grid.leaderboard()
    axis = figures.leaderboard_figure(board).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == list(board["run"])
    assert len(axis.containers) == 2 * len(board)
    centres = [bar[0].get_xdata()[0] for bar in axis.containers]
    assert centres == [
        x for b in board.itertuples() for x in (b.before, b.after)
    ]
    assert not plt.get_fignums()


@pytest.mark.parametrize("count", [1, 3, 20, 97, 400])
def test_all_or_nothing_can_be_drawn(tmp_path, count):
    """At 0 and 1 an interval ends where the point is."""
    written(tmp_path, 1e-3, graded("-" * count), graded("+" * count))
    written(tmp_path, 1e-4, graded("-" * count), graded("-" * count))
    figure = figures.leaderboard_figure(grid.load(tmp_path).leaderboard())
    assert len(figure.axes[0].containers) == 4


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)


def test_tags_are_shown_and_not_taken_for_html():
    """A browser would swallow <answer>, and run what a policy writes."""
    told = {"good": "<answer>72</answer>", "bad": "<script>x</script>"}
    page = figures.reward_table(told, "#### 72", FIVE_PART).to_html()
    assert "&lt;answer&gt;72&lt;/answer&gt;" in page
    assert "<answer>" not in page and "<script>" not in page


def test_the_reward_table_adds_up():
    perfect = "<reasoning>\n9 * 8 = 72\n</reasoning>\n<answer>\n72\n</answer>"
    page = figures.reward_table(
        {"perfect": perfect, "empty": ""}, "#### 72", FIVE_PART
    ).to_html()
    found = cells(page)
    assert found[0] == "perfect"
    assert [float(value) for value in found[2:8]] == [
        2.0, 0.5, 0.5, 0.5, 0.5, MAX_REWARD,
    ]  # fmt: skip
    assert [float(value) for value in found[10:16]] == [0.0] * 6


def some_totals(completions=None, gold="#### 72"):
    completions = completions or {
        "perfect": "<reasoning>\n9 * 8\n</reasoning>\n<answer>\n72\n</answer>",
        "bare": "72",
        "long": "<answer>72</answer>" + "<b>" * 200,
    }
    sets = {"ours": FIVE_PART, "one part": FIVE_PART[:1]}
    return figures.reward_totals(completions, gold, sets)


def test_reward_totals_are_sums():
    totals = some_totals()
    assert list(totals) == ["completion", "text", "ours", "one part"]
    assert list(totals["ours"]) == [MAX_REWARD, 0.0, 2.5]
    assert list(totals["one part"]) == [2.0, 0.0, 2.0]


def test_a_part_that_could_not_score_counts_as_nothing():
    """A gold that can't be read: correctness gives None, the rest a number."""
    totals = some_totals(gold="no number here")
    assert list(totals["ours"]) == [2.0, 0.0, 0.5]
    assert list(totals["one part"]) == [0.0, 0.0, 0.0]


def test_the_table_of_totals_shortens_long_texts_only():
    page = figures.reward_totals_table(some_totals()).to_html()
    found = cells(page)
    assert [float(value) for value in found[2:4]] == [4.0, 2.0]
    assert found[5] == "72"
    left_out = len("<answer>72</answer>") + 600 - 2 * figures.SHOWN_SIDE
    assert f"[{left_out} more characters]" in found[9]
    assert page.count("more characters") == 1
    assert "&lt;answer&gt;72" in page and "<answer>" not in page


def test_the_figure_of_totals_shows_every_set_for_every_completion():
    totals = some_totals()
    figure = figures.reward_totals_figure(totals)
    (axis,) = figure.axes
    names = [tick.get_text() for tick in axis.get_yticklabels()]
    assert names == list(totals["completion"])
    heights = list(axis.get_yticks())
    assert heights == sorted(heights, reverse=True)  # the first one on top
    marks, lines = axis.lines[0::2], axis.lines[1::2]
    for name, mark, line in zip(
        ["ours", "one part"], marks, lines, strict=True
    ):
        assert mark.get_label() == name
        assert list(mark.get_xdata()) == list(totals[name])
        assert np.abs(mark.get_ydata() - np.array(heights)).max() < 0.5
        assert set(line.get_xdata()) == {totals[name][0]}
        assert line.get_color() == mark.get_color()
    looks = {(mark.get_color(), mark.get_marker()) for mark in marks}
    assert len(looks) == 2
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["ours", "one part"]
    assert not plt.get_fignums()  # closed, so that it is shown once


def evaluation(texts: list[tuple[str, bool]]) -> Evaluation:
    return Evaluation(
        tuple(
            Answer(f"question {at}", "1 + 1 = 2\n#### 2", text, right, True,
                   5, False)
            for at, (text, right) in enumerate(texts)
        ),
        1.0,
    )  # fmt: skip


def test_answers_before_and_after():
    before = evaluation(
        [("<a>", True), ("b", True), ("c", False), ("d", True)]
    )
    after = evaluation([("A", True), ("B", True), ("C", True), ("D", False)])
    found = cells(figures.answers_table(before, after).to_html())
    assert found[0::4] == ["question 2", "question 3", "question 0"]
    assert found[1::4] == ["2", "2", "2"]
    assert [" ".join(cell.split()) for cell in found[2:4]] == [
        "c [WRONG]", "C [RIGHT]",
    ]  # fmt: skip
    assert found[10].startswith("&lt;a&gt;")
    one = figures.answers_table(before, before, count=1).to_html()
    assert cells(one)[0] == "question 0"


def test_names_and_estimates():
    assert figures.short_name("strict_format_reward") == "strict format"
    assert figures.short_name(FIVE_PART[0]) == "correctness"
    settings = [RunSettings("pocket-qwen", 1e-3)]
    page = figures.grid_table(
        grid.estimates(settings, 100, 80, grid.Pace(1.0, 4))
    ).to_html()
    assert "pocket-qwen lr=0.001" in page


# --- The live table ---------------------------------------------------------


@pytest.fixture
def live(monkeypatch):
    """A live table, and the pages that it has shown."""
    pages = []

    class Handle:
        def update(self, page):
            pages.append(page.data)

    def display(page, display_id):
        pages.append(page.data)
        return Handle()

    monkeypatch.setattr(figures, "display", display)
    settings = [
        RunSettings("<b>model</b>", 1e-3),
        RunSettings("<b>model</b>", 1e-4),
    ]
    return figures.LiveTable(settings, FIVE_PART), settings, pages


def row(step: int, reward: float, **changes) -> dict:
    values = dict.fromkeys([*METRICS, *PARTS], 0.25)
    return {**values, "step": step, "reward": reward, "kl": None,
            "seconds": 2.0, "memory_gib": 1.0, **changes}  # fmt: skip


def test_the_live_table_fills_in(live):
    table, settings, pages = live
    assert pages[0].count("waits") == 2
    assert "<b>model</b>" not in pages[0]
    assert "b&gt; lr=0.0001" in pages[0]
    for step in range(1, 8):
        table.update(settings[0], step, 10, row(step, reward=step))
    table.drawn = 0
    table.update(settings[0], 8, 10, row(8, reward=8))
    assert "8/10" in pages[-1]
    assert "<b>6.00</b>" in pages[-1]  # the mean of steps 4 to 8
    assert ">4 s<" in pages[-1]  # two steps of two seconds are left
    assert "25%" in pages[-1]
    assert pages[-1].count("waits") == 1
    heads = pages[-1].count("<th")
    assert pages[-1].count("<td") == heads + 2  # one run waits


def test_the_live_table_is_drawn_at_the_end_and_not_too_often(live):
    table, settings, pages = live
    for step in range(1, 101):
        table.update(settings[0], step, 100, row(step, reward=1))
    assert len(pages) < 10
    assert "100/100" in pages[-1]
    assert "nan" not in pages[-1]


def test_the_live_table_bears_a_reward_that_did_not_apply(live):
    table, settings, pages = live
    table.update(settings[1], 1, 1, row(1, reward=1, **{PARTS[2]: None}))
    assert "1/1" in pages[-1]


def test_what_was_lost_can_come_first():
    before, after = graded("-+++"), graded("+-++")
    [first, *_] = figures.answers_table(before, after).data["question"]
    assert first == "question 0"
    lost = figures.answers_table(before, after, lost_first=True).data
    assert list(lost["question"])[:2] == ["question 1", "question 0"]


# --- One run ----------------------------------------------------------------


def one_run(folder, steps=12, start=1.0) -> grid.Run:
    folder.mkdir()
    metrics(steps, start).to_csv(folder / "metrics.csv", index=False)
    settings = RunSettings("pocket-qwen", 1e-3)
    return grid.Run(folder.name, settings, folder, "unfinished")


def test_curves_of_one_run(tmp_path):
    figure = figures.run_curves(one_run(tmp_path / "run"), FIVE_PART[:2])
    titles = [axis.get_title() for axis in figure.axes if axis.axison]
    assert titles == [
        "Reward (sum of the parts)", "Correctness", "Integer",
        *figures.HEALTH.values(),
    ]  # fmt: skip
    assert all(len(axis.lines) == 2 for axis in figure.axes if axis.axison)


def test_before_and_after_in_words():
    before = graded("+---------", format_ok="----------")
    after = graded("+++-------", format_ok="++++++++++")
    frame = figures.comparison_table(before, after).data
    form, right, cut, tokens, seconds = frame.to_dict("records")
    assert form["before"].startswith("0.0% [0, 28]")
    assert form["after"].startswith("100.0% [72, 100]")
    assert form["difference in points"].startswith("+100.0 [+")
    assert right["before"].startswith("10.0%")
    assert right["after"].startswith("30.0%")
    assert right["difference in points"].startswith("+20.0 [-")
    assert cut["difference in points"].startswith("+0.0 [-")
    assert (tokens["before"], seconds["after"]) == ("10.0", "0.100")


def test_reward_beside_accuracy(tmp_path):
    good, bad = one_run(tmp_path / "good"), one_run(tmp_path / "bad", 8, 5.0)
    judged = {
        "good": (good, {0: graded("+---"), 6: graded("++--")}),
        "bad": (bad, {0: graded("+---"), 4: graded("----")}),
    }
    figure = figures.reward_and_accuracy(judged)
    paid, able = figure.axes
    assert [line.get_ydata().tolist() for line in able.lines] == [
        [0.25, 0.5],
        [0.25, 0.0],
    ]
    assert [line.get_xdata().tolist() for line in able.lines] == [
        [0, 6],
        [0, 4],
    ]
    raw, smooth = paid.lines[0].get_ydata(), paid.lines[1].get_ydata()
    assert np.mean(raw[:5]) == pytest.approx(1)
    assert smooth[4] == pytest.approx(1) and smooth[-1] > 1
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["good", "bad"]
    assert not plt.get_fignums()


def test_a_reward_of_nothing_at_first_is_drawn(tmp_path):
    run = one_run(tmp_path / "run")
    frame = run.metrics.assign(reward=[0.0] * 6 + [0.5] * 6)
    frame.to_csv(run.directory / "metrics.csv", index=False)
    run = grid.Run("run", run.settings, run.directory, "unfinished")
    evaluations = {0: graded("+-"), 6: graded("+-")}
    figure = figures.reward_and_accuracy({"run": (run, evaluations)})
    assert figure.axes[0].lines[0].get_ydata()[-1] == 0.5


# --- A population -----------------------------------------------------------


def lineage_of(*rows) -> pd.DataFrame:
    """Rows of generation, step, rank, member, parent, born, accuracy."""
    names = ["generation", "step", "rank", "member", "parent", "born"]
    frame = pd.DataFrame(
        [dict(zip([*names, "accuracy"], row, strict=True)) for row in rows]
    )
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
    [axis] = figure.axes
    first = axis.lines[0]
    assert list(first.get_xdata()) == [0, 480, 960]
    assert list(first.get_ydata()) == [0.25, 0.4, 0.8]


def test_every_member_has_its_curve():
    metrics = pd.DataFrame(
        {
            "step": [1, 1, 2, 2],
            "member": [0, 1, 0, 2],
            "reward": [0.1, 0.2, 0.3, 0.4],
            "frac_reward_zero_std": [0.0] * 4,
            "clipped_ratio": [0.0] * 4,
        }
    )
    figure = figures_scale.population_curves(metrics)
    assert [len(axis.lines) for axis in figure.axes] == [3, 3, 3]
    colours = {line.get_color() for line in figure.axes[0].lines}
    assert len(colours) == 3


def test_the_status_of_an_experiment_fits_a_line():
    now = {"status": "running", "reason": "", "doing": "", "step": 3}
    now["steps"] = 0
    text = figures_scale.status_table(now).to_html()
    assert "running" in text and "3 of ?" in text
    now |= {"steps": 8, "doing": "training member 1", "reward": 0.5}
    assert "3 of 8" in figures_scale.status_table(now).to_html()
