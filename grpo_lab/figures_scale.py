"""What the lessons on populations and on many workers show."""

from collections.abc import Sequence
from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas.io.formats.style import Styler

from grpo_lab.figures import (
    COLOURS,
    GREY,
    HEALTH,
    PERCENT,
    LiveTable,
    closed,
    panel_figure,
    subplots,
    table,
)
from grpo_lab.files import read_json
from grpo_lab.grid import Grid
from grpo_lab.grid.halving import STOPPED, Rung, read_rungs

MEMBER_COLOURS = (*COLOURS, "#E69F00", "#56B4E9", "#000000")
"""Of the members of a population, in the order of birth."""


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
    frame = pd.DataFrame(
        [
            {
                "generation": row["generation"],
                "step": row["step"],
                "rank": row["rank"],
                "member": row["member"],
                "came from": _origin(row),
                "learning rate": f"{row['learning_rate']:.3g}",
                "beta": f"{row['beta']:.3g}",
                "accuracy": (
                    f"{row['accuracy']:.0%} "
                    f"[{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
                ),
                "mean reward": row["mean_reward"],
            }
            for row in lineage.to_dict("records")
        ]
    )
    return table(frame, {"mean reward": "{:.2f}"})


def _origin(row: dict) -> str:
    if row["born"] < row["generation"]:
        return "itself"
    if pd.isna(row["parent"]):
        return "the base model"
    return f"copy of {row['parent']}" + (
        f", {row['change']}" if row["change"] else ", unchanged"
    )


def lineage_figure(lineage: pd.DataFrame, base: float) -> Figure:
    """The accuracy of each member, each copy joined to its parent.

    Args:
        lineage: see `arena.records.lineage`.
        base: accuracy of the base model on the same questions, 0 to 1.
    """
    figure, axis = subplots(3.6)
    axis.axhline(base, color=GREY, linestyle=":", label="base model")
    at = lineage.set_index(["member", "step"])["accuracy"].to_dict()
    looks = zip(lineage.groupby("member"), cycle(MEMBER_COLOURS), strict=False)
    for place, ((member, rows), colour) in enumerate(looks):
        first = rows.iloc[0]
        steps, accuracy = list(rows["step"]), list(rows["accuracy"])
        # Members measured at one step would hide each other's intervals.
        shift = 0.12 * (place % 4 - 1.5)
        axis.errorbar(
            [step + shift for step in steps],
            accuracy,
            yerr=[
                rows["accuracy"] - rows["low"],
                rows["high"] - rows["accuracy"],
            ],
            marker="os^D"[place % 4],
            color=colour,
            capsize=3,
            label=f"member {member}, lr {first['learning_rate']:.3g}, "
            f"beta {first['beta']:.3g}",
        )
        born = lineage[lineage["generation"] < first["generation"]]
        if not pd.isna(first["parent"]) and len(born):
            start = born["step"].max()
            axis.plot(
                [start, steps[0] + shift],
                [at[(first["parent"], start)], accuracy[0]],
                color=colour,
                linestyle="--",
                linewidth=1,
            )
    _accuracy_axis(axis, "optimiser step of each member")
    figure.legend(loc="outside right upper", fontsize=8)
    return closed(figure)


def budget_figure(lineages: dict[str, pd.DataFrame], base: float) -> Figure:
    """The best member's accuracy over the completions that were paid for.

    Args:
        lineages: a name for each experiment, and its lineage.
        base: accuracy of the base model on the same questions, 0 to 1.
    """
    figure, axis = subplots(3.2)
    looks = zip(lineages.items(), cycle(COLOURS), cycle("os^D"), strict=False)
    for (name, lineage), colour, mark in looks:
        best = lineage[lineage["rank"] == 1]
        spent = [0, *best["completions"]]
        axis.plot(
            spent,
            [base, *best["accuracy"]],
            marker=mark,
            color=colour,
            label=name,
        )
        axis.fill_between(
            best["completions"],
            best["low"],
            best["high"],
            color=colour,
            alpha=0.15,
        )
    _accuracy_axis(axis, "completions written")
    axis.legend(loc="lower right")
    return closed(figure)


def _accuracy_axis(axis: Axes, what: str) -> None:
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("accuracy (questions that rank)", fontsize=9)
    axis.yaxis.set_major_formatter(PERCENT)
    axis.set_xlabel(what, fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def population_curves(metrics: pd.DataFrame) -> Figure:
    """Reward, spread and truncation of every member over its steps.

    Args:
        metrics: see `arena.records.metrics`.
    """
    panels = {
        "reward": "Reward",
        "frac_reward_zero_std": HEALTH["frac_reward_zero_std"],
        "clipped_ratio": HEALTH["clipped_ratio"],
    }

    def draw(axis: Axes, column: str) -> None:
        looks = zip(
            metrics.groupby("member"), cycle(MEMBER_COLOURS), cycle("os^D"),
            strict=False,
        )  # fmt: skip
        for (member, rows), colour, mark in looks:
            style = {"color": colour, "marker": mark, "markersize": 3}
            name = f"member {member}"
            axis.plot(rows["step"], rows[column], label=name, **style)

    return panel_figure(panels, draw, legend_columns=6)


def starts_table(grid: Grid) -> Styler:
    """Where each run ran: a row for every time that it was started."""
    rows = []
    for run in grid.runs:
        starts = read_json(run.directory / "environment.json") or []
        for number, start in enumerate(starts, start=1):
            row = {"run": run.name, "start": f"{number} of {len(starts)}"}
            row["from step"] = start.get("step")
            row["at"] = start["time"][11:19]
            row["host"] = start["host"]
            row["process"] = str(start["process"])
            row["threads"] = start["threads"]
            rows.append(row)
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
    looks = zip(live.seen.items(), cycle(MEMBER_COLOURS), strict=False)
    for at, ((name, told), colour) in enumerate(looks):
        if told:
            seconds, steps = zip(*told, strict=True)
            axis.plot(
                seconds,
                steps,
                color=colour,
                marker="os^D"[at % 4],
                markersize=(9, 7, 5, 3)[at % 4],
                linewidth=(4, 3, 2, 1)[at % 4],
                label=name,
            )
    for rung in rungs:
        axis.axhline(rung, color=GREY, linestyle=":")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds since the grid was started", fontsize=9)
    axis.set_ylabel("step", fontsize=9)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
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
    free = [] if plans["cost in USD"].any() else ["cost in USD"]
    shown = plans.drop(columns=["lost workers", *free])
    kept = {name: form for name, form in formats.items() if name in shown}
    return table(shown, kept).set_caption("Simulated: nothing was trained.")
