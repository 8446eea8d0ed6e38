"""Merging an adapter, serving the weights, and asking the server."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from grpo_lab import models, processes
from grpo_lab.arena import deployments, serving
from grpo_lab.arena.deployments import Server
from grpo_lab.arena.serving import Agent
from grpo_lab.data import load_splits
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Answer, Evaluation, generate
from grpo_lab.models import load_policy
from grpo_lab.profiles import ALL_LINEAR
from grpo_lab.prompts import TEMPLATE_VALUES, THINK_PROMPT, messages

SECONDS = 120
"""Enough for a server on a machine that has other things to do."""


def refusal(function, *arguments, **options) -> str:
    """The message of the error that a call ends in; one paragraph."""
    with pytest.raises(LabError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def make_adapter(model: str, folder: Path, scale: float) -> Path:
    """An adapter that changes the answers, without a training."""
    base, _ = load_policy(model, load_in_4bit=False)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(ALL_LINEAR))
    # Before the adapter: its other half is drawn when it is made.
    torch.manual_seed(3)
    policy = get_peft_model(base, config)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=scale)
    policy.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_qwen, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "tiny"
    return make_adapter(str(tiny_qwen), folder, 0.3)


@pytest.fixture(scope="module")
def merged(tiny_qwen, adapter, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("merged") / "deep" / "tiny"
    serving.merge(str(tiny_qwen), adapter, folder)
    return folder


# --- Merging ----------------------------------------------------------------


def logits(model) -> torch.Tensor:
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_merged_weights_compute_what_the_adapter_does(
    tiny_qwen, adapter, merged
):
    base, _ = load_policy(str(tiny_qwen), load_in_4bit=False)
    without = logits(base)
    wanted = logits(serving.PeftModel.from_pretrained(base, adapter))
    found = logits(load_policy(str(merged), load_in_4bit=False)[0])
    assert (wanted - without).abs().max() > 0.1
    assert (wanted - found).abs().max() < 0.01


def test_merged_weights_are_16_bit_safetensors(merged):
    weights = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert not any("lora" in name for name in weights)
    assert not (merged / "adapter_config.json").exists()
    assert [path.name for path in merged.parent.iterdir()] == [merged.name]


@pytest.mark.parametrize(
    ("computes", "stored"),
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_type_of_merged_weights(monkeypatch, computes, stored):
    monkeypatch.setattr(serving, "compute_dtype", lambda: computes)
    assert serving.merged_dtype() == stored


def test_merging_leaves_the_sampling_values_of_the_base_behind(
    tiny_qwen, adapter, tmp_path
):
    base = tmp_path / "base"
    shutil.copytree(tiny_qwen, base)
    GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        repetition_penalty=1.1,
        eos_token_id=[2, 0],
        pad_token_id=0,
    ).save_pretrained(base)
    serving.merge(str(base), adapter, tmp_path / "merged")
    saved = json.loads(
        (tmp_path / "merged/generation_config.json").read_text()
    )
    assert saved.pop("transformers_version")
    assert saved.pop("_from_model_config", False) is False
    assert saved == {"eos_token_id": [2, 0], "pad_token_id": 0}


def test_the_tokenizer_and_its_template_come_along(tiny_qwen, merged):
    before = AutoTokenizer.from_pretrained(tiny_qwen)
    after = AutoTokenizer.from_pretrained(merged)
    chat = messages("How many?", THINK_PROMPT)
    assert before.apply_chat_template(chat) == after.apply_chat_template(chat)
    assert (after.eos_token, after.pad_token) == (
        before.eos_token,
        before.pad_token,
    )


@pytest.mark.parametrize(
    "text",
    [
        "<think> a </think>\n\n <answer> 3 </answer> \n",
        " <think> cut before its end",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "",
    ],
)
def test_an_answer_is_its_text_whatever_tags_it_holds(merged, text):
    """The server would take <think> out of a Qwen model's answer."""
    tokenizer = AutoTokenizer.from_pretrained(merged)
    ids = tokenizer.encode(text) + [tokenizer.pad_token_id] * 2
    ids += tokenizer.encode(text) + [tokenizer.eos_token_id]
    prompt = tokenizer.apply_chat_template(
        messages("<think> is a tag.", "S"), tokenize=False
    )
    parsed = tokenizer.parse_response(ids, prefix=prompt)
    wanted = tokenizer.decode(ids, skip_special_tokens=True)
    assert wanted == text * 2
    assert parsed.get("content", "") == wanted
    assert set(parsed) <= {"content"}


