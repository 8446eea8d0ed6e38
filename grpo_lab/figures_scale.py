"""What the lessons on populations and on many workers show."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas.io.formats.style import Styler

from grpo_lab.figures import (
    COLOURS,
    GREY,
    HEALTH,
    SHARES,
    LiveTable,
    closed,
    label,
    looks,
    panel_figure,
    subplots,
    table,
)
from grpo_lab.files import read_json
from grpo_lab.grid import Grid
from grpo_lab.grid.halving import STOPPED, Rung, read_rungs

MEMBER_COLOURS = (*COLOURS, "#E69F00", "#56B4E9", "#000000")
"""Of the members of a population, in the order of birth."""
RANKING = "accuracy (questions that rank)"


def status_table(now: dict) -> Styler:
    """How an experiment stands, in one line; see `arena.experiment.status`."""
    row = {
        "status": now["status"],
        "what it is doing": now["doing"] or "-",
        "its step": f"{now['step']} of {now['steps'] or '?'}",
        "reward of that step": now.get("reward"),
        "note": now["reason"] or now.get("warning") or "-",
    }
    return table(pd.DataFrame([row]), {"reward of that step": "{:.2f}"})


def lineage_table(lineage: pd.DataFrame) -> Styler:
    """Who descends from whom; see `arena.records.lineage`.

    A copy's own change stands in the generation in which it was born.
    """
    frame = lineage[["generation", "step", "rank", "member"]].copy()
    rows = lineage.to_dict("records")
    frame["came from"] = [_origin(row) for row in rows]
    frame["learning rate"] = lineage["learning_rate"].map("{:.3g}".format)
    frame["beta"] = lineage["beta"].map("{:.3g}".format)
    frame["accuracy"] = [
        f"{row['accuracy']:.0%} "
        f"[{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
        for row in rows
    ]
    frame["mean reward"] = lineage["mean_reward"]
    return table(frame, {"mean reward": "{:.2f}"})


def _origin(row: dict) -> str:
    if row["born"] < row["generation"]:
        return "itself"
    if pd.isna(row["parent"]):
        return "the base model"
    return f"copy of {row['parent']}, {row['change'] or 'unchanged'}"


def lineage_figure(lineage: pd.DataFrame, base: float) -> Figure:
    """The accuracy of each member, each copy joined to its parent.

    Args:
        lineage: see `arena.records.lineage`.
        base: accuracy of the base model on the same questions, 0 to 1.
    """
    figure, axis = subplots(3.6)
    axis.axhline(base, color=GREY, linestyle=":", label="base model")
    at = lineage.set_index(["member", "step"])["accuracy"].to_dict()
    members = looks(lineage.groupby("member"), MEMBER_COLOURS)
    for place, ((member, rows), look) in enumerate(members):
        first = rows.iloc[0]
        # Members measured at one step would hide each other's intervals.
        steps = rows["step"] + 0.12 * (place % 4 - 1.5)
        accuracy = rows["accuracy"]
        axis.errorbar(
            steps,
            accuracy,
            yerr=[accuracy - rows["low"], rows["high"] - accuracy],
            capsize=3,
            label=f"member {member}, lr {first['learning_rate']:.3g}, "
            f"beta {first['beta']:.3g}",
            **look,
        )
        born = lineage[lineage["generation"] < first["generation"]]
        if not pd.isna(first["parent"]) and len(born):
            start = born["step"].max()
            axis.plot(
                [start, steps.iloc[0]],
                [at[(first["parent"], start)], accuracy.iloc[0]],
                color=look["color"],
                linestyle="--",
                linewidth=1,
            )
    label(axis, "optimizer step of each member", RANKING, accuracy=True)
    figure.legend(loc="outside right upper", fontsize=8)
    return closed(figure)


def budget_figure(lineages: dict[str, pd.DataFrame], base: float) -> Figure:
    """The best member's accuracy over the completions generated so far.

    Args:
        lineages: a name for each experiment, and its lineage.
        base: accuracy of the base model on the same questions, 0 to 1.
    """
    figure, axis = subplots(3.2)
    for (name, lineage), look in looks(lineages.items()):
        best = lineage[lineage["rank"] == 1]
        spent = best["completions"]
        accuracy = [base, *best["accuracy"]]
        axis.plot([0, *spent], accuracy, label=name, **look)
        band = {"color": look["color"], "alpha": 0.15}
        axis.fill_between(spent, best["low"], best["high"], **band)
    label(axis, "completions generated", RANKING, accuracy=True)
    axis.legend(loc="lower right")
    return closed(figure)


def population_curves(metrics: pd.DataFrame) -> Figure:
    """Reward, equal groups and truncation of every member over its steps.

    Args:
        metrics: see `arena.records.metrics`.
    """
    panels = {"reward": "Reward"} | {name: HEALTH[name] for name in SHARES}

    def draw(axis: Axes, column: str) -> None:
        members = looks(metrics.groupby("member"), MEMBER_COLOURS)
        for (member, rows), look in members:
            name = f"member {member}"
            axis.plot(
                rows["step"], rows[column], label=name, markersize=3, **look
            )

    return panel_figure(panels, draw, legend_columns=6)


def starts_table(grid: Grid) -> Styler:
    """Where each run ran: a row for every time that it was started."""
    rows: list[dict] = []
    for run in grid.runs:
        starts: Any = read_json(run.directory / "environment.json") or []
        rows += [
            {
                "run": run.name,
                "start": f"{number} of {len(starts)}",
                "from step": start.get("step"),
                "at": start["time"][11:19],
                "host": start["host"],
                "process": str(start["process"]),
                "threads": start["threads"],
            }
            for number, start in enumerate(starts, start=1)
        ]
    return table(pd.DataFrame(rows))


def timeline(live: LiveTable, rungs: Sequence[int] = ()) -> Figure:
    """Which run was at which step when, as a live table was told.

    A line that rests is a run whose worker was lost, until another worker has
    taken it up; one that ends early was stopped. Runs that keep pace lie one
    on the other, the later ones thinner.

    Args:
        live: the table that the grid filled in.
        rungs: steps at which runs were compared, drawn as dotted lines.
    """
    figure, axis = subplots(3.2)
    runs = looks(live.seen.items(), MEMBER_COLOURS)
    for at, ((name, told), look) in enumerate(runs):
        if told:
            size = {"markersize": 9 - 2 * (at % 4), "linewidth": 4 - at % 4}
            seconds, steps = zip(*told, strict=True)
            axis.plot(seconds, steps, label=name, **look, **size)
    for rung in rungs:
        axis.axhline(rung, color=GREY, linestyle=":")
    label(axis, "seconds since the grid was started", "step")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return closed(figure)


def halving_table(grid: Grid) -> Styler:
    """What each run had reached at each rung, and what became of it."""
    found = {run.name: read_rungs(run.directory) for run in grid.runs}
    steps = sorted({rung.step for rungs in found.values() for rung in rungs})
    rows = []
    for run in grid.runs:
        told = {rung.step: _rung(rung) for rung in found[run.name]}
        row = {"run": run.name}
        row |= {f"at step {step}": told.get(step, "-") for step in steps}
        rows.append(row | {"made": f"{run.steps} steps"})
    return table(pd.DataFrame(rows))


def _rung(rung: Rung) -> str:
    if rung.cutoff is None:
        return f"{rung.accuracy:.1%}, the first here: goes on"
    verb = "stopped" if rung.decision == STOPPED else "goes on"
    least = f"{rung.cutoff:.1%} needed"
    return f"{rung.accuracy:.1%}, {least} ({rung.compared} here): {verb}"


def plan_table(plans: pd.DataFrame) -> Styler:
    """Plans, as `grid.simulation.simulate` gives them; costs if there are."""
    hours = "{:,.1f}" if plans["worker hours"].max() >= 24 else "{:.2f}"
    formats = {
        "hours": hours,
        "worker hours": hours,
        "cost in USD": "{:,.0f}",
        "share of all steps": "{:.0%}",
        "busy": "{:.0%}",
    }
    hidden = ["lost workers"]
    if not plans["cost in USD"].any():
        hidden.append("cost in USD")
        del formats["cost in USD"]
    shown = table(plans.drop(columns=hidden), formats)
    return shown.set_caption("Simulated: nothing was trained.")
