"""The plots and tables that a lesson shows.

Tables come as pandas Stylers, plots as matplotlib figures that are closed
already, so that a notebook shows each exactly once. Colour tells the base
model, line style its runs apart, and both are told in words as well.
"""

import html
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import HTML, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from pandas.io.formats.style import Styler

from grpo_lab.evaluation import Answer, Evaluation, compare, wilson_interval
from grpo_lab.grid import Grid, Run
from grpo_lab.settings import RunSettings, run_names
from rewards import gold_answer

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Told apart by colour-blind readers (Okabe, Ito)."""
GREY = "#888888"  # of the base model
LINES = ("-", "--", ":", "-.")  # of the runs of one model
MARKS = "os^D"
PERCENT = PercentFormatter(1, decimals=0)
DPI = 72  # as wide as a notebook's column, and small to commit
SMOOTHING = 5  # optimizer steps in the moving average of a curve
SHOWN_SIDE = 90  # characters of a long completion at either end

HEALTH = {
    "reward_std": "Spread of the reward (std)",
    "frac_reward_zero_std": "Groups with equal rewards (share)",
    "clipped_ratio": "Truncated completions (share)",
    "mean_length": "Length (tokens)",
    "entropy": "Entropy of the policy (nats)",
    "loss": "Loss (no sign of progress)",
}
"""Panels of `health_curves`: columns of metrics.csv, and their titles."""
SHARES = ("frac_reward_zero_std", "clipped_ratio")  # of them, from 0 to 1

TEXT = {
    "text-align": "left",
    "vertical-align": "top",
    "white-space": "pre-wrap",  # line breaks are kept
}
CELLS = [
    {"selector": "th", "props": "text-align: left"},
    {"selector": "td, th", "props": "padding: 3px 10px; vertical-align: top"},
]
NO_MATH = 'class="tex2jax_ignore mathjax_ignore"'
"""Keeps "$12 and $5" in a question from being set as a formula."""


def table(frame: pd.DataFrame, formats: dict | None = None) -> Styler:
    """A table without index, text on the left, numbers on the right."""
    text = [c for c in frame if frame[c].dtype.kind not in "iufb"]
    return (
        frame.style.hide(axis="index")
        .set_table_attributes(NO_MATH)
        .format(formats or {}, na_rep="-", escape="html")
        .set_properties(subset=text, **TEXT)
        .set_table_styles(CELLS)
    )


def show(frame: pd.DataFrame, formats: dict | None = None) -> None:
    """Show a table from inside an `if`, where a cell's last value can't."""
    display(table(frame, formats))


# --- Rewards ----------------------------------------------------------------


def short_name(reward: Callable | str) -> str:
    """`strict_format_reward` as readers say it: `strict format`."""
    name = reward if isinstance(reward, str) else reward.__name__
    return name.removesuffix("_reward").replace("_", " ")


def reward_table(
    completions: dict[str, str], gold: str, rewards: Sequence[Callable]
) -> Styler:
    """How each reward function scores some completions of one question.

    Args:
        completions: a name for each completion, and its text.
        gold: the reference answer of the question.
        rewards: reward functions with TRL's signature.
    """
    sets = {short_name(reward): [reward] for reward in rewards}
    frame = _scores(completions, gold, sets)
    frame["total"] = frame[list(sets)].sum(axis=1)
    return _scored(frame, [*sets, "total"], ["total"])


def reward_totals(
    completions: dict[str, str],
    gold: str,
    sets: dict[str, Sequence[Callable]],
) -> pd.DataFrame:
    """How several reward sets score the same completions.

    Returns:
        A row for each completion: `completion`, `text`, then the sum of each
        set in a column of the set's name. A part without a score counts as 0.
    """
    frame = _scores(completions, gold, sets)
    return frame.fillna(dict.fromkeys(sets, 0.0))


def _scores(completions: dict[str, str], gold: str, sets: dict) -> Any:
    """One column for each set; NaN where no part of it has a score."""
    texts = list(completions.values())
    golds = [gold] * len(texts)
    frame = pd.DataFrame({"completion": list(completions), "text": texts})
    for name, parts in sets.items():
        scores = [reward(texts, answer=golds) for reward in parts]
        frame[name] = pd.DataFrame(scores, dtype=float).sum(min_count=1)
    return frame


def reward_totals_table(totals: pd.DataFrame) -> Styler:
    """`reward_totals` as a table; a long text loses its middle."""
    names = list(totals.columns[2:])
    shown = totals.assign(text=[_shortened(text) for text in totals["text"]])
    return _scored(shown, names, names)


def _scored(frame: pd.DataFrame, scores: list, coloured: list) -> Styler:
    """A table of texts and scores, the darker the higher."""
    return (
        table(frame, dict.fromkeys(scores, "{:.2f}"))
        .set_properties(subset=["text"], **{"font-family": "monospace"})
        .background_gradient(subset=coloured, cmap="Greens", vmin=0, vmax=6)
    )


def _shortened(text: str) -> str:
    middle = len(text) - 2 * SHOWN_SIDE
    if middle <= 0:
        return text
    start, end = text[:SHOWN_SIDE], text[-SHOWN_SIDE:]
    return f"{start}\n[{middle} more characters]\n{end}"


def reward_totals_figure(totals: pd.DataFrame) -> Figure:
    """`reward_totals`: a line for each completion, a mark for each set.

    A dotted line stands at each set's score of the first completion; what
    lies to the right of it scores higher.
    """
    count, names = len(totals), list(totals.columns[2:])
    first = totals["completion"].iloc[0]
    figure, axis = subplots(0.35 * count + 1.3)
    heights = range(count - 1, -1, -1)
    for at, (name, look) in enumerate(looks(names)):
        shift = 0.24 * ((len(names) - 1) / 2 - at)
        places = [height + shift for height in heights]
        axis.plot(totals[name], places, label=name, linestyle="", **look)
        axis.axvline(totals[name].iloc[0], color=look["color"], linestyle=":")
    axis.set_yticks(heights, list(totals["completion"]))
    axis.margins(y=0.06)
    axis.set_xlabel(f"sum of the parts; dotted: {first}")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(names))
    return closed(figure)


# --- A grid while it runs ---------------------------------------------------


def grid_table(estimates: pd.DataFrame) -> Styler:
    """The runs of a grid before they start; see `grid.estimates`."""
    formats = {
        "needs GiB": "{:.2f}",
        "there are GiB": "{:.1f}",
        "minutes, about": "{:.1f}",
    }
    return table(estimates, formats)


class LiveTable:
    """A table of all runs that fills in while the grid runs.

    Give its `update` to `grid.run` as `progress`. Redraws at most once a
    second, in one output of the notebook; rewards are means over the last
    `SMOOTHING` steps. A clone that is made meanwhile gets a row of its own.

    Attributes:
        seen: for each run's name (seconds since the table was made, step),
            one for each step; see `figures_scale.timeline`.
    """

    def __init__(
        self, settings: Sequence[RunSettings], rewards: Sequence[Callable]
    ) -> None:
        self.parts = [reward.__name__ for reward in rewards]
        names = run_names(settings)
        self.names = dict(zip(settings, names, strict=True))
        self.rows: dict[str, list[dict]] = {name: [] for name in names}
        self.totals = dict.fromkeys(names, 0)
        self.seen: dict[str, list] = {name: [] for name in names}
        self.ended: dict[str, str] = {}
        self.made = time.monotonic()
        self.drawn = 0.0
        self.handle: Any = display(HTML(self._html()), display_id=True)

    def update(
        self, settings: RunSettings, step: int, total: int, row: dict
    ) -> None:
        """Take in one optimizer step of one run."""
        if settings not in self.names:
            name = run_names([*self.names, settings])[-1] + " (clone)"
            self.names[settings] = name
            self.rows[name], self.seen[name] = [], []
        name = self.names[settings]
        self.rows[name].append(row)
        self.totals[name] = total
        self.seen[name].append((time.monotonic() - self.made, step))
        if step == total or time.monotonic() - self.drawn > 1:
            self._draw()

    def end(self, grid: Grid) -> None:
        """Draw the last steps, and which runs have ended before their time."""
        self.ended = {
            self.names[run.settings]: run.status
            for run in grid.runs
            if run.status != "done" and run.settings in self.names
        }
        self._draw()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        self.handle.update(HTML(self._html()))

    def _html(self) -> str:
        heads = ["run", "step", "reward", *map(short_name, self.parts)]
        heads += ["zero std", "clipped", "left"]
        style = '<th style="text-align: left">'
        head = "".join(f"{style}{head}</th>" for head in heads)
        body = "".join(self._row(name) for name in self.rows)
        return f"<table><tr>{head}</tr>{body}</table>"

    def _row(self, name: str) -> str:
        rows, total = self.rows[name], self.totals[name]
        run = f'<td style="text-align: left">{html.escape(name)}</td>'
        if not rows:
            return f"<tr>{run}<td>waits</td></tr>"
        recent = pd.DataFrame(rows[-SMOOTHING:]).astype(float).mean()
        step = rows[-1]["step"]
        left = (total - step) * recent["seconds"]
        cells = [
            f"<progress value={step} max={total}></progress> {step}/{total}",
            f"<b>{recent['reward']:.2f}</b>",
            *(_number(recent.get(part)) for part in self.parts),
            f"{recent['frac_reward_zero_std']:.0%}",
            f"{recent['clipped_ratio']:.0%}",
            self.ended.get(name) or (f"{left:.0f} s" if left else "done"),
        ]
        return f"<tr>{run}{''.join(f'<td>{c}</td>' for c in cells)}</tr>"


def _number(value: float | None) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:.2f}"


# --- Curves -----------------------------------------------------------------


def subplots(height: float, rows: int = 1, columns: int = 1) -> tuple:
    """A figure as wide as a notebook's column, and its axes."""
    return plt.subplots(
        rows, columns, figsize=(10, height), dpi=DPI, layout="constrained"
    )


