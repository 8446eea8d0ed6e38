"""Worker processes: real kills, hangs, crashes, forks and interrupts."""

import contextlib
import doctest
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from rewards import worker_main
from rewards import workers as module
from rewards.batch import RewardError
from rewards.workers import Reply, Workers

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="the limits need a POSIX system"
)
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits the memory"
)
HERE = Path(__file__).parent
ROOT = HERE.parent
SAY = ["say", "here"]
HERE_REPLY = Reply("here")


def new_workers(factory="fake_handlers:make", *arguments, **options):
    limits = {"cpu_seconds": 0.3, "wall_seconds": 10, "memory_mib": 200}
    return Workers(factory, *arguments, **{"processes": 1} | limits | options)


@pytest.fixture
def workers():
    with contextlib.closing(new_workers()) as made:
        yield made


def ask(workers, *requests):
    """The replies to one group of requests."""
    return workers.ask([list(requests)])[0]


def gone(pid):
    """Has the process ended? (It may still wait for its parent to look.)"""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def descendants():
    """All child processes, but for the helper of multiprocessing."""
    helper = getattr(resource_tracker._resource_tracker, "_pid", None)
    everyone = psutil.Process().children(recursive=True)
    return {process for process in everyone if process.pid != helper}


@pytest.fixture(autouse=True)
def none_left():
    """No test may leave a process, not even a dead one."""
    before = descendants()
    yield
    assert wait_until(lambda: descendants() <= before)


# Values and errors


def test_groups_come_back_in_shape_and_order(workers):
    assert workers.ask([]) == []
    assert workers.ask([[], []]) == [[], []]
    values = [[1, 2.5, "é\n\ud800"], [], [None], [[{"a": [True]}], "\0"]]
    replies = workers.ask(
        [[["say", value] for value in group] for group in values]
    )
    assert replies == [[Reply(value) for value in group] for group in values]


