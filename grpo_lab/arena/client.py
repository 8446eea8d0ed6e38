"""LocalArena: every verb of the arena, on this machine.

The nouns and verbs are those of AgileRL's Arena, so that its tutorial can be
followed step by step; nothing leaves the machine but downloads from the Hub.
What a verb does is in the module beside: data sets in `datasets`, manifests in
`manifest`, training in `population` and `job`, servers in `deployments`.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_lab import processes
from grpo_lab.arena import experiment as experiments
from grpo_lab.arena import job
from grpo_lab.arena.deployments import Deployments
from grpo_lab.arena.experiment import ACTIVE, Experiment
from grpo_lab.arena.store import Store
from grpo_lab.environment import prepare
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_whole

# Libraries that take seconds to import come in where they are needed, so that
# `--help`, lists and a stop answer at once.

HOME = "runs/arena"
"""Where an arena is kept by default, below the working directory."""

HOME_VARIABLE = "GRPO_LAB_ARENA"
"""Environment variable that names another place."""

ELSEWHERE = (
    "Choose another name, or another home for the arena; in a lesson another "
    "OUTPUT_DIR."
)

STOP_SECONDS = 120.0
"""How long a job may take to finish its step before it is ended."""


@dataclass(frozen=True)
class Submitted:
    """What a submission found and decided.

    Attributes:
        name: the experiment's.
        findings: of the manifest's lint: warnings and notes.
        verdicts: of the reward file; see `rewards.contract`.
        system_prompt: what every policy of it is told.
        plan: sizes in words, as a dict to be shown.
    """

    name: str
    findings: tuple
    verdicts: object
    system_prompt: str
    plan: dict


class LocalArena(Deployments):
    """An arena below one directory; see `Deployments` for what is served.

    Every verb raises LabError where something is missing or in the way.

    Args:
        home: the directory; by default that in the environment variable
            GRPO_LAB_ARENA, else runs/arena.

    Example:
        arena = LocalArena()
        arena.create_dataset(
            "gsm8k", "reasoning", hf_dataset_name="openai/gsm8k",
            hf_config="main", hf_split="train",
            column_mapping={"question": "question", "answer": "answer"},
        )
        arena.create_project("GSM8K Tutorial", None, llm_based=True)
        arena.submit_experiment(
            "gsm8k_grpo.yaml", reward_file="reward.py",
            project="GSM8K Tutorial", experiment_name="gsm8k-grpo-v1",
        )
        arena.deploy_agent("gsm8k-grpo-v1")
        with arena.open_inference_agent("gsm8k-grpo-v1") as agent:
            print(agent.generate("What is 3 + 4?").results[0].completion)
    """

    def __init__(self, home: Path | str | None = None) -> None:
        chosen = home or os.environ.get(HOME_VARIABLE) or HOME
        self.home = Path(chosen).expanduser().resolve()
        super().__init__(Store(self.home))

    def __enter__(self) -> "LocalArena":
        """The arena itself; there is nothing to close."""
        return self

    def __exit__(self, *error: object) -> None:
        """Jobs and deployments go on."""

    # --- Data sets ----------------------------------------------------------

    def create_dataset(
        self,
        name: str,
        category: str,
        hf_dataset_name: str | None = None,
        hf_config: str | None = None,
        hf_split: str | None = None,
        column_mapping: Mapping[str, str] | str | None = None,
        file: Path | str | None = None,
        description: str = "",
        exist_ok: bool = False,
    ) -> dict:
        """Register a data set; its usable rows are copied into the arena.

        Args:
            name: new in this arena; a manifest names it as its environment.
            category: "reasoning", "preference" or "sft".
            hf_dataset_name: a data set of the Hub, in place of a file.
            hf_config: its configuration.
            hf_split: its split; by default train.
            column_mapping: for each key of the category, its column, as JSON
                or a dict; by default the columns have the names of the keys.
            file: a CSV, parquet or JSONL file.
            description: your own words.
            exist_ok: take one of this name with the very same rows.

        Returns:
            Its record, with the counts of rows that were left out.
        """
        there = exist_ok and self.dataset_exists(name)
        if not there:
            self.store.refuse_taken("dataset", name)
        prepare()
        from grpo_lab.arena import datasets

        rows, registered = datasets.read(
            category,
            column_mapping,
            file=file,
            hf_dataset_name=hf_dataset_name,
            hf_config=hf_config,
            hf_split=hf_split,
            description=description,
        )
        if not there:
            with self.store.new("dataset", name) as (folder, record):
                datasets.write(rows, folder)
                record |= registered
        found = self.store.get("dataset", name)
        if found["fingerprint"] != registered["fingerprint"]:
            raise LabError(
                f"The data set {name!r} is registered with other rows, of "
                f"{found['source']}. They are left alone. {ELSEWHERE}"
            )
        return found

    def list_datasets(self, search: str | None = None) -> list[dict]:
        """The registered data sets; with `search`, those of the Hub.

        Args:
            search: words of the names on the Hub.
        """
        if search is None:
            return self.store.all("dataset")
        prepare()
        from grpo_lab.arena import datasets

        return datasets.list_hub(search)

    def dataset_exists(self, name: str) -> bool:
        """Whether a data set of that name is registered."""
        return self.store.has("dataset", name)

    def delete_dataset(self, name: str) -> None:
        """Delete a data set, unless an experiment was made with it."""
        self.store.get("dataset", name)
        every = self.store.all("experiment")
        users = [one["name"] for one in every if one["dataset"] == name]
        if users:
            raise LabError(
                f"The data set {name!r} belongs to the experiments "
                f"{', '.join(users)}, which could not go on without it. "
                "Leave it, or delete those first with delete_experiment."
            )
        self.store.delete("dataset", name)

    # --- Projects and resources ---------------------------------------------

    def create_project(
        self, name: str, description: str | None = None, llm_based: bool = True
    ) -> dict:
        """Register a project, which experiments are filed under.

        Args:
            name: new in this arena.
            description: your own words.
            llm_based: whether its experiments train language models; only
                such ones can be submitted here.
        """
        self.store.refuse_taken("project", name)
        with self.store.new("project", name) as (_, record):
            record["description"] = description or ""
            record["llm_based"] = llm_based
        return self.store.get("project", name)

    def list_projects(self) -> list[dict]:
        """The registered projects; one of them is the default."""
        every = self.store.all("project")
        default = self.default_project()
        return [one | {"default": one["name"] == default} for one in every]

    def default_project(self) -> str | None:
        """The project that was made the default, or else the oldest."""
        names = [one["name"] for one in self.store.all("project")]
        return self.store.default("project") or next(iter(names), None)

    def set_default_project(self, name: str) -> None:
        """File experiments under this project where none is named."""
        self.store.set_default("project", name)

    def list_resources(self) -> list[dict]:
        """What this machine offers: one resource, and what is free of it."""
        prepare()
        from grpo_lab import memory

        device = memory.device_memory()
        free = shutil.disk_usage(self.home).free
        return [
            {
                "id": "local-gpu" if device.is_gpu else "local-cpu",
                "device": device.name,
                "nodes": 1,
                "memory_gib": round(device.memory, 1),
                "free_disk_gib": round(free / 2**30, 1),
            }
        ]

    # --- Experiments --------------------------------------------------------

    def submit_experiment(
        self,
        manifest: Path | str | dict,
        reward_file: Path | str,
        resource_id: str | None = None,
        num_nodes: int | None = None,
        project: str | None = None,
        experiment_name: str | None = None,
        completion: str | None = None,
        control: bool = False,
        force: bool = False,
        resume: bool = False,
        engine: str | None = None,
        **cluster: object,
    ) -> Submitted:
        """Check a manifest and a reward file, and start their training.

        Args:
            manifest: path of a YAML file, YAML text, or a dict.
            reward_file: a file with `reward(question, answer, completion)`.
            resource_id: one of `list_resources`; by default that one.
            num_nodes: this machine is 1.
            project: a registered one; by default the default project.
            experiment_name: new in this arena; by default the name of the
                data set and a number.
            completion: a completion that the reward must be able to score.
            control: the same budget without evolution: one policy, which
                gets the completions of the whole population.
            force: submit although the reward file was found wanting.
            resume: where the very same experiment is there already, go on
                with it instead of refusing its name.
            engine: "process" for one member after the other in one process,
                which is the default; "ray" for members in parallel on the
                workers of a Ray cluster. No result depends on it.
            cluster: for the engine "ray" the values of
                `grpo_lab.grid.cluster.Cluster`: `address`, and for each
                worker `cpus`, `gpus` and `retries`.

        Raises:
            LabError: something would not work; nothing is registered then.
            RewardError: the reward file can't be used at all.
        """
        prepare()
        from grpo_lab.arena import submission

        choice = experiments.chosen_engine(engine, cluster)
        name = experiment_name or self._next_name(manifest)
        folder = self.store.folder("experiment", name)
        there = resume and self.experiment_exists(name)
        if not there:
            self.store.refuse_taken("experiment", name)
        checked = submission.check(
            self.store,
            self.home,
            manifest,
            reward_file,
            resource=self.list_resources()[0]["id"],
            resource_id=resource_id,
            num_nodes=num_nodes,
            project=project or self.default_project(),
            completion=completion,
            control=control,
            force=force,
            engine=choice
            or (experiments.noted_engine(folder) if there else {}),
        )
        if there:
            self._go_on(name, checked, choice)
        else:
            with self.store.new("experiment", name) as (part, record):
                checked.write(part)
                experiments.note_engine(part, choice)
                record |= checked.record
            try:
                job.start(folder)
            except LabError:
                self.delete_experiment(name)
                raise
        return Submitted(
            name,
            checked.findings,
            checked.verdicts,
            checked.experiment.system_prompt,
            checked.plan,
        )

    def experiment_exists(self, experiment_name: str) -> bool:
        """Whether an experiment of that name is registered."""
        return self.store.has("experiment", experiment_name)

    def _go_on(self, name: str, checked, choice: dict | None) -> None:
        """Resume an experiment if it is the one that was just checked."""
        folder = self._experiment(name)
        differs = checked.differs(folder)
        if differs:
            raise LabError(
                f"There is another experiment {name!r}: it differs in "
                f"{', '.join(differs)}. It is left alone. {ELSEWHERE}"
            )
        if experiments.status(folder)["status"] not in (*ACTIVE, "done"):
            experiments.note_engine(folder, choice)
            job.start(folder)

    def _next_name(self, source: Path | str | dict) -> str:
        from grpo_lab.arena import manifest

        stem = manifest.load(source).environment.name
        self.store.get("dataset", stem)
        number = 1
        while self.store.folder("experiment", f"{stem}-v{number}").exists():
            number += 1
        return f"{stem}-v{number}"

    def list_experiments(self) -> list[dict]:
        """Every experiment and how it stands, the oldest first."""
        return [
            one
            | experiments.status(self.store.folder("experiment", one["name"]))
            for one in self.store.all("experiment")
        ]

    def experiment_status(self, experiment_name: str) -> dict:
        """How an experiment stands; see `experiment.status`."""
        return experiments.status(self._experiment(experiment_name))

    def watch_experiment(
        self, experiment_name: str, seconds: float = 1.0
    ) -> Iterator[dict]:
        """Follow an experiment until its job has ended.

        Args:
            seconds: between two looks.

        Yields:
            How it stands, whenever that has changed; at last the end.
        """
        shown = None
        while True:
            now = self.experiment_status(experiment_name)
            if now != shown:
                yield now
                shown = now
            if now["status"] not in ACTIVE:
                return
            time.sleep(seconds)

    def wait_for_experiment(self, experiment_name: str) -> dict:
        """How an experiment stands when its job has ended."""
        *_, last = self.watch_experiment(experiment_name)
        return last

    def stop_experiment(
        self, experiment_name: str, seconds: float = STOP_SECONDS
    ) -> dict:
        """Stop a job after its current step; it can be resumed.

        Args:
            seconds: how long that step may take before the job is ended,
                which costs the step.
        """
        folder = self._experiment(experiment_name)
        now = experiments.status(folder)
        if now["status"] not in ACTIVE:
            raise _stands(folder, "there is no job to stop.")
        (folder / "stop").touch()
        deadline = time.monotonic() + seconds
        while experiments.is_alive(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        if experiments.is_alive(folder):
            processes.end_tree(experiments.status(folder).get("pid"))
            job.Status(folder).tell(
                status="stopped",
                reason=f"ended, since its step took more than {seconds:g} s",
            )
        return experiments.status(folder)

    def resume_experiment(
        self,
        experiment_name: str,
        max_steps: int | None = None,
        engine: str | None = None,
        **cluster: object,
    ) -> dict:
        """Go on with an experiment that was stopped, killed, or is done.

        Args:
            max_steps: completions of the whole population from its start, in
                place of the manifest's; more than so far.
            engine, cluster: as for `submit_experiment`; by default those
                that it had.
        """
        choice = experiments.chosen_engine(engine, cluster)
        folder = self._experiment(experiment_name)
        now = experiments.status(folder)
        if now["status"] in ACTIVE:
            raise _stands(folder, "wait, or stop it first: stop_experiment.")
        if max_steps is not None:
            _prolong(folder, max_steps)
        elif now["status"] == "done":
            before = Experiment.load(folder).manifest["training"]["max_steps"]
            more = f"give it more completions: max_steps={2 * before}."
            raise _stands(folder, more)
        experiments.note_engine(folder, choice)
        job.start(folder)
        return experiments.status(folder)

    def delete_experiment(self, experiment_name: str) -> None:
        """Delete an experiment that neither runs nor is deployed."""
        folder = self._experiment(experiment_name)
        if experiments.status(folder)["status"] in ACTIVE:
            raise _stands(folder, "stop it first with stop_experiment.")
        if self.store.has("deployment", experiment_name):
            deployed = "it is deployed; delete that first: delete_deployment."
            raise _stands(folder, deployed)
        self.store.delete("experiment", experiment_name)

    # --- What came of it ----------------------------------------------------

    def experiment_metrics(self, experiment_name: str):
        """All optimiser steps so far as a frame; see `records.metrics`."""
        from grpo_lab.arena import records

        return records.metrics(self._experiment(experiment_name))

    def download_experiment_metrics(
        self, experiment_name: str, output_path: Path | str | None = None
    ) -> Path:
        """Write the metrics so far as CSV, also while the job runs.

        Args:
            output_path: a file or a folder; by default metrics.csv in the
                experiment's own directory. An older file of metrics is
                replaced, any other is not.

        Returns:
            The path of the file; its columns are `records.COLUMNS`.
        """
        frame = self.experiment_metrics(experiment_name)
        path = Path(output_path or self._experiment(experiment_name))
        if path.is_dir():
            path = path / "metrics.csv"
        text = frame.to_csv(index=False)
        if path.exists():
            with path.open(errors="replace") as file:
                if file.readline().strip() != text.partition("\n")[0]:
                    raise LabError(
                        f"{path} is there already and is no file of metrics, "
                        "so it is left as it is. Give another output_path."
                    )
        write_whole(path, text)
        return path

    def experiment_lineage(self, experiment_name: str):
        """Who descends from whom, and how good it was.

        Returns:
            A frame, see `records.lineage`.
        """
        from grpo_lab.arena import records

        return records.lineage(self._experiment(experiment_name))

    def experiment_result(self, experiment_name: str) -> dict:
        """What `result.json` says of base and best on the test questions."""
        folder = self._experiment(experiment_name)
        found = read_json(folder / "result.json")
        if found is None:
            raise _stands(folder, "no result yet; wait, or resume_experiment.")
        return found

    def experiment_answers(self, experiment_name: str) -> tuple:
        """The answers of base and best to the questions that select nothing.

        Returns:
            Two `evaluation.Evaluation`, the base model's first.
        """
        from grpo_lab.evaluation import Evaluation

        self.experiment_result(experiment_name)
        folder = self._experiment(experiment_name) / "test"
        return tuple(
            Evaluation.load(folder / f"{name}.json")
            for name in ("base", "best")
        )

    def list_checkpoints(self, experiment_name: str) -> list[dict]:
        """The checkpoints, the best first.

        Returns:
            See `records.checkpoints`.
        """
        from grpo_lab.arena import records

        return records.checkpoints(self._experiment(experiment_name))


def _stands(folder: Path, advice: str) -> LabError:
    state = experiments.status(folder)["status"]
    return LabError(f"The experiment {folder.name!r} is {state}: {advice}")


def _prolong(folder: Path, max_steps: int) -> None:
    """Give an experiment more completions than it has had."""
    from grpo_lab.arena import manifest, records

    found = Experiment.load(folder)
    before = manifest.load(found.manifest)
    training = found.manifest["training"] | {"max_steps": max_steps}
    values = found.manifest | {"training": training}
    after = manifest.load(values)
    manifest.settings(after, found.max_completion_length)
    done = max(records.metrics(folder)["step"], default=0)
    # What is done would otherwise be done again at once.
    least = max(done + (experiments.status(folder)["status"] == "done"), 1)
    if after.steps < least:
        each = before.completions_per_step * before.training.pop_size
        raise LabError(
            f"max_steps={max_steps} gives {after.steps} optimiser steps "
            f"for each member, and {done} are made. Type max_steps="
            f"{least * each} or more; max_steps counts the completions of the "
            "whole population."
        )
    dataclasses.replace(found, manifest=values).save(folder)
    (folder / "result.json").unlink(missing_ok=True)