def closed(figure: Figure) -> Figure:
    plt.close(figure)
    return figure


def looks(
    items: Iterable, colours: Sequence[str] = COLOURS
) -> Iterator[tuple[Any, dict]]:
    """Each item with the colour and the mark to draw it with."""
    styles = zip(items, cycle(colours), cycle(MARKS), strict=False)
    return ((item, {"color": c, "marker": m}) for item, c, m in styles)


def label(axis: Axes, x: str, y: str = "", accuracy: bool = False) -> None:
    """Name the axes, count steps in whole numbers, accuracy in percent."""
    axis.grid(alpha=0.3)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if accuracy:
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PERCENT)


def reward_curves(grid: Grid, rewards: Sequence[Callable]) -> Figure:
    """The reward of every run over its steps: the sum, then each part."""
    return _curves(grid.runs, _reward_panels(rewards))


def health_curves(grid: Grid) -> Figure:
    """Whether training is healthy: spread, truncation, length, and so on."""
    return _curves(grid.runs, HEALTH)


def run_curves(run: Run, rewards: Sequence[Callable]) -> Figure:
    """All about one run: its reward, the parts, and whether it is healthy."""
    return _curves([run], _reward_panels(rewards) | HEALTH)


def _reward_panels(rewards: Sequence[Callable]) -> dict[str, str]:
    parts = {r.__name__: short_name(r).capitalize() for r in rewards}
    return {"reward": "Reward (sum of the parts)"} | parts


