"""LocalArena: every verb of the arena, on this machine.

The nouns and verbs are those of AgileRL's Arena, so that its tutorial can be
followed step by step; nothing leaves the machine but downloads from the Hub.
What a verb does is in the module beside: data sets in `datasets`, manifests in
`manifest`, training in `population` and `job`, servers in `deployments`.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_lab.arena import experiment as experiments
from grpo_lab.arena import job
from grpo_lab.arena.deployments import Deployments
from grpo_lab.arena.experiment import ACTIVE, Experiment
from grpo_lab.arena.store import Store
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, readable, write_whole

# Libraries that take seconds to import come in where they are needed, so that
# `--help`, lists and a stop answer at once.

HOME = "runs/arena"
"""Where an arena is kept by default, below the working directory."""

HOME_VARIABLE = "GRPO_LAB_ARENA"
"""Environment variable that names another place."""

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


class LocalArena:
    """An arena below one directory.

    Args:
        home: the directory; by default that in the environment variable
            GRPO_LAB_ARENA, else runs/arena.

    Raises:
        LabError: it can't be used, or was written by a newer version.

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
        self.store = Store(self.home)
        self.deployments = Deployments(self.store, self.home)

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
            hf_dataset_name, hf_config, hf_split: a data set of the Hub; or
            file: a CSV, parquet or JSONL file.
            column_mapping: for each key of the category, its column; by
                default the columns have the names of the keys.
            exist_ok: take one of this name with the very same rows.

        Returns:
            Its record, with the counts of rows that were left out.

        Raises:
            LabError: the name is taken, or see `datasets.read`.
        """
        from grpo_lab.arena import datasets

        there = exist_ok and self.dataset_exists(name)
        if not there:
            self.store.refuse_taken("dataset", name)
        if column_mapping is None:
            column_mapping = datasets.same_names(category)
        rows, registered = datasets.read(
            category,
            column_mapping,
            file=file,
            hf_dataset_name=hf_dataset_name,
            hf_config=hf_config,
            hf_split=hf_split,
            description=description,
        )
        if there:
            found = self.store.get("dataset", name)
            if found["fingerprint"] != registered.fingerprint:
                raise LabError(
                    f"The data set {name!r} is registered with other rows, "
                    f"of {found['source']}. They are left alone. Choose "
                    "another name, or another home for the arena; in a "
                    "lesson another OUTPUT_DIR."
                )
            return found
        with self._new_folder("dataset", name) as (folder, record):
            datasets.write(rows, folder)
            record |= registered.to_dict()
        return self.store.get("dataset", name)

    def list_datasets(self, search: str | None = None) -> list[dict]:
        """The registered data sets; with `search`, those of the Hub.

        Raises:
            LabError: the Hub can't be reached.
        """
        if search is None:
            return self.store.all("dataset")
        from grpo_lab.arena import datasets

        return datasets.list_hub(search)

    def dataset_exists(self, name: str) -> bool:
        """Whether a data set of that name is registered."""
        return self.store.has("dataset", name)

    def delete_dataset(self, name: str) -> None:
        """Forget a data set and delete its copy.

        Raises:
            LabError: there is none, or an experiment was made with it.
        """
        self.store.get("dataset", name)
        users = [
            one["name"]
            for one in self.store.all("experiment")
            if one["dataset"] == name
        ]
        if users:
            raise LabError(
                f"The data set {name!r} belongs to the experiments "
                f"{', '.join(users)}, which could not go on without it. "
                "Leave it, or delete those first with delete_experiment."
            )
        self.store.delete("dataset", name)
        shutil.rmtree(self.home / "datasets" / name, ignore_errors=True)

    # --- Projects and resources ---------------------------------------------

    def create_project(
        self, name: str, description: str | None = None, llm_based: bool = True
    ) -> dict:
        """Register a project, which experiments are filed under.

        Args:
            llm_based: whether its experiments train language models; only
                such ones can be submitted here.

        Raises:
            LabError: the name is taken.
        """
        self.store.refuse_taken("project", name)
        first = not self.store.all("project")
        record = {"description": description or "", "llm_based": llm_based}
        self.store.add("project", name, record | {"default": first})
        return self.store.get("project", name)

    def list_projects(self) -> list[dict]:
        """The registered projects; one of them is the default."""
        return self.store.all("project")

    def set_default_project(self, name: str) -> None:
        """File experiments under this project where none is named.

        Raises:
            LabError: there is none.
        """
        self._make_default("project", name)

    def _make_default(self, kind: str, name: str) -> None:
        self.store.get(kind, name)
        for one in self.store.all(kind):
            self.store.update(kind, one["name"], default=one["name"] == name)

    def list_resources(self) -> list[dict]:
        """What this machine offers: one resource, and what is free of it."""
        from grpo_lab import models

        device = models.device_memory()
        return [
            {
                "id": "local-gpu" if device.is_gpu else "local-cpu",
                "device": device.name,
                "nodes": 1,
                "memory_gib": round(device.memory, 1),
                "free_disk_gib": round(
                    shutil.disk_usage(self.home).free / 2**30, 1
                ),
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
        from grpo_lab import environment

        environment.prepare()
        from grpo_lab.arena import submission

        choice = experiments.chosen_engine(engine, cluster)
        name = experiment_name or self._next_name(manifest)
        there = resume and self.experiment_exists(name)
        if not there:
            self.store.refuse_taken("experiment", name)
        before = (
            experiments.noted_engine(self._experiment(name)) if there else {}
        )
        checked = submission.check(
            self.store,
            self.home,
            manifest,
            reward_file,
            resource=self.list_resources()[0]["id"],
            resource_id=resource_id,
            num_nodes=num_nodes,
            project=project,
            completion=completion,
            control=control,
            force=force,
            engine=choice or before,
        )
        if there:
            self._go_on(name, checked, choice)
        else:
            with self._new_folder("experiment", name) as (folder, record):
                checked.write(folder)
                experiments.note_engine(folder, choice)
                record |= checked.record
            try:
                job.start(self._experiment(name))
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
                f"{', '.join(differs)}. It is left alone. Choose another "
                "name, or another home for the arena; in a lesson another "
                "OUTPUT_DIR."
            )
        if experiments.status(folder)["status"] not in (*ACTIVE, "done"):
            experiments.note_engine(folder, choice)
            job.start(folder)

    def _next_name(self, source: Path | str | dict) -> str:
        from grpo_lab.arena import manifest

        stem = manifest.load(source).environment.name
        self.store.get("dataset", stem)
        taken = {one["name"] for one in self.store.all("experiment")}
        return next(
            name
            for name in (f"{stem}-v{number}" for number in range(1, 10_000))
            if name not in taken
        )

    def list_experiments(self) -> list[dict]:
        """Every experiment and how it stands, the oldest first."""
        return [
            one | experiments.status(self.home / "experiments" / one["name"])
            for one in self.store.all("experiment")
        ]

    def experiment_status(self, experiment_name: str) -> dict:
        """How an experiment stands; see `experiment.status`.

        Raises:
            LabError: there is none of that name.
        """
        return experiments.status(self._experiment(experiment_name))

    def watch_experiment(
        self, experiment_name: str, seconds: float = 1.0
    ) -> Iterator[dict]:
        """Follow an experiment until its job has ended.

        Args:
            seconds: between two looks.

        Returns:
            Yields how it stands whenever that has changed, at last the end.
        """
        shown = None
        while True:
            now = self.experiment_status(experiment_name)
            seen = {k: v for k, v in now.items() if k != "heartbeat"}
            if seen != shown:
                yield now
                shown = seen
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

        Raises:
            LabError: its job does not run.
        """
        folder = self._experiment(experiment_name)
        now = experiments.status(folder)
        if now["status"] not in ACTIVE:
            raise LabError(
                f"The experiment {experiment_name!r} is {now['status']}, so "
                "there is no job to stop. list_experiments shows all."
            )
        (folder / "stop").touch()
        deadline = time.monotonic() + seconds
        while experiments.is_alive(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        if experiments.is_alive(folder):
            _end(experiments.status(folder).get("pid"))
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

        Raises:
            LabError: it runs already, is done, or would get shorter.
        """
        choice = experiments.chosen_engine(engine, cluster)
        folder = self._experiment(experiment_name)
        now = experiments.status(folder)
        if now["status"] in ACTIVE:
            raise LabError(
                f"The experiment {experiment_name!r} is {now['status']} "
                "already. Wait for it, or stop it first with "
                "stop_experiment."
            )
        if max_steps is not None:
            self._prolong(folder, max_steps)
        elif now["status"] == "done":
            raise LabError(
                f"The experiment {experiment_name!r} is done. To train it "
                "further give more completions than it has had, such as "
                f"max_steps={2 * self._budget(folder)}."
            )
        experiments.note_engine(folder, choice)
        job.start(folder)
        return experiments.status(folder)

    def _budget(self, folder: Path) -> int:
        return Experiment.load(folder).manifest["training"]["max_steps"]

    def _prolong(self, folder: Path, max_steps: int) -> None:
        from dataclasses import replace

        from grpo_lab.arena import manifest, records

        found = Experiment.load(folder)
        before = manifest.load(found.manifest)
        done = max(records.metrics(folder)["step"], default=0)
        values = found.manifest | {
            "training": found.manifest["training"] | {"max_steps": max_steps}
        }
        after = manifest.load(values)
        manifest.settings(after, found.max_completion_length)
        least = done + (experiments.status(folder)["status"] == "done")
        if after.steps < max(least, 1):
            raise LabError(
                f"max_steps={max_steps} gives {after.steps} optimiser steps "
                f"for each member, and {done} are made. Type max_steps="
                f"{max_steps_of(before, max(least, 1))} or more; max_steps "
                "counts the completions of the whole population."
            )
        replace(found, manifest=values).save(folder)
        (folder / "result.json").unlink(missing_ok=True)

    def delete_experiment(self, experiment_name: str) -> None:
        """Delete an experiment with all that it has learned.

        Raises:
            LabError: there is none, it runs, or it is deployed.
        """
        self.store.get("experiment", experiment_name)
        folder = self.home / "experiments" / experiment_name
        if experiments.status(folder)["status"] in ACTIVE:
            raise LabError(
                f"The experiment {experiment_name!r} runs. Stop it first "
                "with stop_experiment."
            )
        if self.store.has("deployment", experiment_name):
            raise LabError(
                f"The experiment {experiment_name!r} is deployed. Delete the "
                "deployment first with delete_deployment."
            )
        self.store.delete("experiment", experiment_name)
        shutil.rmtree(folder, ignore_errors=True)

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

        Raises:
            LabError: there is no such experiment, or the file is another's.
        """
        frame = self.experiment_metrics(experiment_name)
        path = Path(output_path or self._experiment(experiment_name))
        if path.is_dir():
            path = path / "metrics.csv"
        header = ",".join(frame.columns)
        if path.exists():
            with path.open(errors="replace") as file:
                if file.readline().strip() != header:
                    raise LabError(
                        f"{path} is there already and is no file of metrics, "
                        "so it is left as it is. Give another output_path."
                    )
        write_whole(path, frame.to_csv(index=False))
        return path

    def experiment_lineage(self, experiment_name: str):
        """Who descends from whom, as a frame; see `records.lineage`."""
        from grpo_lab.arena import records

        return records.lineage(self._experiment(experiment_name))

    def experiment_result(self, experiment_name: str) -> dict:
        """What `result.json` says of base and best on the test questions.

        Raises:
            LabError: the experiment is not done.
        """
        found = read_json(self._experiment(experiment_name) / "result.json")
        if found is None:
            raise LabError(
                f"The experiment {experiment_name!r} has no result yet: it "
                f"is {self.experiment_status(experiment_name)['status']}. "
                "Wait for it, or resume it with resume_experiment."
            )
        return found

    def experiment_answers(self, experiment_name: str):
        """The answers of base and best to the questions that select nothing.

        Returns:
            Two `evaluation.Evaluation`, the base model's first.

        Raises:
            LabError: the experiment is not done.
        """
        from grpo_lab.evaluation import Evaluation

        self.experiment_result(experiment_name)
        folder = self._experiment(experiment_name) / "test"
        return tuple(
            Evaluation.load(folder / f"{name}.json")
            for name in ("base", "best")
        )

    def list_checkpoints(self, experiment_name: str) -> list[dict]:
        """The checkpoints, the best first; see `records.checkpoints`."""
        from grpo_lab.arena import records

        return records.checkpoints(self._experiment(experiment_name))

    # --- Deployments --------------------------------------------------------

    def deploy_agent(
        self,
        experiment_name: str,
        checkpoint: str | None = None,
        port: int | None = None,
    ) -> dict:
        """Merge a checkpoint into 16-bit weights and serve them here.

        Args:
            experiment_name: also the name of the deployment; one that is
                there is replaced.
            checkpoint: a name of `list_checkpoints`; by default the best.
            port: on this machine only; by default a free one.

        Returns:
            The deployment; see `list_inference_deployments`.

        Raises:
            LabError: there are no checkpoints, the port is in use, or the
                server does not start.
        """
        from grpo_lab import environment

        environment.prepare()
        folder = self._experiment(experiment_name)
        chosen = self._checkpoint(experiment_name, checkpoint)
        return self.deployments.deploy(experiment_name, folder, chosen, port)

    def _checkpoint(self, experiment_name: str, name: str | None) -> str:
        every = [one["name"] for one in self.list_checkpoints(experiment_name)]
        if not every:
            state = self.experiment_status(experiment_name)["status"]
            raise LabError(
                f"The experiment {experiment_name!r} has no checkpoints, so "
                f"there is nothing to deploy: it is {state}, and the first "
                "checkpoint is written when the first generation has been "
                "measured. Wait for it, or resume it with resume_experiment."
            )
        if name is not None and name not in every:
            raise LabError(
                f"The experiment {experiment_name!r} has no checkpoint "
                f"{name!r}; it has {', '.join(every)}, the best first. Type "
                "one of those, or leave the checkpoint out to deploy the "
                "best."
            )
        return name or every[0]

    def list_inference_deployments(self) -> list[dict]:
        """The deployments: `name`, `checkpoint`, `status`, `url`, `pid`.

        `status` is "serving", or "down" where the server was stopped or
        killed; `open_inference_agent` starts it again.
        """
        return self.deployments.all()

    def open_inference_agent(
        self, deployment_name: str, max_new_tokens: int | None = None
    ):
        """An agent that asks a deployment; starts its server if it is down.

        Args:
            deployment_name: see `list_inference_deployments`.
            max_new_tokens: tokens that an answer may have, 512 by default.

        Returns:
            A `serving.Agent`, to be used in a `with` block.

        Raises:
            LabError: there is no such deployment, or it can't be started.
        """
        from grpo_lab.arena import serving

        server = self.deployments.running(deployment_name)
        found = Experiment.load(self._experiment(deployment_name))
        return serving.Agent(
            server.url,
            str(server.folder),
            found.system_prompt,
            context=found.manifest["network"]["max_context_length"],
            max_new_tokens=(
                serving.MAX_NEW_TOKENS
                if max_new_tokens is None
                else max_new_tokens
            ),
        )

    def stop_deployment(self, deployment_name: str) -> None:
        """Stop a deployment's server; its weights stay.

        Raises:
            LabError: there is no such deployment.
        """
        self.deployments.stop(deployment_name)

    def delete_deployment(self, deployment_name: str) -> None:
        """Stop a deployment and delete its merged weights.

        Raises:
            LabError: there is no such deployment.
        """
        self.deployments.delete(deployment_name)

    def set_default_agent(self, deployment_name: str) -> None:
        """The deployment that `generate` asks where none is named."""
        self._make_default("deployment", deployment_name)

    # --- Folders ------------------------------------------------------------

    def _experiment(self, name: str) -> Path:
        self.store.get("experiment", name)
        folder = self.home / "experiments" / name
        if not folder.is_dir():
            raise LabError(
                f"The files of the experiment {name!r} should be in "
                f"{readable(folder)}, "
                "but somebody moved or deleted them. Put them back, or "
                "submit the experiment again under another name."
            )
        return folder

    @contextlib.contextmanager
    def _new_folder(self, kind: str, name: str) -> Iterator[tuple[Path, dict]]:
        """A folder and a record that appear together, or not at all."""
        parent = self.home / f"{kind}s"
        part, folder = parent / f".{name}.{os.getpid()}.part", parent / name
        record: dict = {}
        added = False
        if folder.exists():
            raise LabError(
                f"{readable(folder)} is there already, although no {kind} "
                f"{name!r} is registered, and nothing is written over it. "
                "Choose another name, or move that folder away."
            )
        try:
            part.mkdir(parents=True)
            yield part, record
            # Else two that register one name at once would both succeed.
            self.store.add(kind, name, record)
            added = True
            part.rename(folder)
        except OSError as error:
            if added:
                self.store.delete(kind, name)
            raise LabError(
                f"The {kind} {name!r} could not be written below {parent}: "
                f"{error.strerror or error}. Free some space, or choose "
                "another home for the arena; nothing was registered."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def max_steps_of(form, steps: int) -> int:
    """Completions of a population in so many optimiser steps a member."""
    return steps * form.completions_per_step * form.training.pop_size


def _end(pid: int | None) -> None:
    """End a job that does not stop by itself, and what it started."""
    if pid is None:
        return  # psutil would take that for this very process
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=10)
        for one in alive:
            one.kill()
