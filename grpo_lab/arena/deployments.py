"""Which policies are served, from the merged weights to the process.

    deployments/
      NAME/record.json    the checkpoint, the server, how well it was merged
      NAME/step_10/       merged weights, which a server reads
      NAME/server.log     what the server printed
      .NAME.lock          held while a server is started or stopped

A deployment is named after its experiment and keeps one checkpoint. Its server
is a process that outlives the notebook; whoever comes later finds it by the
record, or starts it again. Only what merges and asks needs the training
libraries, so that a list or a stop answers at once.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import httpx
import psutil

from grpo_lab import processes
from grpo_lab.arena import experiment as experiments
from grpo_lab.arena.store import Store
from grpo_lab.environment import prepare
from grpo_lab.errors import LabError
from grpo_lab.files import last_line, read_json
from grpo_lab.prompts import TEMPLATE_VALUES, messages

AGREEMENT_ROWS = 50
"""Held-out questions that merged weights are compared with an adapter on."""

START_SECONDS = 180.0
"""How long a server may take until its first answer."""

HEALTH_SECONDS = 2.0
"""How long a server may take to say that it is well."""

AGAIN = (
    "Deploy the agent again: in Python arena.deploy_agent(...), in a terminal "
    "`python -m grpo_lab.arena agent deploy ...`."
)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Idle threads of one server would keep the cores from all others.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What a server's process is given beside the environment of this one."""


# --- Servers ----------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server that was started, whether or not it still runs.

    Attributes:
        pid: its process.
        port: where it listens, on this machine only.
        folder: the merged model that it serves.
        started: when its process began, in seconds since 1970; tells it from
            another process that was given the same number later.
    """

    pid: int
    port: int
    folder: str
    started: float

    @property
    def url(self) -> str:
        """Address for clients of the OpenAI interface."""
        return f"http://{processes.HOST}:{self.port}/v1"

    @property
    def runs(self) -> bool:
        """Whether its process does."""
        return bool(processes.tree(self.pid, self.started))

    def healthy(self) -> bool:
        """Whether it runs, listens, and says within 2 s that it is well.

        Another server on its port may be well too, so that it has to be this
        one that listens.
        """
        family = processes.tree(self.pid, self.started)
        if not processes.listens(family, self.port):
            return False
        try:
            health = self.url.removesuffix("/v1") + "/health"
            return _http("GET", health, HEALTH_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, patience: float = processes.PATIENCE) -> None:
        """End it and all that it started; nothing happens if it is gone."""
        processes.end_tree(self.pid, patience, self.started)


def _http(verb: str, url: str, seconds: float, **values) -> httpx.Response:
    # Not through a proxy, whatever the environment says.
    with httpx.Client(trust_env=False, timeout=seconds) as client:
        return client.request(verb, url, **values)


def refuse_port_in_use(port: int | None) -> None:
    """Refuse a port before anything is done for a server on it."""
    if port is not None and not processes.is_free(port):
        raise LabError(
            f"Port {port} of this machine is in use or not allowed, so no "
            "server can listen there. Leave the port out and a free one is "
            f"found, or choose another, such as {processes.free_port()}."
        )


def start(
    folder: Path,
    log: Path,
    port: int | None = None,
    seconds: float = START_SECONDS,
    began: Callable[[Server], None] = lambda server: None,
) -> Server:
    """Serve a merged model on this machine, and wait until it answers.

    vLLM does it where there are a GPU and the command `vllm`, else
    transformers. The server belongs to no terminal and no notebook: it runs
    until `stop`, or until the machine is switched off.

    Args:
        folder: what `serving.merge` wrote.
        log: file for what the server prints; overwritten.
        port: 1 to 65535, or None for a free one.
        seconds: how long it may take until the first answer.
        began: called as soon as there is a process, so that it can be found
            again if this one is killed before the first answer.

    Raises:
        LabError: there is no model in the folder, the port is in use, or the
            server ended or took too long; nothing is left running then.
    """
    folder = Path(folder).resolve()
    check_model(folder)
    refuse_port_in_use(port)
    port = port or processes.free_port()
    child = processes.start(command(folder, port), log, ENVIRONMENT)
    created = psutil.Process(child.pid).create_time()
    server = Server(child.pid, port, str(folder), created)
    try:
        began(server)
        if fault := _wait(server, seconds):
            raise LabError(
                f"The server for {folder} {fault}. Its log, {log}, ends in: "
                f"{last_line(log)[-300:] or '(nothing).'} Put right what that "
                "names; if nothing does, close other programs, for the "
                "machine may be busy or the model too large. Then deploy the "
                "agent again."
            )
    except BaseException:  # Ctrl-C as well
        server.stop()
        raise
    return server


def check_model(folder: Path) -> None:
    """Refuse a folder without merged weights."""
    if not (Path(folder) / "config.json").is_file():
        raise LabError(
            f"{folder} holds no merged model (config.json is missing), so "
            f"nothing can be served or asked there. {AGAIN}"
        )


def command(folder: Path, port: int) -> list[str]:
    """What to type to serve a folder on a port."""
    import torch

    from grpo_lab.models import compute_dtype

    vllm = shutil.which("vllm") if torch.cuda.is_available() else None
    # -P: else a file of the working directory, such as a `datasets.py`,
    # would stand in for the library of that name.
    module = [sys.executable, "-P", "-m", "transformers.cli.transformers"]
    return [
        *([vllm] if vllm else module),
        "serve",
        str(folder),
        *("--host", processes.HOST, "--port", str(port)),
        # On a CPU 32 bit takes less than half the time of 16.
        *("--dtype", str(compute_dtype()).removeprefix("torch.")),
    ]


def _wait(server: Server, seconds: float) -> str:
    """Wait until a server's model has answered; what went wrong, or ""."""
    end = time.monotonic() + seconds
    while not server.healthy():
        if not server.runs:
            return "ended before its first answer"
        if time.monotonic() > end:
            return f"was silent for {seconds:g} s"
        time.sleep(0.1)
    question = {
        "model": server.folder,
        "messages": messages("How many?", "Say a number."),
        "max_tokens": 1,
        "temperature": 0,
        "chat_template_kwargs": TEMPLATE_VALUES,
    }
    url = f"{server.url}/chat/completions"
    try:
        left = max(1, end - time.monotonic())
        _http("POST", url, left, json=question).raise_for_status()
    except httpx.TimeoutException:
        return f"gave no answer within {seconds:g} s"
    except httpx.HTTPError:
        return "failed at its first answer"
    return ""


