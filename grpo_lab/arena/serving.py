"""From an adapter to answers: merge it, check that, serve it, ask it.

A server can't answer from an adapter alone, so `merge` writes the policy as
plain 16-bit weights and `check_merged` asks both the same questions. `start`
serves the folder on this machine, in a process of its own that outlives the
notebook, and an `Agent` asks it with the prompt of the training.
"""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import openai
import psutil
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_lab.errors import LabError
from grpo_lab.evaluation import (
    NUMBERS,
    Comparison,
    Evaluation,
    Grader,
    compare,
    evaluate,
)
from grpo_lab.files import last_line
from grpo_lab.memory import free_memory
from grpo_lab.models import compute_dtype, load_policy
from grpo_lab.prompts import TEMPLATE_VALUES, messages

HOST = "127.0.0.1"
"""Servers ask for no password, so nobody else may reach them."""

MAX_NEW_TOKENS = 512
"""Tokens of an answer, unless the caller or the context says less."""

HEALTH_SECONDS = 2
"""How long a server may take to say that it is well."""

ANSWER_SECONDS = 600
"""How long an agent waits for an answer, or for the next piece of one."""

PORT_TRIES = 3
"""Free ports that are tried when others take them first."""

AGAIN = (
    "Deploy the agent again: in Python arena.deploy_agent(...), in a terminal "
    "`python -m grpo_lab.arena agent deploy ...`."
)


# --- Merging ----------------------------------------------------------------


def merged_dtype() -> torch.dtype:
    """The 16-bit type that merged weights are stored in.

    Returns:
        bfloat16 on a GPU that computes in it, else float16.

    Measured with adapters of the pocket models: float16 stores a policy
    almost exactly (its rounding is 0.2 to 19 % of the update), bfloat16, with
    three bits less, misses 2 to 154 % of it: after 32 steps at a rate of 1e-4
    two thirds of the weights stayed those of the base. Through either, the
    number of right answers in 400 changed by one at most. A model that was
    made in bfloat16 may overflow in float16, however, and then answers
    nothing but "!", so what was trained in bfloat16 is stored in it.
    """
    dtype = compute_dtype()
    return torch.float16 if dtype == torch.float32 else dtype


def merge(model: str, adapter: Path, target: Path) -> None:
    """Write a policy as one folder of 16-bit weights that can be served.

    The adapter goes into the 16-bit base, not into the 4-bit one that it was
    trained on, whose rounding would be there to stay; whether it still
    answers as it did is for `check_merged` to say.

    Args:
        model: the base model, as for `models.load_policy`.
        adapter: folder of the adapter.
        target: folder to write, whole or not at all; replaced if it exists.

    Raises:
        LabError: the base can't be loaded, the adapter is not one of it, or
            the disk is full.
    """
    adapter, target = Path(adapter), Path(target)
    if not (adapter / "adapter_config.json").is_file():
        raise LabError(
            f"{adapter} holds no adapter (adapter_config.json is missing), so "
            "there is nothing to deploy. Choose another checkpoint, or "
            "resume the experiment until it has written one."
        )
    base, tokenizer = load_policy(model, load_in_4bit=False)
    try:
        policy = PeftModel.from_pretrained(base, adapter)
        merged = policy.merge_and_unload(safe_merge=True)
    except torch.OutOfMemoryError as error:
        raise LabError(
            f"The GPU's memory is not enough to merge {adapter} into {model} "
            "in 16 bit. Stop what else uses the GPU, such as a training or "
            "another deployment, then deploy the agent again."
        ) from error
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LabError(
            f"The adapter in {adapter} could not be merged into {model}: "
            f"{_first_line(error)} It is broken, or was trained on another "
            "model. Choose another checkpoint, or the base model that it was "
            "trained on."
        ) from error
    merged.to(merged_dtype())
    merged.generation_config = greedy_defaults(merged, tokenizer)
    tokenizer.response_template = plain_text(tokenizer)
    _save(merged, tokenizer, target)


