"""Stores and rendezvous between real processes: forks, exits, torchrun, a crowd."""

from pathlib import Path

import pytest

from procs.store_programs import line, output, running

MEET = """
url, rank, size, times = args[0], int(args[1]), int(args[2]), int(args[3])
for _ in range(times):
    start = time.perf_counter()
    meeting = rendezvous(url, rank, size, timeout=timedelta(seconds=20))
    took = time.perf_counter() - start
    meeting.store.set(f"{rank}", str(os.getpid()))
    pids = meeting.store.multi_get([str(r) for r in range(size)])
    assert [int(pid) for pid in pids] == [member.pid for member in meeting.members]
    assert meeting.same_host and not meeting.same_process
    meeting.close()
say(took)
"""


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_processes_meet_ten_times(kind: str, port: int, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/meeting"
    with running(*((MEET, url, str(rank), "3", "10") for rank in range(3))) as programs:
        for program in programs:
            output(program)
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "meeting.close()", "del meeting"])
def test_a_program_that_ends_does_not_hang(end: str, port: int) -> None:
    code = "meeting = rendezvous(args[0], int(args[1]), 2, timeout=timedelta(seconds=20))\n" + end
    url = f"tcp://127.0.0.1:{port}"
    with running((code, url, "0"), (code, url, "1")) as programs:
        for program in programs:
            output(program, 10)


def test_children_of_multiprocessing_leave_what_they_forgot(tmp_path: Path) -> None:
    code = """
import multiprocessing
def rank(number):
    rendezvous(f"file://{args[0]}", number, 2, timeout=timedelta(seconds=20))
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number,)) for number in range(2)]
    for process in ranks: process.start()
    for process in ranks: process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
"""
    with running((code, str(tmp_path / "meeting"))) as (program,):
        output(program)
    assert not (tmp_path / "meeting").exists()


def test_a_forked_child_uses_the_store_and_harms_nobody() -> None:
    code = """
import threading
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
other = TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=20))
waiter = threading.Thread(target=other.get, args=("from child",))
waiter.start()
child = os.fork()
if child == 0:
    assert other.add("n", 1) == 1
    master.set("from child", "!")
    del master, other
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
waiter.join()
assert other.add("n", 1) == 2
say("good")
"""
    with running((code,)) as (program,):
        assert output(program) == "good"


def test_a_child_that_lives_on_does_not_keep_the_port() -> None:
    code = """
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
port = master.port
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
master.close()
TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=20)).set("k", "v")
say("good")
"""
    with running((code,)) as (program,):
        assert line(program) == "good"
        output(program)


def test_a_child_just_forked_does_not_keep_the_port() -> None:
    """A child that has not yet run a line of Python: C's `fork` calls none of Python's hooks."""
    code = """
import ctypes, signal
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
child = ctypes.PyDLL(None).fork()
if child == 0:
    while True: signal.pause()
try:
    master.close()
    TCPStore("127.0.0.1", master.port, is_master=True, timeout=timedelta(seconds=20))
finally:
    os.kill(child, signal.SIGKILL)
say("good")
"""
    with running((code,)) as (program,):
        assert output(program) == "good"