def _curves(every_run: Sequence[Run], panels: dict[str, str]) -> Figure:
    """Colour by model, line style by what else varies."""
    models = list(dict.fromkeys(run.settings.model for run in every_run))
    colours = dict(zip(models, cycle(COLOURS), strict=False))
    lines = {model: cycle(LINES) for model in models}
    styles = []
    for run in every_run:
        model = run.settings.model
        look = {"color": colours[model], "linestyle": next(lines[model])}
        if len(run.metrics):
            styles.append((run, look))

    def draw(axis: Axes, column: str) -> None:
        for run, look in styles:
            _curve(axis, run.metrics, column, run.name, look)

    return panel_figure(panels, draw, legend_columns=2)


def panel_figure(
    panels: dict[str, str], draw: Callable, legend_columns: int
) -> Figure:
    """Panels of columns of metrics, three in a row, with one legend."""
    rows = -(-len(panels) // 3)
    figure, axes = subplots(2.5 * rows + 0.5, rows, 3)
    for axis, (column, title) in zip(axes.flat, panels.items(), strict=False):
        draw(axis, column)
        label(axis, "step")
        axis.set_title(title, fontsize=10)
        if column == "reward" or column.endswith("_reward"):
            axis.set_ylim(bottom=0)
        if column in SHARES:
            axis.set_ylim(-0.03, 1.03)
        axis.tick_params(labelsize=8)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    style = {"ncols": legend_columns, "fontsize": 9}
    figure.legend(handles, labels, loc="outside lower center", **style)
    return closed(figure)


def _curve(
    axis: Axes, metrics: pd.DataFrame, column: str, name: str, style: dict
) -> None:
    """A column over the steps: as it is, pale, and its moving average."""
    raw = metrics[column]
    smooth = raw.rolling(SMOOTHING, min_periods=1).mean()
    axis.plot(metrics["step"], raw, alpha=0.25, **style)
    axis.plot(metrics["step"], smooth, label=name, **style)


def reward_and_accuracy(
    runs: dict[str, tuple[Run, dict[int, Evaluation]]],
) -> Figure:
    """The training reward of runs beside their held-out accuracy.

    Rewards of different sets have different scales, so each is shown as a
    multiple of its mean over the first `SMOOTHING` steps.

    Args:
        runs: a name for each run, the run itself, and its evaluations by
            optimizer step; see `evaluation.evaluate_snapshots`.
    """
    figure, (reward, held_out) = subplots(3.2, columns=2)
    styles = zip(runs.items(), cycle(COLOURS), cycle(LINES), strict=False)
    for (name, (run, judged)), colour, line in styles:
        style = {"color": colour, "linestyle": line}
        first = run.metrics["reward"].head(SMOOTHING).mean() or 1.0
        scaled = run.metrics.assign(reward=run.metrics["reward"] / first)
        _curve(reward, scaled, "reward", name, style)
        accuracy = [one.accuracy for one in judged.values()]
        bounds = zip(*(one.interval for one in judged.values()), strict=True)
        held_out.plot(list(judged), accuracy, marker="o", **style)
        held_out.fill_between(list(judged), *bounds, color=colour, alpha=0.15)
    reward.set_title("Training reward, 1 = at first", fontsize=10)
    held_out.set_title("Held-out accuracy", fontsize=10)
    label(reward, "step")
    label(held_out, "step", accuracy=True)
    reward.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return closed(figure)


# --- Results ----------------------------------------------------------------


def leaderboard_table(leaderboard: pd.DataFrame) -> Styler:
    """The leaderboard in words and percents, the best run first."""
    return table(leaderboard_text(leaderboard))


def leaderboard_text(leaderboard: pd.DataFrame) -> pd.DataFrame:
    """`Grid.leaderboard` with intervals and units written out.

    If runs were stopped, or are clones, it also says when, and whose.
    """
    rows = []
    for row in leaderboard.to_dict("records"):
        cells = {"run": row["run"]}
        if leaderboard["stopped"].any():
            # `stopped by halving after step 6 of 24: why`, without why
            short = row["stopped"].partition(":")[0].removeprefix("stopped ")
            cells["ended"] = short or f"done, {row['steps']} steps"
        if leaderboard["parent"].any():
            cells["clone of"] = row["parent"] or "-"
        cells |= _measured(row)
        cells["time"] = f"{row['seconds']:.0f} s"
        cells["peak memory"] = f"{row['peak_memory_gib']:.1f} GiB"
        rows.append(cells)
    return pd.DataFrame(rows)


def _measured(row: dict) -> dict:
    heads = ("before", "after", "gain in points", "p", "format ok", "clipped")
    if pd.isna(row["after"]):  # stopped before it was evaluated
        return dict.fromkeys(heads, "-")
    cells = (
        *(
            _percent(row[when], row[f"{when}_low"], row[f"{when}_high"])
            for when in ("before", "after")
        ),
        _points(row["gain"], row["gain_low"], row["gain_high"]),
        f"{row['p_value']:.1g}",
        f"{row['format_ok_before']:.0%} to {row['format_ok_after']:.0%}",
        f"{row['truncated_after']:.0%}",
    )
    return dict(zip(heads, cells, strict=True))


def _percent(share: float, low: float, high: float) -> str:
    return f"{share:.1%} [{100 * low:.0f}, {100 * high:.0f}]"


def _points(gain: float, low: float, high: float) -> str:
    return f"{100 * gain:+.1f} [{100 * low:+.0f}, {100 * high:+.0f}]"


def leaderboard_figure(leaderboard: pd.DataFrame) -> Figure:
    """Accuracy before and after each run, with 95 % intervals."""
    count = len(leaderboard)
    figure, axis = subplots(0.55 * count + 1.1)
    heights = range(count - 1, -1, -1)
    for y, row in zip(heights, leaderboard.to_dict("records"), strict=True):
        for name, colour, shift in (
            ("before", GREY, 0.12),
            ("after", COLOURS[0], -0.12),
        ):
            below = row[name] - row[f"{name}_low"]
            above = row[f"{name}_high"] - row[name]
            style = {"fmt": "o", "color": colour, "capsize": 3}
            style["label"] = name if y == count - 1 else None
            axis.errorbar(
                row[name], y + shift, xerr=[[below], [above]], **style
            )
    axis.set_yticks(heights, list(leaderboard["run"]))
    axis.set_xlim(0, 1)
    axis.margins(y=0.12)
    axis.set_xlabel("greedy held-out accuracy, with 95 % intervals")
    axis.xaxis.set_major_formatter(PERCENT)
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="best")
    return closed(figure)