def greedy_defaults(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """A generation config without the sampling values of the base model.

    A server takes the values that a request leaves out from this file, and
    Qwen's, for example, holds a repetition penalty that no request names.
    """
    config = model.generation_config
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id or tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def plain_text(tokenizer: PreTrainedTokenizerBase) -> dict:
    """A response template by which an answer is text and nothing else.

    Left alone, `transformers serve` takes what a Qwen model writes between
    <think> and </think> out of the answer, and white space around it. The
    training and the evaluation see all of it but special tokens.
    """
    special = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
    ]
    text = {
        "content": "text",
        "content_args": {"strip": False},
        "close": special,
        "repeats": True,
        "join": "",
    }
    # The answer starts where the prompt ends.
    return {"start_anchor_pattern": r"\Z", "fields": {"content": text}}


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path
) -> None:
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except (OSError, SafetensorError) as error:
        raise LabError(
            f"The merged model could not be written to {target}: "
            f"{_first_line(error)} Free some space, then deploy again; "
            "nothing of it was kept."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".: ") + "."


# --- Checking ---------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Greedy answers of an adapter and of the weights it was merged into.

    Attributes:
        comparison: the adapter first, the merged weights second.
        adapter_correct, merged_correct: number of right answers.
        same_text: number of answers that are the same word for word.
    """

    comparison: Comparison
    adapter_correct: int
    merged_correct: int
    same_text: int

    @property
    def questions(self) -> int:
        """Number of questions asked."""
        return self.comparison.total

    @property
    def same(self) -> int:
        """Number of questions that both or neither answered rightly."""
        pair = self.comparison
        return pair.total - pair.gained - pair.lost

    def to_dict(self) -> dict:
        """Plain values for JSON and for a table."""
        return {
            "questions": self.questions,
            "adapter_correct": self.adapter_correct,
            "merged_correct": self.merged_correct,
            "same_text": self.same_text,
            "worse": self.worse,
        }

    @property
    def worse(self) -> bool:
        """Whether merging has cost more than chance explains (95 %)."""
        return self.comparison.interval[1] < 0


def check_merged(
    model: str,
    load_in_4bit: bool,
    adapter: Path,
    merged: Path,
    rows: Dataset,
    max_new_tokens: int,
    batch_size: int,
    grader: Grader = NUMBERS,
) -> Agreement:
    """Ask an adapter and the weights it was merged into the same questions.

    Args:
        model: the base model of the adapter.
        load_in_4bit: whether it was trained on that model in 4 bit.
        adapter: folder of the adapter.
        merged: folder that `merge` wrote.
        rows, max_new_tokens, batch_size, grader: as for
            `evaluation.evaluate`.

    Raises:
        LabError: a model can't be loaded, or a gold can't be read.
    """

    def answers(policy, tokenizer) -> Evaluation:
        return evaluate(
            policy, tokenizer, rows, max_new_tokens, batch_size, grader=grader
        )

    base, tokenizer = load_policy(model, load_in_4bit)
    before = answers(PeftModel.from_pretrained(base, adapter), tokenizer)
    del base
    free_memory()
    # Computes as the server does, see `_command`.
    after = answers(*load_policy(str(merged), load_in_4bit=False))
    free_memory()
    pairs = zip(before.answers, after.answers, strict=True)
    return Agreement(
        comparison=compare(before, after),
        adapter_correct=before.correct,
        merged_correct=after.correct,
        same_text=sum(one.text == other.text for one, other in pairs),
    )


# --- Serving ----------------------------------------------------------------


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
    folder: Path
    started: float

    @property
    def url(self) -> str:
        """Address for clients of the OpenAI interface."""
        return f"http://{HOST}:{self.port}/v1"

    def to_dict(self) -> dict:
        """Plain values for JSON; `from_dict` is the way back."""
        return {**asdict(self), "folder": str(self.folder)}

    @classmethod
    def from_dict(cls, values: dict) -> "Server":
        """What `to_dict` gave."""
        return cls(**{**values, "folder": Path(values["folder"])})


class _PortTaken(Exception):
    """Something else took the port before the server could."""


_children: list[subprocess.Popen] = []
"""Servers of this process; one that ends is a zombie until it is polled."""


def shares_a_gpu() -> bool:
    """Whether a server takes memory that a merge needs as well."""
    return torch.cuda.is_available()


def refuse_port_in_use(port: int | None) -> None:
    """Refuse a port before anything is done for a server on it.

    Raises:
        LabError: it is in use.
    """
    if port is not None and not _is_free(port):
        raise _port_in_use(port)


def start(
    folder: Path,
    log: Path,
    port: int | None = None,
    seconds: float = 180,
    began: Callable[[Server], None] = lambda server: None,
) -> Server:
    """Serve a merged model on this machine, and wait until it answers.

    vLLM does it where there are a GPU and the command `vllm`, else
    transformers. The server belongs to no terminal and no notebook: it runs
    until `stop`, or until the machine is switched off.

    Args:
        folder: what `merge` wrote.
        log: file for what the server prints; overwritten.
        port: 1 to 65535, or None for a free one.
        seconds: how long it may take until the first answer.
        began: called as soon as there is a process, so that it can be found
            again if this one is killed before the first answer.

    Raises:
        LabError: there is no model in the folder, the port is in use, or the
            server ended or took too long; nothing is left running then.
    """
    folder, log = Path(folder).resolve(), Path(log)
    _check_model(folder)
    refuse_port_in_use(port)
    log.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(PORT_TRIES):
        chosen = port or _free_port()
        with contextlib.suppress(_PortTaken):
            return _start(folder, log, chosen, seconds, began)
        if port is not None:
            break
    raise _port_in_use(chosen)


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise LabError(
            f"{folder} holds no merged model (config.json is missing), so "
            f"nothing can be served or asked there. {AGAIN}"
        )


def _start(
    folder: Path,
    log: Path,
    port: int,
    seconds: float,
    began: Callable[[Server], None],
) -> Server:
    with log.open("wb") as output:
        child = subprocess.Popen(
            _command(folder, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    _children.append(child)
    created = psutil.Process(child.pid).create_time()
    server = Server(child.pid, port, folder, created)
    try:
        began(server)
        _wait(server, child, log, seconds)
    except BaseException:  # Ctrl-C as well
        stop(server)
        raise
    return server


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Idle threads of one server would keep the cores from all others.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What a server's process is given beside the environment of this one."""


