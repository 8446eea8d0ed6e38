"""The directory of a grid that never ran, with what a test wants in it."""

from collections.abc import Sequence
from pathlib import Path

from grpo_lab.evaluation import Answer, Evaluation
from grpo_lab.files import write_json
from grpo_lab.grid.state import RunState
from grpo_lab.profiles import RunSettings


def graded(pattern: str, format_ok: str = "") -> Evaluation:
    """An evaluation from a pattern such as "+-+", right and wrong."""
    return Evaluation(
        tuple(
            Answer(
                question=f"question {at}",
                gold="#### 1",
                text="",
                correct=sign == "+",
                format_ok=(format_ok or pattern)[at] == "+",
                tokens=10,
                truncated=False,
            )
            for at, sign in enumerate(pattern)
        ),
        seconds=1.0,
    )


def written(
    place: Path,
    rate: float,
    base: Evaluation,
    after: Evaluation,
    metrics: Sequence[str] = ("1,1,0,0",),
    model: str = "pocket-qwen",
    name: str = "",
) -> Path:
    """The directory of a finished run; a row of metrics is four numbers,
    and a fifth if some completions could not be graded."""
    settings = RunSettings(model, rate)
    directory = place / "runs" / (name or f"run_{rate:g}")
    record = {"settings": settings.to_dict(), "weights": model}
    record["grid"] = {"train_rows": 100}
    write_json(directory / "settings.json", record)
    base.save(RunState(directory).base)
    after.save(directory / "evaluation.json")
    write_json(directory / "result.json", {"status": "done"})
    columns = ["step", "seconds", "memory_gib", "clipped_ratio"]
    columns += ["frac_reward_zero_std", "failed_share"]
    lines = [",".join(columns)]
    lines += [f"{at},{row}" for at, row in enumerate(metrics, start=1)]
    (directory / "metrics.csv").write_text("\n".join(lines) + "\n")
    return directory
