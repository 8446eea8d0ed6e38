"""Plots and tables: nothing is missing, nothing is hidden from the reader."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fake_grid import graded, written

from grpo_lab import figures, grid
from grpo_lab.evaluation import Answer, Evaluation
from grpo_lab.settings import RunSettings
from grpo_lab.training import METRICS
from rewards import FIVE_PART, MAX_REWARD

PARTS = [part.__name__ for part in FIVE_PART]
REWARD_TITLES = [
    "Reward (sum of the parts)", "Correctness", "Integer", "Strict format",
    "Soft format", "Tag count",
]  # fmt: skip


@pytest.fixture(autouse=True)
def every_figure_is_closed():
    """So that a notebook shows it once."""
    yield
    assert not plt.get_fignums()


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)


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


@pytest.mark.parametrize(
    ("draw", "titles"),
    [
        (lambda g: figures.reward_curves(g, FIVE_PART), REWARD_TITLES),
        (figures.health_curves, list(figures.HEALTH.values())),
    ],
)
def test_every_run_has_its_curve_in_every_panel(some_grid, draw, titles):
    figure = draw(some_grid)
    shown = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in shown] == titles
    for axis in shown:
        assert len(axis.lines) == 2 * len(some_grid.runs)  # raw and smooth
        for line in axis.lines:
            assert np.isfinite(line.get_ydata().astype(float)).all()
            assert len(line.get_xdata()) in (3, 12)
        if axis.get_title().endswith("(share)"):
            assert axis.get_ylim() == (-0.03, 1.03)
    assert legend(figure) == [run.name for run in some_grid.runs]
    # Every run looks different from every other one.
    smooth = [line for line in shown[0].lines if line.get_alpha() is None]
    looks = {(line.get_color(), line.get_linestyle()) for line in smooth}
    assert len(looks) == len(some_grid.runs)
    if titles == REWARD_TITLES:
        raw = some_grid.runs[0].metrics["reward"]
        assert smooth[0].get_ydata()[0] == raw[0]
        assert smooth[0].get_ydata()[-1] == pytest.approx(raw[-5:].mean())


def test_what_is_not_there_is_not_drawn(some_grid, tmp_path):
    """A part that never applied, and a run without a step."""
    first, second, *_ = some_grid.runs
    first.metrics.assign(**{PARTS[1]: None}).to_csv(
        first.directory / "metrics.csv", index=False
    )
    (second.directory / "metrics.csv").unlink()
    figure = figures.reward_curves(grid.load(tmp_path), FIVE_PART)
    assert len(figure.axes[0].lines) == 2 * 3
    assert np.isnan(figure.axes[2].lines[0].get_ydata().astype(float)).all()


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
    assert not {"ended", "clone of"} & set(text)
    assert not text.map(lambda cell: "nan" in cell).any().any()
    page = figures.leaderboard_table(some_grid.leaderboard()).to_html()
    assert page.count("<tr>") == 5


def test_the_leaderboard_as_a_picture(some_grid):
    board = some_grid.leaderboard()
    axis = figures.leaderboard_figure(board).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == list(board["run"])
    centres = [bar[0].get_xdata()[0] for bar in axis.containers]
    assert centres == [
        x for b in board.itertuples() for x in (b.before, b.after)
    ]


@pytest.mark.parametrize("count", [1, 20, 97])
def test_all_or_nothing_can_be_drawn(tmp_path, count):
    """At 0 and 1 an interval ends where the point is."""
    written(tmp_path, 1e-3, graded("-" * count), graded("+" * count))
    written(tmp_path, 1e-4, graded("-" * count), graded("-" * count))
    figure = figures.leaderboard_figure(grid.load(tmp_path).leaderboard())
    assert len(figure.axes[0].containers) == 4


# --- Rewards ----------------------------------------------------------------

PERFECT = "<reasoning>\n9 * 8 = 72\n</reasoning>\n<answer>\n72\n</answer>"


def test_the_reward_table_adds_up_and_shows_text_as_text():
    """A browser would swallow <answer>, and run what a policy writes."""
    texts = {"perfect": PERFECT, "bad": "<script>x</script>"}
    page = figures.reward_table(texts, "#### 72", FIVE_PART).to_html()
    assert "&lt;answer&gt;\n72\n&lt;/answer&gt;" in page
    assert "<answer>" not in page and "<script>" not in page
    found = cells(page)
    assert found[0] == "perfect"
    assert [float(value) for value in found[2:8]] == [
        2.0, 0.5, 0.5, 0.5, 0.5, MAX_REWARD,
    ]  # fmt: skip
    assert [float(value) for value in found[10:16]] == [0.0] * 6


def some_totals(gold="#### 72"):
    long = "<answer>72</answer>" + "<b>" * 200
    texts = {"perfect": PERFECT, "bare": "72", "long": long}
    sets = {"ours": FIVE_PART, "one part": FIVE_PART[:1]}
    return figures.reward_totals(texts, gold, sets)


@pytest.mark.parametrize(
    ("gold", "ours", "one"),
    [
        ("#### 72", [MAX_REWARD, 0.0, 2.5], [2.0, 0.0, 2.0]),
        # Correctness gives None, the other parts a number.
        ("no number here", [2.0, 0.0, 0.5], [0.0, 0.0, 0.0]),
    ],
)
def test_totals_are_sums_of_the_parts_that_have_a_score(gold, ours, one):
    totals = some_totals(gold)
    assert list(totals) == ["completion", "text", "ours", "one part"]
    assert list(totals["ours"]) == ours
    assert list(totals["one part"]) == one


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
        assert list(mark.get_xdata()) == list(totals[name])
        assert np.abs(mark.get_ydata() - np.array(heights)).max() < 0.5
        assert set(line.get_xdata()) == {totals[name][0]}
        assert line.get_color() == mark.get_color()
    assert len({(mark.get_color(), mark.get_marker()) for mark in marks}) == 2
    assert legend(figure) == ["ours", "one part"]


# --- Answers ----------------------------------------------------------------


def evaluation(*texts: tuple[str, bool]) -> Evaluation:
    answers = (
        Answer(f"question {at}", "1 + 1 = 2\n#### 2", text, right, True, 5,
               False)
        for at, (text, right) in enumerate(texts)
    )  # fmt: skip
    return Evaluation(tuple(answers), 1.0)


def test_answers_before_and_after():
    before = evaluation(("<a>", True), ("b", True), ("c", False), ("d", True))
    after = evaluation(("A", True), ("B", True), ("C", True), ("D", False))
    found = cells(figures.answers_table(before, after).to_html())
    assert found[0::4] == ["question 2", "question 3", "question 0"]
    assert found[1::4] == ["2", "2", "2"]
    assert [" ".join(cell.split()) for cell in found[2:4]] == [
        "c [WRONG]", "C [RIGHT]",
    ]  # fmt: skip
    assert found[10].startswith("&lt;a&gt;")
    lost = figures.answers_table(before, after, count=1, lost_first=True)
    assert list(lost.data["question"]) == ["question 3"]
    one = figures.answers_table(before, before, count=1)
    assert list(one.data["question"]) == ["question 0"]


def test_before_and_after_in_words():
    before = graded("+---------", format_ok="----------")
    after = graded("+++-------", format_ok="++++++++++")
    frame = figures.comparison_table(before, after).data
    form, right, clipped, tokens, seconds = frame.to_dict("records")
    assert form["before"].startswith("0.0% [0, 28]")
    assert form["after"].startswith("100.0% [72, 100]")
    assert form["difference in points"].startswith("+100.0 [+")
    assert right["before"].startswith("10.0%")
    assert right["after"].startswith("30.0%")
    assert right["difference in points"].startswith("+20.0 [-")
    assert clipped["difference in points"].startswith("+0.0 [-")
    assert (tokens["before"], seconds["after"]) == ("10.0", "0.100")


def test_estimates_name_the_runs():
    settings = [RunSettings("pocket-qwen", 1e-3)]
    page = figures.grid_table(
        grid.estimates(settings, 100, 80, grid.Pace(1.0, 4))
    ).to_html()
    assert "pocket-qwen lr=0.001" in page


# --- The live table ---------------------------------------------------------


@pytest.fixture
def live(monkeypatch):
    """A live table of two runs, and the pages that it has shown."""
    pages = []

    class Handle:
        def update(self, page):
            pages.append(page.data)

    def display(page, display_id):
        pages.append(page.data)
        return Handle()

    monkeypatch.setattr(figures, "display", display)
    settings = [RunSettings("<b>m</b>", rate) for rate in (1e-3, 1e-4)]
    return figures.LiveTable(settings, FIVE_PART), settings, pages


def row(step: int, reward: float = 1.0, **changes) -> dict:
    values = dict.fromkeys([*METRICS, *PARTS], 0.25)
    return {**values, "step": step, "reward": reward, "kl": None,
            "seconds": 2.0, "memory_gib": 1.0, **changes}  # fmt: skip


def test_the_live_table_fills_in(live):
    table, settings, pages = live
    assert pages[0].count("waits") == 2
    assert "<b>m</b>" not in pages[0] and "b&gt; lr=0.0001" in pages[0]
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


def test_the_live_table_is_drawn_at_the_end_and_not_at_every_step(
    live, monkeypatch
):
    monkeypatch.setattr(figures.time, "monotonic", lambda: 0.5)
    table, settings, pages = live
    table.drawn = 0.5
    for step in range(1, 101):
        # A part may have no score, and a clone only some of the parts.
        values = row(step, **{PARTS[2]: None})
        table.update(settings[0], step, 100, values)
    assert len(pages) == 2
    assert "100/100" in pages[-1] and "nan" not in pages[-1]


def test_a_clone_gets_a_row_of_the_live_table(live):
    """It is made in a terminal, while the notebook looks on."""
    table, settings, pages = live
    table.update(settings[0], 2, 2, row(2))
    clone = row(2)
    del clone[PARTS[1]]
    table.update(RunSettings("m", 5e-4), 2, 2, clone)
    assert "m lr=0.0005 (clone)" in pages[-1]
    assert pages[-1].count("2/2") == 2
    assert ">-<" in pages[-1] and "nan" not in pages[-1]
    assert list(table.seen)[2:] == ["m lr=0.0005 (clone)"]


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


# --- One run ----------------------------------------------------------------


def one_run(folder, steps=12, start=1.0, **changes) -> grid.Run:
    folder.mkdir()
    frame = metrics(steps, start).assign(**changes)
    frame.to_csv(folder / "metrics.csv", index=False)
    settings = RunSettings("pocket-qwen", 1e-3)
    return grid.Run(folder.name, settings, folder, "unfinished")


def test_curves_of_one_run(tmp_path):
    figure = figures.run_curves(one_run(tmp_path / "run"), FIVE_PART[:2])
    shown = [axis for axis in figure.axes if axis.axison]
    titles = [*REWARD_TITLES[:3], *figures.HEALTH.values()]
    assert [axis.get_title() for axis in shown] == titles
    assert all(len(axis.lines) == 2 for axis in shown)


def test_reward_beside_accuracy(tmp_path):
    nothing = [0.0] * 6 + [0.5] * 6
    runs = {
        "good": (
            one_run(tmp_path / "good"),
            {0: graded("+---"), 6: graded("++--")},
        ),
        "at first nothing": (
            one_run(tmp_path / "bad", reward=nothing),
            {0: graded("+---"), 4: graded("----")},
        ),
    }
    figure = figures.reward_and_accuracy(runs)
    reward, able = figure.axes
    points = [line.get_xydata().tolist() for line in able.lines]
    assert points == [[[0, 0.25], [6, 0.5]], [[0, 0.25], [4, 0.0]]]
    raw, smooth = reward.lines[0].get_ydata(), reward.lines[1].get_ydata()
    assert np.mean(raw[:5]) == pytest.approx(1)
    assert smooth[4] == pytest.approx(1) and smooth[-1] > 1
    assert reward.lines[2].get_ydata().tolist() == nothing
    assert legend(figure) == ["good", "at first nothing"]