def _command(folder: Path, port: int) -> list[str]:
    """What to type to serve a folder on a port."""
    vllm = shutil.which("vllm") if torch.cuda.is_available() else None
    # -P: else a file of the working directory, such as a `datasets.py`,
    # would stand in for the library of that name.
    module = [sys.executable, "-P", "-m", "transformers.cli.transformers"]
    return [
        *([vllm] if vllm else module),
        "serve",
        str(folder),
        *("--host", HOST, "--port", str(port)),
        # On a CPU 32 bit takes less than half the time of 16.
        *("--dtype", str(compute_dtype()).removeprefix("torch.")),
    ]


def _wait(
    server: Server, child: subprocess.Popen, log: Path, seconds: float
) -> None:
    """Return when the server listens, is well, and its model has answered."""
    end = time.monotonic() + seconds
    while not (_listens(server) and _is_well(server.port)):
        if child.poll() is not None:
            raise _ended(server, log)
        if time.monotonic() > end:
            raise _too_slow(server, log, seconds)
        time.sleep(0.1)
    try:
        with _client(server.url, max(1, end - time.monotonic())) as client:
            client.chat.completions.create(
                model=str(server.folder),
                messages=messages("How many?", "Say a number."),
                max_tokens=1,
                temperature=0,
                extra_body={"chat_template_kwargs": TEMPLATE_VALUES},
            )
    except openai.APITimeoutError as error:
        raise _too_slow(server, log, seconds) from error
    except openai.OpenAIError as error:
        raise _ended(server, log) from error


def _ended(server: Server, log: Path) -> Exception:
    if "address already in use" in log.read_text(errors="replace").lower():
        return _PortTaken()
    return LabError(
        f"The server for {server.folder} failed before its first answer. "
        f"Its log ends in: {_last_words(log)} The rest is in {log}; put right "
        "what it names, then deploy the agent again."
    )


def _too_slow(server: Server, log: Path, seconds: float) -> LabError:
    return LabError(
        f"The server for {server.folder} did not answer within {seconds:g} "
        "seconds and was ended. Another program may keep the machine busy, or "
        f"the model is too large for it. Its log, {log}, ends in: "
        f"{_last_words(log)} Close other programs, or allow it more seconds, "
        "then deploy the agent again."
    )


def _last_words(log: Path) -> str:
    return last_line(log)[-300:] or "(nothing)."


