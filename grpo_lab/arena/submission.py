"""Everything that is proved before an experiment may start."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from grpo_lab import memory, models
from grpo_lab.arena import datasets, manifest
from grpo_lab.arena.experiment import Experiment
from grpo_lab.arena.lint import Finding, lint
from grpo_lab.arena.manifest import Manifest
from grpo_lab.arena.store import Store
from grpo_lab.errors import LabError
from grpo_lab.files import readable, write_json, write_whole
from grpo_lab.prompts import (
    FORM_PROMPTS,
    REASONING_PROMPT,
    longest_prompt,
    messages,
)
from grpo_lab.settings import RunSettings
from rewards.batch import RewardError
from rewards.contract import Verdicts, check_reward, load_reward

CHECKED_ROWS = 200  # that a reward file is checked on at most

NEEDED = (
    "runs",
    "gives a number",
    "is finite",
    "rewards right answers",
)
"""The verdicts without which nothing can be learned."""


@dataclass(frozen=True)
class Checked:
    """A submission that may start.

    Attributes:
        experiment: what will be trained.
        findings, verdicts: on manifest and resources, and on the reward file.
        plan: sizes, to be shown.
        record: what the registry keeps.
        given, reward: manifest and reward file, as they were when proved.
    """

    experiment: Experiment
    findings: tuple[Finding, ...]
    verdicts: Verdicts
    plan: dict
    record: dict
    given: str
    reward: bytes

    def write(self, folder: Path) -> None:
        """Write the files that an experiment begins with."""
        self.experiment.save(folder)
        write_whole(folder / "manifest.yaml", self.given)
        (folder / "reward.py").write_bytes(self.reward)
        write_json(folder / "verdicts.json", self.verdicts.table())
        write_json(
            folder / "status.json",
            {"status": "queued", "steps": self.plan["steps of each member"]},
        )

    def differs(self, folder: Path) -> list[str]:
        """In what the experiment in a folder is another one than this."""
        found = Experiment.load(folder)
        told = [
            name
            for name in Experiment.__dataclass_fields__
            if getattr(found, name) != getattr(self.experiment, name)
        ]
        if (folder / "reward.py").read_bytes() != self.reward:
            told.append("reward file")
        return told


def check(
    store: Store,
    home: Path,
    source: Path | str | dict,
    reward_file: Path | str,
    resource: str,
    resource_id: str | None,
    num_nodes: int | None,
    project: str | None,
    completion: str | None,
    control: bool,
    force: bool,
    engine: dict,
) -> Checked:
    """Prove a submission; see `LocalArena.submit_experiment`.

    `engine`, from `experiment.chosen_engine`, is where it will train.

    Raises:
        LabError, RewardError: the first thing that would not work.
    """
    given = manifest.load(source)
    form = manifest.control(given) if control else given
    if project is None:
        raise LabError(
            "An experiment is filed under a project, and this arena has none. "
            "Make one first: create_project('my project')."
        )
    if not store.get("project", project)["llm_based"]:
        raise LabError(
            f"The project {project!r} is not for language models, and GRPO "
            "trains one. Name or make another with llm_based=True."
        )
    dataset = store.get("dataset", form.environment.name)
    folder = home / "datasets" / dataset["name"]
    datasets.check_trainable(dataset)
    path = Path(reward_file).expanduser().resolve()
    try:
        reward = path.read_bytes()
    except OSError as error:
        raise LabError(
            f"The reward file {path} can't be read: {error.strerror}. Give "
            "the path of a Python file with a function reward(question, "
            "answer, completion)."
        ) from error
    rows = datasets.load_rows(folder)
    where = readable(folder / datasets.FILE_NAME)
    verdicts = _verdicts(path, reward, form, rows, where, force)
    _try_completion(path, rows[0], completion)
    supplied = FORM_PROMPTS.get(verdicts.form, REASONING_PROMPT)
    own = form.environment.system_prompt
    prompt = own if own.strip() else supplied
    name = form.network.pretrained_model_name_or_path
    tokenizer, context = models.load_tokenizer(name)
    chats = [messages(row["question"], prompt) for row in rows]
    longest = longest_prompt(tokenizer, chats)
    limit = manifest.completion_limit(form, longest, context)
    findings = lint(given, longest, context, supplied)
    findings += _resources(resource, resource_id, num_nodes)
    settings = manifest.settings(form, limit)
    estimate = memory.estimate_memory(models.entry(name), settings, longest)
    findings += _memory(estimate, settings, engine)
    values = form.to_dict()
    local = Path(name).expanduser().resolve()
    if local.is_dir():  # whoever resumes may stand in another directory
        values["network"]["pretrained_model_name_or_path"] = str(local)
    experiment = Experiment(
        manifest=values,
        dataset=dataset,
        dataset_name=dataset["name"],
        system_prompt=prompt,
        max_completion_length=limit,
    )
    sizes = form.environment.fitness_rows, form.environment.test_rows
    datasets.splits(folder, experiment.dataset, *sizes, settings.seed, prompt)
    return Checked(
        experiment,
        tuple(findings),
        verdicts,
        _plan(form, limit, longest, estimate, len(rows)),
        {"project": project, "dataset": dataset["name"], "control": control},
        manifest.manifest_text(source),
        reward,
    )


def _verdicts(
    path: Path,
    source: bytes,
    form: Manifest,
    rows: list[dict],
    where: Path,
    force: bool,
) -> Verdicts:
    """The verdicts on a copy in an empty folder, as the experiment keeps it.

    Refused is what nothing could be learned from, unless `force` is on.
    """
    budget = form.steps * form.completions_per_step * form.training.pop_size
    # About as long as rollouts of these sizes take on a slow machine.
    limit = max(600.0, 0.05 * budget)
    with tempfile.TemporaryDirectory() as alone:
        copy = Path(alone) / path.name
        copy.write_bytes(source)
        try:
            verdicts = check_reward(
                copy, rows[:CHECKED_ROWS], rollouts=budget, limit_seconds=limit
            )
        except RewardError as error:
            text = str(error).replace(str(copy), str(readable(path)))
            raise RewardError(
                f"{text} An experiment keeps the file alone, so what it needs "
                "must be in it."
            ) from None
    bad = [verdicts[one] for one in NEEDED if verdicts[one].passed is False]
    if bad and not force:
        seen = " ".join(f"{one.name}: {one.seen}. {one.advice}" for one in bad)
        raise LabError(
            f"The reward file {path.name} would teach nothing on this data, "
            f"so nothing was submitted. {seen} See all verdicts with `python "
            f"-m rewards.contract {path.name} --data "
            f"{where}`, or submit it all the same with force=True (--force)."
        )
    return verdicts


def _try_completion(path: Path, row: dict, completion: str | None) -> None:
    if completion is None:
        return
    reward = load_reward(path)
    try:
        [score] = reward.scores(
            [completion], question=[row["question"]], answer=[row["answer"]]
        )
    finally:
        reward.close()
    if score.failure:
        raise LabError(
            f"The reward file {path.name} gives no score for your completion "
            f"{completion[:60]!r}: {score.reason}. Mend the function, or "
            "leave the completion out."
        )


def _resources(
    here: str, resource_id: str | None, num_nodes: int | None
) -> list[Finding]:
    asked, nodes = resource_id or here, 1 if num_nodes is None else num_nodes
    if asked != here and not asked.startswith("arena-"):
        raise LabError(
            f"There is no resource {asked!r}; this machine is the only one. "
            f"Type resource_id={here!r}, or leave it out."
        )
    if nodes < 1:
        raise LabError(
            f"num_nodes is {nodes}, but an experiment needs a machine. Type "
            "num_nodes=1, or leave it out."
        )
    found = []
    if asked != here:
        text = (
            f"resource_id {asked} is a machine of AgileRL's Arena; here "
            f"{here} trains instead."
        )
        found.append(Finding("warning", "resource_id", text))
    if nodes > 1:
        text = f"num_nodes {nodes} asks for others; here one trains."
        found.append(Finding("warning", "num_nodes", text))
    return found


def _memory(
    estimate: memory.MemoryEstimate, settings: RunSettings, engine: dict
) -> list[Finding]:
    """Refuse what does not fit this machine, if it is the one that trains."""
    if not engine.get("address"):
        workers = engine.get("workers") or 1
        share = memory.Share.of_gpus(engine.get("gpus") or 1 / workers)
        memory.check_fits(estimate, settings, share)
    if engine.get("engine") != "ray" and (engine.get("workers") or 1) == 1:
        return []
    text = (
        f"Each worker takes about {estimate.total:.1f} GiB of its machine, "
        "and nobody has looked whether that is there for all of them at once."
    )
    return [Finding("warning", "engine", text)]


def _plan(
    form: Manifest,
    limit: int,
    longest: int,
    estimate: memory.MemoryEstimate,
    rows: int,
) -> dict:
    held_out = form.environment.fitness_rows + form.environment.test_rows
    per_step = form.completions_per_step
    return {
        "members at a time": form.training.pop_size,
        "steps of each member": form.steps,
        "generations": form.generations,
        "completions per step and member": per_step,
        "completions in all": per_step * form.training.pop_size * form.steps,
        "questions to train on": rows - held_out,
        "questions that rank the members": form.environment.fitness_rows,
        "questions that select nothing": form.environment.test_rows,
        "tokens of the longest prompt": longest,
        "tokens a completion may have": limit,
        "memory, estimated": f"{estimate.total:.1f} GiB",
    }