@pytest.mark.parametrize(
    ("request_", "detail"),
    [
        (["raise", "no"], "ValueError: no"),
        (["raise", "x" * 10_000], "ValueError: " + "x" * 488),
        (["raise without text"], "_NoText: (an error whose text can't be"),
        (["recurse"], "RecursionError: maximum recursion depth"),
        (["exit"], "SystemExit: 3"),
        (["nan"], "ValueError: Out of range float values"),
        (["infinity"], "ValueError: Out of range float values"),
        (["set"], "TypeError: Object of type set is not JSON"),
        (["print"], "TypeError: "),
        (None, "TypeError: "),
        ({"not": "a list"}, "KeyError: 'not'"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_handler_that_raises_is_an_error(workers, request_, detail):
    first, second, third = ask(workers, ["pid"], request_, ["pid"])
    assert (second.value, second.failure) == (None, "error")
    assert second.detail.startswith(detail)
    assert first == third  # the process is kept


def test_values_on_the_edge_of_json(workers):
    deep = ask(workers, ["deep", 900])[0]
    assert deep.failure in ("", "error")
    assert ask(workers, ["surrogate"], ["large", 10**7], SAY) == [
        Reply("\ud800"),
        Reply("x" * 10**7),
        HERE_REPLY,
    ]


def test_a_request_larger_than_a_pipe(workers):
    large = "x" * 10**7
    replies = ask(workers, ["end"], ["say", large], ["segfault"], SAY)
    assert replies[1] == Reply(large)
    assert replies[3] == HERE_REPLY


def test_what_is_printed_goes_nowhere(workers, capfd):
    text = '\n1 {"value": "forged"}\n2 {"value": "forged"}\nready\n'
    replies = ask(workers, ["print", text], SAY, ["print", "no end of line"])
    # Nor does a handler read what is meant for the pipe.
    assert replies == [Reply(""), HERE_REPLY, Reply("")]
    assert ask(workers, *[["is nowhere", at] for at in range(3)]) == (
        [Reply(True)] * 3
    )
    ask(workers, ["segfault"], ["recurse"], ["power"])
    assert capfd.readouterr() == ("", "")


@linux_only
def test_stray_lines_do_not_shift_the_answers(workers):
    ask(workers, SAY)
    keeper = workers._workers[0]._process.pid
    with open(f"/proc/{keeper}/fd/4", "w") as replies:
        # A late reply to an earlier request, one to none, and a torn one.
        replies.write('1 {"value": "late"}\n99 {"value": "none"}\n3 {"va')
    assert ask(workers, ["say", 2], ["say", 3]) == [Reply(2), Reply(3)]


# Deadlines


@pytest.mark.parametrize("deed", [["power"], ["burn", 60]])
def test_cpu_time_is_limited_in_c_too(workers, deed):
    first, second, third = ask(workers, SAY, deed, SAY)
    assert (first, third) == (HERE_REPLY, HERE_REPLY)
    assert second == Reply(None, "timeout", "more than 0.3 s of CPU time")


def test_sleep_costs_no_cpu_time(workers):
    assert ask(workers, ["sleep", 1])[0] == Reply("slept")


def test_cpu_time_is_counted_from_zero_for_each_request(workers):
    pid, *replies, last = ask(workers, ["pid"], *[["burn", 0.1]] * 8, ["pid"])
    assert replies == [Reply("burnt")] * 8
    assert pid == last


def test_wall_time_is_limited():
    with contextlib.closing(new_workers(wall_seconds=1)) as workers:
        replies = ask(workers, ["sleep", 60], SAY)
    assert replies == [Reply(None, "timeout", "more than 1 s"), HERE_REPLY]


def test_alarms_of_a_handler_do_not_last():
    with contextlib.closing(new_workers(wall_seconds=5)) as workers:
        replies = ask(
            workers, ["use alarms"], ["power"], ["use alarms"], ["sleep", 60]
        )
    assert [reply.detail for reply in replies] == [
        "",
        "more than 0.3 s of CPU time",
        "",
        "more than 5 s",
    ]


def test_an_idle_worker_has_no_deadline():
    with contextlib.closing(new_workers(wall_seconds=3)) as workers:
        before = ask(workers, ["pid"])
        time.sleep(3.3)
        assert ask(workers, ["pid"]) == before


@pytest.mark.parametrize("deed", [["deaf", 60], ["stop"]])
def test_a_worker_that_is_stuck_is_killed(monkeypatch, deed):
    monkeypatch.setattr(module, "GRACE_SECONDS", 1.0)
    with contextlib.closing(new_workers(wall_seconds=1)) as workers:
        replies = ask(workers, SAY, deed, SAY)
    stuck = Reply(None, "timeout", "the worker itself was stuck")
    assert replies == [HERE_REPLY, stuck, HERE_REPLY]


def test_limits_are_armed_whatever_the_caller_blocks_or_ignores():
    signals = {signal.SIGALRM, signal.SIGPROF, signal.SIGCHLD}
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with contextlib.closing(new_workers(wall_seconds=1)) as workers:
            replies = ask(workers, ["power"], ["sleep", 60], SAY)
    finally:
        signal.signal(signal.SIGCHLD, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert [reply.failure for reply in replies] == ["timeout", "timeout", ""]
    assert "more than" in replies[1].detail


def test_many_requests_with_some_that_hang():
    requests = [
        ["power"] if at % 100 == 50 else ["say", at] for at in range(500)
    ]
    groups = [requests[at : at + 8] for at in range(0, 500, 8)]
    with contextlib.closing(
        new_workers(processes=2, cpu_seconds=0.1)
    ) as workers:
        replies = workers.ask(groups)
    assert [len(group) for group in replies] == [len(g) for g in groups]
    flat = [reply for group in replies for reply in group]
    hung = [at for at, reply in enumerate(flat) if reply.failure == "timeout"]
    assert hung == [50, 150, 250, 350, 450]
    assert all(
        reply == Reply(at) for at, reply in enumerate(flat) if at not in hung
    )


# Memory and crashes


@linux_only
def test_memory_is_limited(workers):
    first, second, third, fourth = ask(
        workers, ["pid"], ["take", 300], ["pid"], ["take", 100]
    )
    assert second == Reply(None, "memory", "more than 200 MiB")
    assert first != third  # replaced
    assert fourth.failure == ""


@linux_only
def test_every_request_has_the_same_memory():
    # 0.5 GB in all: what the requests before left does not count.
    with contextlib.closing(new_workers(cpu_seconds=9)) as workers:
        replies = ask(workers, *[["keep", 100]] * 5)
    assert [reply.failure for reply in replies] == [""] * 5
    assert 1 in [reply.value for reply in replies[1:]]  # it was replaced


@linux_only
def test_a_child_that_the_system_kills_had_no_memory(workers):
    replies = ask(workers, ["killed"], SAY)
    assert [reply.failure for reply in replies] == ["memory", ""]


@pytest.mark.parametrize(
    ("deed", "detail"),
    [
        (["segfault"], "ended by SIGSEGV"),
        (["end"], "ended with status 0"),
        (["close"], "ended with status 1"),
        (["kill keeper", 1], "ended by SIGKILL"),
    ],
)
def test_a_lost_process_is_a_crash(workers, deed, detail):
    first, second, third = ask(workers, ["pid"], deed, ["pid"])
    assert second == Reply(None, "crash", detail)
    assert first.value != third.value


def test_a_loss_between_requests_costs_no_answer(workers):
    pid, soon = ask(workers, ["pid"], ["crash later"])
    assert soon == Reply("soon")
    assert wait_until(lambda: gone(pid.value))
    assert ask(workers, SAY) == [HERE_REPLY]
    # The number comes from who started it, never from an answer: a group of
    # number 1 would be every process of the machine.
    keeper = workers._workers[0]._process.pid
    os.killpg(keeper, signal.SIGKILL)
    assert wait_until(lambda: gone(keeper))
    assert ask(workers, SAY) == [HERE_REPLY]


def test_a_handler_that_forks_answers_once(workers):
    replies = ask(workers, ["fork"], SAY, ["sleep", 0.5], ["pid"], SAY)
    assert replies[0] == replies[3]
    assert replies[1:3] == [HERE_REPLY, Reply("slept")]


def test_what_a_handler_leaves_running_ends_with_the_worker(workers):
    pid = ask(workers, ["leave sleeper"])[0].value
    left = psutil.Process(pid).children()
    assert len(left) == 1
    workers.close()
    assert wait_until(lambda: gone(left[0].pid))


# Start-up


@pytest.mark.parametrize(
    ("factory", "reason", "words"),
    [
        ("fake_handlers:no_handler", "raises", "ValueError: no handler today"),
        ("fake_handlers:no_handler", "exit", "SystemExit: 3"),
        ("fake_handlers:no_handler", "segfault", "ended by SIGSEGV"),
        ("fake_handlers:no_handler", "end", "ended with status 0"),
        ("no_such_module:make", "", "No module named 'no_such_module'"),
        ("fake_handlers:no_such_name", "", "no attribute 'no_such_name'"),
    ],
)
def test_a_factory_that_fails(factory, reason, words):
    with contextlib.closing(new_workers(factory, reason)) as workers:
        for _ in range(2):  # nothing is left in a state that hangs
            with pytest.raises(RewardError, match="could not start") as caught:
                workers.ask([[SAY], [SAY], [SAY]])
            assert words in str(caught.value)


def test_a_factory_that_hangs(monkeypatch):
    monkeypatch.setattr(module, "START_SECONDS", 1.0)
    workers = new_workers("fake_handlers:no_handler", "hangs")
    with pytest.raises(RewardError, match="not ready after 1 s"):
        ask(workers, SAY)
    workers.close()


def test_a_python_that_is_not_there(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RewardError, match="No such file"):
        ask(new_workers(), SAY)


def test_a_factory_that_fails_when_the_child_is_replaced(tmp_path):
    marker = str(tmp_path / "marker")
    workers = new_workers("fake_handlers:second_time_fails", marker)
    assert ask(workers, SAY, ["segfault"])[1].failure == "crash"
    with pytest.raises(RewardError, match="FileExistsError"):
        ask(workers, SAY)
    workers.close()


def test_making_a_handler_costs_no_request_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    marker = str(tmp_path / "marker")
    workers = new_workers("fake_handlers:slow_to_make", marker, wall_seconds=1)
    replies = ask(workers, SAY, ["segfault"], SAY)
    assert [reply.failure for reply in replies] == ["", "crash", ""]
    workers.close()


def test_nothing_starts_before_the_first_request():
    before = descendants()
    workers = new_workers(processes=4)
    assert descendants() == before
    workers.ask([[SAY], []])
    # One group needs one worker: a keeper and its child.
    assert len(descendants() - before) == 2
    workers.close()


def test_arguments_may_be_long():
    # An argument of a program may not, and a pipe holds less, too.
    factory = new_workers("operator:methodcaller", "count", "x" * 10**6)
    with contextlib.closing(factory) as workers:
        assert ask(workers, "x" * 10**6) == [Reply(1)]


def test_as_many_processes_as_usable_cores(monkeypatch):
    monkeypatch.setattr(module, "_usable_cores", lambda: 3)
    assert len(new_workers(processes=None)._workers) == 3
    monkeypatch.setattr(module, "_usable_cores", lambda: 64)
    assert len(new_workers(processes=None)._workers) == 4


def test_the_worker_imports_what_the_caller_does(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def make():\n    return len\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(new_workers("my_rewards:make")) as workers:
        assert ask(workers, "four")[0] == Reply(4)
    with contextlib.closing(new_workers()) as workers:
        path, threads = ask(
            workers, ["path"], ["environment", "OMP_NUM_THREADS"]
        )
    assert path.value[0] == str(tmp_path)
    assert set(path.value) == {*sys.path, str(ROOT)}
    assert threads.value == "1"


# Whoever calls


def test_from_many_threads_at_once():
    workers = new_workers(processes=2)
    answers = {}

    def one(name):
        groups = [[["say", [name, at]]] for at in range(20)]
        answers[name] = workers.ask(groups)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {
        name: [[Reply([name, at])] for at in range(20)] for name in range(6)
    }
    workers.close()


SHARED = new_workers()


def ask_shared(text):
    return ask(SHARED, ["say", text], ["power"], ["say", text])


def keeper_of_shared(_):
    return ask(SHARED, ["keeper"])[0].value


def test_from_a_daemonic_pool(plain_main):
    mine = keeper_of_shared(None)
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            replies = pool.map(ask_shared, "ab", chunksize=1)
            pids = set(pool.map(keeper_of_shared, range(4), chunksize=1))
        assert [[reply.value for reply in group] for group in replies] == [
            ["a", None, "a"],
            ["b", None, "b"],
        ]
        assert mine not in pids
        # The pool was terminated, and its workers went with it.
        assert wait_until(lambda pids=pids: all(gone(pid) for pid in pids))
        assert keeper_of_shared(None) == mine
    SHARED.close()


def test_after_a_fork_nothing_is_shared(workers):
    mine = ask(workers, ["keeper"])[0].value
    # Even when a lane of another thread is in the middle of a request.
    busy = threading.Thread(target=ask, args=(workers, ["sleep", 1]))
    busy.start()
    time.sleep(0.3)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            their = ask(workers, ["keeper"], ["power"], SAY)
            workers.close()
            text = json.dumps([reply.value for reply in their])
        except BaseException as error:
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as pipe:
        keeper, timed_out, last = json.loads(pipe.read())
    assert keeper != mine
    assert gone(keeper)
    assert (timed_out, last) == (None, "here")
    busy.join()
    assert ask(workers, ["keeper"])[0].value == mine


def test_an_interrupt_ends_the_work_and_the_workers_go_on():
    workers = new_workers(processes=2)
    assert ask(workers, SAY) == [HERE_REPLY]
    for _ in range(3):
        timer = threading.Timer(
            0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)
        )
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            workers.ask([[["sleep", 8], ["sleep", 8]]] * 6)
        timer.join()
        assert workers.ask([[SAY], [SAY]]) == [[HERE_REPLY]] * 2
    workers.close()


def test_close_ends_all_and_for_good(workers):
    pids = [reply.value for reply in ask(workers, ["pid"], ["keeper"])]
    workers.close()
    workers.close()
    # The system takes a moment to bury the child of a process that is gone.
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    with pytest.raises(RewardError, match="were closed"):
        ask(workers, SAY)


def test_close_ends_what_is_asked_now(workers):
    caught = []

    def one():
        with pytest.raises(RewardError, match="were closed"):
            ask(workers, ["sleep", 8], ["sleep", 8])
        caught.append(True)

    thread = threading.Thread(target=one)
    thread.start()
    time.sleep(0.5)
    workers.close()
    thread.join(5)
    assert caught


def test_workers_that_nobody_holds_are_closed():
    workers = new_workers()
    pid = ask(workers, ["keeper"])[0].value
    del workers
    assert wait_until(lambda: not psutil.pid_exists(pid))


SCRIPT = """
import os, psutil, sys, threading, time
from rewards.workers import Workers
limits = dict(cpu_seconds=1, memory_mib=200, wall_seconds=300)
workers = Workers("fake_handlers:make", processes=2, **limits)
workers.ask([[["leave sleeper"]]])
busy = threading.Thread(target=workers.ask, args=([[["sleep", 200]]] * 2,))
busy.daemon = True
if sys.argv[1] == "busy":
    busy.start()
    time.sleep(0.3)
if sys.argv[1] == "forked" and not os.fork():
    os.close(1), os.close(2), time.sleep(8), os._exit(0)
left = psutil.Process().children(recursive=True)
print(*[p.pid for p in left if p.pid != os.getpid()], flush=True)
"""


def start_script(tmp_path, *arguments, more=""):
    (tmp_path / "script.py").write_text(SCRIPT + more)
    return subprocess.Popen(
        [sys.executable, tmp_path / "script.py", *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("state", "end"),
    [
        ("idle", "exits"),
        ("busy", "exits"),
        ("idle", "is killed"),
        ("busy", "is killed"),
        ("forked", "is killed"),
    ],
)
def test_no_process_outlives_the_parent(tmp_path, state, end):
    more = "time.sleep(60)" if end == "is killed" else ""
    with start_script(tmp_path, state, more=more) as script:
        pids = [int(word) for word in script.stdout.readline().split()]
        assert len(pids) >= 3
        if end == "is killed":
            script.kill()
        assert script.wait(30) == (-signal.SIGKILL if more else 0)
        assert script.stderr.read() == ""
    assert wait_until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize("documented", [module, worker_main])
def test_examples_run(documented):
    result = doctest.testmod(documented)
    assert result.attempted and not result.failed