def _port_in_use(port: int) -> LabError:
    return LabError(
        f"Port {port} of this machine is in use or not allowed, so no server "
        "can listen there. Leave the port out and a free one is found, or "
        f"choose another, for example {_free_port()}."
    )


def _is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        if os.name == "posix":  # the port of an ended server is free at once
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return port > 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _listens(server: Server) -> bool:
    """Whether it is this server that listens on its port, and no other."""
    try:
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == server.port
            for member in _family(server)
            for one in member.net_connections("tcp")
        )
    except psutil.Error:  # it ended meanwhile
        return False


def _is_well(port: int) -> bool:
    # Not through a proxy, whatever the environment says.
    connection = http.client.HTTPConnection(HOST, port, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def healthy(server: Server) -> bool:
    """Whether a server runs, and says within 2 seconds that it is well."""
    return bool(_family(server)) and _is_well(server.port)


def stop(server: Server, seconds: float = 10) -> None:
    """End a server and all that it started; nothing happens if it is gone.

    Args:
        seconds: how long it may take to end by itself.
    """
    family = _family(server)
    _end(family, psutil.Process.terminate, seconds)
    _end(family, psutil.Process.kill, seconds)
    _reap()


def _end(
    family: list[psutil.Process],
    how: Callable[[psutil.Process], None],
    seconds: float,
) -> None:
    """Send a signal to those that still run, and wait for their end."""
    for member in filter(_runs, family):
        with contextlib.suppress(psutil.Error):
            how(member)
    end = time.monotonic() + seconds
    while any(map(_runs, family)) and time.monotonic() < end:
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    # A zombie has ended, but nobody may ever ask it how: in a container the
    # process that adopts an orphan often does not. As long as it has threads
    # that are still ending it holds its port.
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        ended = zombie and process.num_threads() <= 1
        return process.is_running() and not ended
    except psutil.Error:
        return False


def _reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def _family(server: Server) -> list[psutil.Process]:
    """The server's process and its children; [] if it no longer runs."""
    _reap()
    try:
        process = psutil.Process(server.pid)
        # A clock that was put right moves the start by a moment.
        ours = abs(process.create_time() - server.started) < 1
        if not (ours and _runs(process)):
            return []
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


# --- Asking -----------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One answer.

    Attributes:
        completion: its text.
        truncated: it was cut at its limit; also said of an answer that ends
            with the very last token that it may have, which no server tells
            from one that goes on.
        tokens: its length.
    """

    completion: str
    truncated: bool
    tokens: int


@dataclass(frozen=True)
class Reply:
    """What an agent says to one prompt; `results` holds one answer."""

    prompt: str
    results: tuple[Result, ...]

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut at its limit."""
        return self.results[0].truncated


class Agent:
    """Asks a served policy as it was trained: same prompt, greedy answers.

    Args:
        url: `Server.url`.
        model: folder that is served, `str(Server.folder)`.
        system_prompt: the one that the policy was trained with.
        context: tokens that a prompt and its answer may have together; the
            model's own limit counts where it is less.
        max_new_tokens: tokens that an answer may have, at least 1.

    Raises:
        LabError: the folder is gone.

    Attributes:
        last: the latest `Reply`, also of a stream that came to its end.

    Example:
        >>> with Agent(server.url, str(server.folder), PROMPT, 512) as agent:
        ...     reply = agent.generate("What is 2 + 3?")
        >>> reply.results[0].completion
    """

    def __init__(
        self,
        url: str,
        model: str,
        system_prompt: str,
        context: int,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> None:
        _check_model(Path(model))
        limit = AutoConfig.from_pretrained(model).max_position_embeddings
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.url = url
        self.model = str(model)
        self.system_prompt = system_prompt
        self.context = min(context, limit)
        self.max_new_tokens = max_new_tokens
        self.last: Reply | None = None
        self._client = _client(url, ANSWER_SECONDS)

    def __enter__(self) -> "Agent":
        """The agent itself; its connections close with the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connections; the server goes on."""
        self.close()

    def close(self) -> None:
        """Close the connections to the server, which goes on."""
        self._client.close()

    def generate(
        self, prompt: str, max_new_tokens: int | None = None
    ) -> Reply:
        """The whole answer to a question.

        Args:
            prompt: the question, as text.
            max_new_tokens: in place of the agent's own limit.

        Raises:
            LabError: the question is empty or too long, the limit is below
                1, or the server does not answer.
        """
        request = self._request(prompt, max_new_tokens)
        with _one_error(self.url):
            answer = self._client.chat.completions.create(**request)
        choice = answer.choices[0]
        text = choice.message.content or ""
        tokens = answer.usage.completion_tokens
        return self._finish(prompt, text, choice.finish_reason, tokens)

    def generate_stream(
        self, prompt: str, max_new_tokens: int | None = None
    ) -> Iterator[str]:
        """The answer in pieces, as the model writes them.

        Whether it was cut at its limit stands in `last.truncated` when the
        last piece has come. To leave off early ends it on the server too.

        Args, Raises: as for `generate`; a server that is gone raises where
            the next piece is taken.
        """
        request = self._request(prompt, max_new_tokens)
        return self._pieces(prompt, request)

    def _request(self, prompt: str, max_new_tokens: int | None) -> dict:
        self.last = None
        limit = self.max_new_tokens
        if max_new_tokens is not None:
            limit = max_new_tokens
        if limit < 1:
            raise LabError(
                f"max_new_tokens is {limit}, but an answer needs at least 1 "
                f"token. Type for example max_new_tokens={MAX_NEW_TOKENS}."
            )
        if not prompt.strip():
            raise LabError(
                "The prompt is empty, so there is nothing to answer. Type a "
                "question such as 'What is 12 times 7?'."
            )
        chat = messages(prompt, self.system_prompt)
        return {
            "model": self.model,
            "messages": chat,
            "temperature": 0,
            "max_tokens": min(limit, self._room(chat)),
            "extra_body": {"chat_template_kwargs": TEMPLATE_VALUES},
        }

    def _room(self, chat: list[dict[str, str]]) -> int:
        """Tokens that the context leaves for the answer."""
        rendered = self.tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=True,
            return_dict=True,
            **TEMPLATE_VALUES,
        )
        length = len(rendered["input_ids"])
        if length >= self.context:
            raise LabError(
                f"The prompt has {length} tokens with its template, and the "
                f"context of the model holds {self.context}, so there is no "
                "room for an answer. Type a shorter prompt."
            )
        return self.context - length

    def _pieces(self, prompt: str, request: dict) -> Iterator[str]:
        pieces, finish, tokens = [], None, 0
        with (
            _one_error(self.url),
            self._client.chat.completions.create(
                **request,
                stream=True,
                stream_options={"include_usage": True},
            ) as stream,
        ):
            for chunk in stream:
                if chunk.usage:  # vLLM counts in a chunk without a choice
                    tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    if choice.delta.content:
                        pieces.append(choice.delta.content)
                        yield choice.delta.content
        if finish is None:
            raise _no_answer(self.url, "It broke off in the middle")
        self._finish(prompt, "".join(pieces), finish, tokens)

    def _finish(
        self, prompt: str, text: str, reason: str, tokens: int
    ) -> Reply:
        self.last = Reply(prompt, (Result(text, reason == "length", tokens),))
        return self.last


def _client(url: str, seconds: float) -> openai.OpenAI:
    """The official client; a proxy must not catch what stays in the house."""
    return openai.OpenAI(
        base_url=url,
        api_key="not-needed",
        max_retries=0,
        timeout=seconds,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


@contextlib.contextmanager
def _one_error(url: str) -> Iterator[None]:
    """Whatever the client raises becomes an error that says what to do."""
    try:
        yield
    except openai.APITimeoutError as error:
        said = f"It was silent for {ANSWER_SECONDS} seconds"
        raise _no_answer(url, said) from error
    except openai.APIConnectionError as error:
        said = "It ended, or was stopped, and the connection broke"
        raise _no_answer(url, said) from error
    except openai.APIStatusError as error:
        said = f"It said: {error.response.text[:300]}"
        raise _no_answer(url, said) from error
    except openai.OpenAIError as error:
        raise _no_answer(url, f"It said: {error}".rstrip(".")) from error


def _no_answer(url: str, said: str) -> LabError:
    return LabError(f"The server at {url} gave no answer. {said}. {AGAIN}")