# --- Deployments ------------------------------------------------------------


class Deployments:
    """The verbs of an arena that are about deployments.

    Args:
        store: the arena's registry.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def deploy_agent(
        self,
        experiment_name: str,
        checkpoint: str | None = None,
        port: int | None = None,
    ) -> dict:
        """Merge a checkpoint into 16-bit weights and serve them here.

        A deployment that is there goes on until the new weights are ready;
        on a GPU it is stopped before, since there would be no room.

        Args:
            experiment_name: also the name of the deployment; one that is
                there is replaced.
            checkpoint: a name of `list_checkpoints`; by default the best.
            port: on this machine only; by default a free one.

        Returns:
            The deployment; see `list_inference_deployments`.
        """
        name, experiment = experiment_name, self._experiment(experiment_name)
        chosen = _checkpoint(experiment, checkpoint)
        prepare()
        import torch

        with self._holding(name):
            before = self._server(name)
            if before is None or before.port != port:
                refuse_port_in_use(port)
            if before is not None and torch.cuda.is_available():
                before.stop()
            agreement = self._merge(name, experiment, chosen)
            if before is not None:
                before.stop()
            values = {"checkpoint": chosen, "agreement": agreement}
            self.store.put("deployment", name, server=None, **values)
            self._serve(name, port)
            for other in self.store.folder("deployment", name).glob("step_*"):
                if other.name != chosen:
                    shutil.rmtree(other, ignore_errors=True)
        every = {one["name"]: one for one in self.list_inference_deployments()}
        return every[name]

    def list_inference_deployments(self) -> list[dict]:
        """The deployments: `name`, `checkpoint`, `status`, `url`, `pid`.

        `status` is "serving", or "down" where the server was stopped or
        killed; asking the agent starts it again. `default` tells which one is
        asked where none is named.
        """
        found = []
        default = self.default_agent()
        for record in self.store.all("deployment"):
            name = record["name"]
            server = self._server(name)
            well = server if server and server.healthy() else None
            found.append(
                {
                    "name": name,
                    "checkpoint": record["checkpoint"],
                    "agreement": record["agreement"],
                    "status": "serving" if well else "down",
                    "url": well.url if well else None,
                    "pid": well.pid if well else None,
                    "default": name == default,
                }
            )
        return found

    def open_inference_agent(
        self, deployment_name: str, max_new_tokens: int | None = None
    ):
        """An agent that asks a deployment; starts its server if it is down.

        Args:
            deployment_name: see `list_inference_deployments`.
            max_new_tokens: tokens that an answer may have, 512 by default.

        Returns:
            A `serving.Agent`, to be used in a `with` block.
        """
        weights = self._weights(deployment_name)
        prepare()
        from grpo_lab.arena import serving

        with self._holding(deployment_name):
            server = self._server(deployment_name)
            # An arena may have been moved while its server ran.
            moved = server is not None and server.folder != str(weights)
            if server is None or moved or not server.healthy():
                if server:
                    server.stop()
                server = self._serve(deployment_name)
        found = experiments.Experiment.load(self._experiment(deployment_name))
        if max_new_tokens is None:
            max_new_tokens = serving.MAX_NEW_TOKENS
        return serving.Agent(
            server.url,
            server.folder,
            found.system_prompt,
            found.manifest["network"]["max_context_length"],
            max_new_tokens,
        )

    def stop_deployment(self, deployment_name: str) -> None:
        """Stop a deployment's server; its weights stay."""
        self.store.get("deployment", deployment_name)
        with self._holding(deployment_name):
            server = self._server(deployment_name)
            if server is not None:
                server.stop()
            self.store.put("deployment", deployment_name, server=None)

    def delete_deployment(self, deployment_name: str) -> None:
        """Stop a deployment and delete its merged weights."""
        self.stop_deployment(deployment_name)
        self.store.delete("deployment", deployment_name)

    def default_agent(self) -> str | None:
        """The deployment that was made the default, or else the only one."""
        names = [one["name"] for one in self.store.all("deployment")]
        only = names[0] if len(names) == 1 else None
        return self.store.default("deployment") or only

    def set_default_agent(self, deployment_name: str) -> None:
        """The deployment that `generate` asks where none is named."""
        self.store.set_default("deployment", deployment_name)

    def _experiment(self, name: str) -> Path:
        self.store.get("experiment", name)
        return self.store.folder("experiment", name)

    @contextlib.contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        """Start and stop the server of a deployment one at a time."""
        file = self.store.folder("deployment", f".{name}.lock")
        file.parent.mkdir(exist_ok=True)
        with filelock.FileLock(file):
            yield

    def _server(self, name: str) -> Server | None:
        """The server that was last started, whether or not it runs."""
        if not self.store.has("deployment", name):
            return None
        saved = self.store.get("deployment", name)["server"]
        return Server(**saved) if saved else None

    def _weights(self, name: str) -> Path:
        record = self.store.get("deployment", name)
        return self.store.folder("deployment", name) / record["checkpoint"]

    def _merge(self, name: str, experiment: Path, checkpoint: str) -> dict:
        """Merge a checkpoint; whether it answers as its adapter did."""
        from grpo_lab.arena import serving

        plan = read_json(experiment / "plan.json")["settings"]
        splits, _ = experiments.questions(experiment)
        rows = splits.eval.select(range(min(AGREEMENT_ROWS, len(splits.eval))))
        adapter = experiment / "checkpoints" / checkpoint
        folder = self.store.folder("deployment", name)
        try:
            serving.merge(plan["model"], adapter, folder / checkpoint)
            found = serving.check_merged(
                plan["model"], plan["load_in_4bit"], adapter,
                folder / checkpoint, rows, plan["max_completion_length"],
                plan["completions_per_step"],
            )  # fmt: skip
        except BaseException:  # Ctrl-C as well
            if not self.store.has("deployment", name):
                # No verb would ever find what was merged.
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if found["worse"]:
            print(
                "The merged weights answer worse than the adapter: "
                f"{found['merged_correct']} instead of "
                f"{found['adapter_correct']} of {found['questions']} "
                "questions. They are served all the same; train with "
                "network.load_in_4bit: false to avoid it."
            )
        return found

    def _serve(self, name: str, port: int | None = None) -> Server:
        def began(server: Server) -> None:
            self.store.put("deployment", name, server=asdict(server))

        weights = self._weights(name)
        return start(weights, weights.parent / "server.log", port, began=began)


def _checkpoint(experiment: Path, name: str | None) -> str:
    """The checkpoint of that name, or the best."""
    from grpo_lab.arena import records

    every = [one["name"] for one in records.checkpoints(experiment)]
    if not every:
        status = experiments.status(experiment)["status"]
        raise LabError(
            f"The experiment {experiment.name!r} has no checkpoints, so there "
            f"is nothing to deploy: it is {status}, and the first is written "
            "when the first generation has been measured. Wait for it, or "
            "resume it with resume_experiment."
        )
    if name is not None and name not in every:
        raise LabError(
            f"The experiment {experiment.name!r} has no checkpoint {name!r}; "
            f"it has {', '.join(every)}, the best first. Type one of those, "
            "or leave the checkpoint out to deploy the best."
        )
    return name or every[0]