def test_merging_replaces_what_was_there(tiny_qwen, adapter, tmp_path):
    target = tmp_path / "merged"
    for folder in (target, tmp_path / "merged.part"):
        folder.mkdir()
        (folder / "old").touch()
    serving.merge(str(tiny_qwen), adapter, target)
    assert (target / "model.safetensors").exists()
    assert not (target / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_what_is_no_adapter_of_the_model_is_not_merged(
    tiny_qwen, tiny_llama, adapter, tmp_path
):
    target = tmp_path / "merged"
    message = refusal(serving.merge, str(tiny_qwen), tmp_path, target)
    assert "adapter_config.json is missing" in message
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    weights = (broken / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").write_bytes(weights[:100])
    message = refusal(serving.merge, str(tiny_qwen), broken, target)
    assert "could not be merged" in message
    other = make_adapter("pocket-qwen", tmp_path / "other", 0.01)
    message = refusal(serving.merge, str(tiny_qwen), other, target)
    assert "trained on another model" in message
    assert not target.exists()


def test_a_full_disk_leaves_the_old_model(
    tiny_qwen, adapter, tmp_path, monkeypatch
):
    def full(self, folder, **_):
        (Path(folder) / "half").touch()
        raise OSError(28, "No space left on device")

    target = tmp_path / "merged"
    target.mkdir()
    (target / "old").touch()
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerBase.save_pretrained", full
    )
    message = refusal(serving.merge, str(tiny_qwen), adapter, target)
    assert "No space left on device" in message
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


# --- Checking ---------------------------------------------------------------


def test_the_merged_weights_are_asked_what_the_adapter_was(
    tiny_qwen, adapter, merged, tiny_splits
):
    values = (tiny_splits.eval, 8, 3)
    found = serving.check_merged(
        str(tiny_qwen), False, adapter, merged, *values
    )
    assert found == {
        "questions": 6,
        "adapter_correct": found["merged_correct"],
        "merged_correct": found["merged_correct"],
        "same_text": 6,
        "worse": False,
    }
    # The base model, 4-bit too, answers something else.
    base = serving.check_merged(
        str(tiny_qwen), True, adapter, tiny_qwen, *values
    )
    assert base["same_text"] < 6


@pytest.mark.parametrize(
    ("gained", "lost", "worse"),
    [(0, 0, False), (0, 3, False), (0, 20, True), (20, 0, False)],
)
def test_worse_is_more_than_chance(monkeypatch, gained, lost, worse):
    def answered(right):
        answers = (
            Answer(str(n), "", "", n in right, True, 1, False)
            for n in range(100)
        )
        return Evaluation(tuple(answers), 0.0)

    both = iter([answered(range(50)), answered(range(lost, 50 + gained))])
    monkeypatch.setattr(serving, "evaluate", lambda *a, **k: next(both))
    monkeypatch.setattr(serving, "load_policy", lambda *a, **k: (None, None))
    monkeypatch.setattr(serving.PeftModel, "from_pretrained", lambda *a: None)
    found = serving.check_merged("m", True, "a", "b", None, 8, 3)
    assert found["worse"] is worse
    assert found["merged_correct"] == 50 + gained - lost


# --- Starting and stopping, with a stand-in for the server: a process -------

STAND_IN = """
import http.server, json, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "7"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer({"choices": [choice]}, ERROR or 200)
    def answer(self, body, status=200):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
ERROR = 0
"""
SERVE = """
port = int(sys.argv[1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
LINGER = """
import time
print("loading", flush=True)
time.sleep(300)
"""


@pytest.fixture
def stand_in(monkeypatch, merged):
    """Starts a server that is there at once; what it runs is given."""
    begun = []

    def start(code, log, port=None, seconds=SECONDS):
        def command(folder, port):
            begun.append(port)
            return [sys.executable, "-c", STAND_IN + code, str(port)]

        monkeypatch.setattr(deployments, "command", command)
        return deployments.start(merged, log, port, seconds)

    start.begun = begun
    return start


def is_gone(pid: int) -> bool:
    """Whether a process ends soon, even if nobody takes notice of it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if not processes.is_running(psutil.Process(pid)):
                return True
        except psutil.Error:
            return True
        time.sleep(0.05)
    return False


def children() -> list[psutil.Process]:
    every = psutil.Process().children(recursive=True)
    return list(filter(processes.is_running, every))


@pytest.fixture
def taken():
    """A port that something else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_is_refused_before_anything_starts(
    stand_in, tmp_path, taken
):
    message = refusal(stand_in, SERVE, tmp_path / "log", taken)
    assert f"Port {taken} of this machine is in use" in message
    assert "Port 0" in refusal(stand_in, SERVE, tmp_path / "log", 0)
    deployments.refuse_port_in_use(None)
    assert stand_in.begun == []
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        (
            "print('a traceback')\nraise ValueError('no such weights')",
            SECONDS,
            "ended before its first answer.*ValueError: no such weights",
        ),
        ("ERROR = 500" + SERVE, SECONDS, "failed at its first answer"),
        (LINGER, 0.5, "was silent for 0.5 s"),
    ],
)
def test_a_server_that_does_not_answer_is_ended_and_says_why(
    stand_in, tmp_path, code, seconds, said
):
    log = tmp_path / "deep" / "log"
    before = children()
    message = refusal(stand_in, code, log, seconds=seconds)
    assert re.search(said, message)
    assert str(log) in message
    assert children() == before


def test_ctrl_c_while_a_server_starts_ends_it(stand_in, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = children()
    monkeypatch.setattr(deployments, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stand_in(LINGER, tmp_path / "log")
    assert len(stand_in.begun) == 1
    assert children() == before


def test_a_server_is_known_by_what_was_written_down(stand_in, tmp_path):
    """Not one that took its port, nor a process with its number."""
    server = stand_in(SERVE, tmp_path / "log")
    again = Server(**json.loads(json.dumps(asdict(server))))
    assert again == server and again.healthy()
    other = replace(server, started=server.started - 3600)
    assert not other.healthy()
    other.stop()
    child = processes.start([sys.executable, "-c", LINGER], tmp_path / "other")
    began = psutil.Process(child.pid).create_time()
    # It would be taken for well: the other server answers /health.
    loads = replace(server, pid=child.pid, started=began)
    assert not loads.healthy()
    loads.stop()
    assert server.healthy()
    server.stop()
    assert not server.healthy()
    server.stop()  # gone already


def test_what_a_server_is_started_with(monkeypatch, merged):
    command = deployments.command(merged, 8123)
    assert command[0] == sys.executable
    assert command[-7:] == [
        str(merged), "--host", "127.0.0.1", "--port", "8123",
        "--dtype", "float32",
    ]  # fmt: skip
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert deployments.command(merged, 8123) == command  # no GPU for vLLM
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models, "compute_dtype", lambda: torch.bfloat16)
    assert deployments.command(merged, 8123) == [
        "/bin/vllm", "serve", *command[-7:-1], "bfloat16",
    ]  # fmt: skip


def test_a_folder_without_a_model_is_not_served(tmp_path, adapter):
    for folder in (adapter, tmp_path / "gone"):
        message = refusal(deployments.start, folder, tmp_path / "log")
        assert "no merged model" in message
        message = refusal(Agent, "http://127.0.0.1:1/v1", folder, "S", 512)
        assert "no merged model" in message


# --- Questions that no server has to see ------------------------------------


@pytest.fixture
def lonely(merged):
    """An agent whose server is not there."""
    url = f"http://127.0.0.1:{processes.free_port()}/v1"
    with Agent(url, str(merged), "S", 512) as agent:
        yield agent


def test_bad_questions_are_refused(lonely):
    for prompt in ("", " \n"):
        assert "The prompt is empty" in refusal(lonely.generate, prompt)
    assert "at least 1" in refusal(lonely.generate, "1 + 1?", 0)
    message = refusal(lonely.generate_stream, "one two " * 400)
    assert "Type a shorter prompt" in message


def test_an_answer_gets_what_the_context_leaves(lonely):
    prompt = "one two " * 40
    chat = messages(prompt, "S")
    length = len(
        lonely.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
    )
    assert 60 < length < 500
    short = lonely._request("1?", None)
    assert 450 < short["max_tokens"] < 512
    assert short["messages"] == messages("1?", "S")
    assert short["extra_body"] == {"chat_template_kwargs": TEMPLATE_VALUES}
    assert lonely._request(prompt, None)["max_tokens"] == 512 - length
    assert lonely._request(prompt, 7)["max_tokens"] == 7
    lonely.context = length + 1
    assert lonely._request(prompt, None)["max_tokens"] == 1
    lonely.context = length
    assert "room for an answer" in refusal(lonely.generate, prompt)


def test_the_context_is_the_models_where_that_is_less(merged):
    for asked, used in ((100, 100), (99_999, 512)):
        with Agent("http://127.0.0.1:1/v1", merged, "S", asked) as agent:
            assert agent.context == used


def test_a_server_that_is_not_there(lonely):
    message = refusal(lonely.generate, "1 + 1?")
    assert "failed: " in message and "agent deploy" in message
    assert refusal(list, lonely.generate_stream("1 + 1?")) == message
    assert lonely.last is None


# --- A real server: one process for these tests -----------------------------


@pytest.fixture(scope="module")
def pocket(tmp_path_factory) -> Path:
    """A model that writes text, and that ends it, changed by an adapter."""
    folder = tmp_path_factory.mktemp("pocket")
    made = make_adapter("pocket-qwen", folder / "adapter", 0.002)
    serving.merge("pocket-qwen", made, folder / "merged")
    return folder / "merged"


@pytest.fixture(scope="module")
def server(pocket):
    server = deployments.start(pocket, pocket.parent / "log", seconds=SECONDS)
    family = processes.tree(server.pid, server.started)
    assert family
    yield server
    server.stop()
    assert all(is_gone(process.pid) for process in family)


@pytest.fixture(autouse=True)
def no_way_through_a_proxy(monkeypatch):
    """A proxy that is not there would swallow every call."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def agent(server):
    url, folder = server.url, str(server.folder)
    with Agent(url, folder, THINK_PROMPT, 512, max_new_tokens=64) as agent:
        yield agent


@pytest.fixture(scope="module")
def answers(pocket):
    """Greedy answers of the merged weights, without a server.

    Questions as far as there is one whose answer holds <think>, one that
    ends, and one that is cut.
    """
    model, tokenizer = load_policy(str(pocket), load_in_4bit=False)
    rows = load_splits("pocket_latex", train_rows=1, eval_rows=40).eval
    found = generate(model.eval(), tokenizer, rows["prompt"], 64)
    return dict(zip(rows["question"], found, strict=True))


def chosen(answers, wanted) -> tuple[str, tuple[str, int, bool]]:
    return next(pair for pair in answers.items() if wanted(*pair[1]))


@pytest.mark.lesson
def test_a_served_answer_is_that_of_the_evaluation(agent, answers):
    thinks = chosen(answers, lambda text, *_: "<think>" in text)
    ends = chosen(answers, lambda text, tokens, cut: not cut)
    for question, expected in (thinks, ends):
        reply = agent.generate(question)
        (result,) = reply.results
        found = (result.completion, result.tokens, result.truncated)
        assert found == expected
        assert reply.truncated is result.truncated
        assert reply.prompt == question
        stream = agent.generate_stream(question)
        assert agent.last is None
        pieces = list(stream)
        assert "".join(pieces) == result.completion and len(pieces) > 10
        assert agent.last == reply


@pytest.mark.lesson
def test_an_answer_that_is_cut_says_so(agent, answers):
    question, (text, *_) = chosen(
        answers, lambda text, tokens, cut: not cut and tokens > 20
    )
    reply = agent.generate(question, max_new_tokens=9)
    assert reply.truncated
    assert reply.results[0].tokens == 9
    assert text.startswith(reply.results[0].completion)


@pytest.mark.lesson
def test_a_stream_may_be_left_early(agent, answers):
    question, (text, *_) = chosen(answers, lambda text, *_: len(text) > 40)
    stream = agent.generate_stream(question)
    first = next(stream)
    stream.close()
    assert text.startswith(first)
    assert agent.last is None
    assert agent.generate(question).results[0].completion == text


@pytest.mark.lesson
def test_what_the_server_refuses_is_told(server):
    with Agent(server.url, str(server.folder), "S", 512) as agent:
        agent.model = "another"
        message = refusal(agent.generate, "1 + 1?")
    assert "pinned" in message


@pytest.mark.lesson
def test_a_server_listens_on_this_machine_only(server):
    listening = [
        one.laddr
        for one in psutil.Process(server.pid).net_connections()
        if one.status == psutil.CONN_LISTEN
    ]
    assert [tuple(one) for one in listening] == [("127.0.0.1", server.port)]


@pytest.mark.lesson
def test_a_second_server_is_killed_and_started_again(server, merged, tmp_path):
    """Both work at once, and the first one does not notice."""
    second = deployments.start(merged, tmp_path / "log", seconds=SECONDS)
    assert second.port != server.port
    assert second.healthy()
    assert server.healthy()
    with Agent(second.url, str(merged), "S", 512) as agent:
        # An untrained model rarely ends: there is time to kill the server.
        stream = agent.generate_stream("1 + 1?")
        next(stream)
        os.kill(second.pid, 9)
        message = refusal(list, stream)
        assert "failed: " in message
        assert agent.last is None
    assert is_gone(second.pid)
    assert not second.healthy()
    second.stop()  # nothing to do
    port = second.port
    third = deployments.start(merged, tmp_path / "log", port, seconds=SECONDS)
    try:
        assert third.healthy()
        assert not second.healthy()
        message = refusal(deployments.start, merged, tmp_path / "other", port)
        assert f"Port {port}" in message
        with Agent(third.url, str(merged), "S", 512) as agent:
            assert agent.generate("1 + 1?", 4).results[0].tokens == 4
    finally:
        third.stop()
    assert is_gone(third.pid)
    assert server.healthy()


@pytest.mark.lesson
def test_a_server_outlives_who_started_it(pocket, tmp_path):
    """And whoever comes later knows it by what was written down."""
    code = (
        "import sys; from pathlib import Path; "
        "from dataclasses import asdict; "
        "from grpo_lab.arena import deployments; "
        "one = deployments.start(Path(sys.argv[1]), Path(sys.argv[2])); "
        "import json; print(json.dumps(asdict(one)))"
    )
    log = tmp_path / "log"
    # A file of the reader's must not stand in for a library.
    (tmp_path / "torch.py").write_text("raise SystemExit('not torch')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, pocket, log],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=2 * SECONDS,
    )
    assert done.returncode == 0, done.stderr
    server = Server(**json.loads(done.stdout))
    assert server.folder == str(pocket)
    assert server.healthy()
    server.stop()
    assert is_gone(server.pid)
    assert not server.healthy()
