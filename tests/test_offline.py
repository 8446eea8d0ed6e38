"""The pocket profile opens no connection beyond this machine."""

import os
import subprocess
import sys

PROGRAM = """
import ipaddress, socket, sys

attempts = []


def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto"):
        if not isinstance(arguments[1], tuple):
            return  # a socket file
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "localhost"):
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    attempts.append(f"{event} {host}")
    raise ConnectionRefusedError(f"no connection to {host} in this test")


sys.addaudithook(watch)
for probe in (
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
    lambda: socket.getaddrinfo("huggingface.co", 443),
):
    try:
        probe()
    except ConnectionRefusedError:
        pass
assert len(attempts) == 2, attempts  # the watch is awake
attempts.clear()

# What the lesson does, in its order.
from grpo_lab import environment

environment.prepare()

from grpo_lab import data, grid, models, profiles, prompts
from rewards import FIVE_PART

row = profiles.choose("pocket", gpu_memory=0)
splits = data.load_splits(row.data, train_rows=8, eval_rows=4)
settings = row.settings(
    {"pocket-qwen": (1e-3,)},
    max_steps=1,
    completions_per_step=8,
    micro_batch=8,
    max_completion_length=16,
)
environment.describe()
policy, tokenizer = models.load_policy("pocket-qwen")
longest = prompts.longest_prompt(tokenizer, splits.train["prompt"])
pace = grid.measure_pace(policy, tokenizer, settings[0], splits)
grid.estimates(settings, len(splits.train), longest, pace)
grid.check_memory(settings, longest)
result = grid.run(settings, grid.Task(splits, FIVE_PART), sys.argv[1])
result.raise_failures()
assert len(result.leaderboard()) == 1
print("attempts:", attempts)
"""


def test_the_pocket_profile_stays_on_this_machine(tmp_path):
    """Nothing forbids it the network, as on a learner's machine."""
    free = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRL_", "TRANSFORMERS_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "grid")],
        env={**free, "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "attempts: []"
