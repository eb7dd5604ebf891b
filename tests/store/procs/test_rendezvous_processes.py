"""Stores and rendezvous between real processes: forks, exits, deaths at the worst moment."""

import signal
from datetime import timedelta
from pathlib import Path

import pytest

from dure.store import FileStore, TCPStore
from tests.store.conftest import TIMEOUT
from tests.store.procs.store_programs import line, output, running
from tests.waiting import stop

MEET = """
url, rank, times = args[0], int(args[1]), int(args[2])
for _ in range(times):
    meeting = rendezvous(url, rank, 3, timeout=PATIENCE)
    meeting.store.set(f"{rank}", str(os.getpid()))
    pids = meeting.store.multi_get([str(r) for r in range(3)])
    assert [int(pid) for pid in pids] == [member.pid for member in meeting.members]
    assert meeting.same_host and not meeting.same_process
    meeting.close()
"""


def test_processes_meet_ten_times(url: str, tmp_path: Path) -> None:
    with running(*((MEET, url, str(rank), "10") for rank in range(3))) as programs:
        for program in programs:
            output(program)
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize("end", ["pass", "del meeting"])
def test_a_program_that_ends_without_leaving_does_not_hang(end: str, port: int) -> None:
    code = "meeting = rendezvous(args[0], int(args[1]), 2, timeout=PATIENCE)\n" + end
    url = f"tcp://127.0.0.1:{port}"
    with running((code, url, "0"), (code, url, "1")) as programs:
        for program in programs:
            output(program)


def test_children_of_multiprocessing_leave_what_they_forgot(tmp_path: Path) -> None:
    code = """
import multiprocessing
def rank(number):
    rendezvous(f"file://{args[0]}", number, 2, timeout=PATIENCE)
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


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_forked_child_uses_the_store_and_harms_nobody(kind: str, tmp_path: Path) -> None:
    code = """
import threading
if args[0] == "tcp":
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
    other = TCPStore("127.0.0.1", master.port, timeout=PATIENCE)
else:
    master, other = FileStore(args[1], timeout=PATIENCE), FileStore(args[1], timeout=PATIENCE)
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
    with running((code, kind, str(tmp_path / "store"))) as (program,):
        assert output(program) == "good"


def test_a_forked_child_that_uses_the_store_does_not_release_its_parents_lock(
    tmp_path: Path,
) -> None:
    code = """
import fcntl
from datetime import timedelta
from dure.errors import StoreTimeout
store = FileStore(args[0], timeout=PATIENCE)
with store._locked():
    child = os.fork()
    if child == 0:
        store.set_timeout(timedelta(milliseconds=50))
        try:
            store.set("k", "v")
        except StoreTimeout:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with open(args[0]) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("still held")
store.set("k", "v")
"""
    with running((code, str(tmp_path / "store"))) as (program,):
        assert line(program) == "still held"
        output(program)


def test_a_child_does_not_keep_the_port() -> None:
    """Nor one that has not yet run a line of Python: C's `fork` calls none of Python's hooks."""
    code = """
import ctypes, signal
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
stopped = ctypes.PyDLL(None).fork()
if stopped == 0:
    while True: signal.pause()
try:
    master.close()
    TCPStore("127.0.0.1", master.port, is_master=True, timeout=PATIENCE).set("k", "v")
finally:
    os.kill(stopped, signal.SIGKILL)
say("good")
"""
    with running((code,)) as (program,):
        assert line(program) == "good"
        output(program)


def test_a_stopped_server_ends_in_a_timeout() -> None:
    code = """
store = TCPStore("127.0.0.1", 0, is_master=True)
say(store.port)
sys.stdin.read()
"""
    with running((code,)) as (server,):
        store = TCPStore("127.0.0.1", int(line(server)), timeout=TIMEOUT)
        stop(server.pid)
        store.set_timeout(timedelta(milliseconds=100))
        with pytest.raises(TimeoutError):
            store.get("k")
        server.send_signal(signal.SIGCONT)
        store.set_timeout(TIMEOUT)
        assert store.add("n", 1) == 1
        store.close()


WATCH = """
from dure.store.init_method import read_init_method
from dure.store.prefix import PrefixStore
method = read_init_method(args[0], 2, 3)
store = method.endpoint.open(2, 3, PATIENCE.total_seconds())
PrefixStore(f"dure/{method.endpoint.name}/", store).wait(["0/member/0", "0/member/1"])
say("both came")
sys.stdin.read()
os._exit(0)
"""


JOIN = """
try:
    rendezvous(args[0], int(args[1]), 3, timeout=PATIENCE)
except RendezvousError as error:
    say(type(error).__name__, error.what, error.seen)
"""


def test_a_rank_that_dies_before_all_came_is_named(url: str) -> None:
    with running((JOIN, url, "0"), (JOIN, url, "1"), (WATCH, url)) as (first, second, watcher):
        assert line(watcher) == "both came"
        second.kill()
        second.wait()
        said = line(first)
        assert said.startswith("RendezvousError")
        assert f"pid {second.pid}" in said


def test_two_processes_with_the_number_0_are_both_named_to_all(url: str) -> None:
    # The file goes with its last user; rank 1 may open it when the other two have left already.
    kept = FileStore(url.removeprefix("file://"), timeout=TIMEOUT) if "file" in url else None
    with running(*((JOIN, url, rank) for rank in "010")) as (first, second, third):
        for program in (first, second, third):
            said = line(program)
            assert "two processes have the number 0" in said
            assert f"pid {first.pid} " in said
            assert f"pid {third.pid} " in said
    if kept is not None:
        kept.close()


def test_a_second_number_0_that_comes_before_the_process_that_serves_is_named(port: int) -> None:
    serve = """
store = TCPStore("127.0.0.1", int(args[2]), is_master=True, timeout=PATIENCE)
say("serves")
sys.stdin.readline()
"""
    url = f"tcp://127.0.0.1:{port}"
    with running((serve + JOIN, url, "0", str(port))) as (server,):
        assert line(server) == "serves"
        with running((JOIN, url, "0"), (JOIN, url, "1"), (WATCH, url)) as (first, second, watcher):
            assert line(watcher) == "both came"
            print(file=server.stdin, flush=True)
            for program in (server, first, second):
                assert "two processes have the number 0" in line(program)