def comparison_table(before: Evaluation, after: Evaluation) -> Styler:
    """Base model and trained policy on the same held-out questions.

    Shares come with their 95 % Wilson intervals, the difference of two
    shares with that of the paired comparison.
    """
    shares = {
        "format_ok": "answers in the requested format",
        "correct": "right answers",
        "truncated": "truncated answers",
    }
    rows = []
    for by, title in shares.items():
        cells = []
        for one in (before, after):
            marks = [getattr(answer, by) for answer in one.answers]
            interval = wilson_interval(sum(marks), len(marks))
            cells.append(_percent(sum(marks) / len(marks), *interval))
        pair = compare(before, after, by)
        rows.append((title, *cells, _points(pair.difference, *pair.interval)))
    for by, title, form in (
        ("mean_tokens", "tokens per answer", ".1f"),
        ("seconds_per_answer", "seconds per answer", ".3f"),
    ):
        found = (f"{getattr(one, by):{form}}" for one in (before, after))
        rows.append((title, *found, ""))
    heads = ["on the held-out questions", "before", "after"]
    heads.append("difference in points")
    return table(pd.DataFrame(rows, columns=heads))


def answers_table(
    before: Evaluation,
    after: Evaluation,
    count: int = 3,
    lost_first: bool = False,
) -> Styler:
    """Some questions, answered before and after training.

    Takes the first question that training turned from wrong to right, the
    first that it turned from right to wrong, if any, then others in order.
    With `lost_first` the second of them comes first.
    """
    pairs = list(zip(before.answers, after.answers, strict=True))
    gained = [p for p in pairs if p[1].correct and not p[0].correct][:1]
    lost = [p for p in pairs if p[0].correct and not p[1].correct][:1]
    shown = lost + gained if lost_first else gained + lost
    shown += [p for p in pairs if p not in shown][: count - len(shown)]
    rows = [
        {
            "question": one.question,
            "reference answer": gold_answer(one.gold) or one.gold,
            "before": _verdict(one),
            "after": _verdict(two),
        }
        for one, two in shown[:count]
    ]
    return table(pd.DataFrame(rows))


def _verdict(answer: Answer) -> str:
    verdict = "RIGHT" if answer.correct else "WRONG"
    return f"{answer.text}\n[{verdict}]"
