"""Stores and rendezvous between real processes: forks, exits, torchrun, a crowd."""

from pathlib import Path

import pytest

from tests.store.procs.store_programs import line, output, running

MEET = """
url, rank, size, times = args[0], int(args[1]), int(args[2]), int(args[3])
for _ in range(times):
    meeting = rendezvous(url, rank, size, timeout=PATIENCE)
    meeting.store.set(f"{rank}", str(os.getpid()))
    pids = meeting.store.multi_get([str(r) for r in range(size)])
    assert [int(pid) for pid in pids] == [member.pid for member in meeting.members]
    assert meeting.same_host and not meeting.same_process
    meeting.close()
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


def test_a_forked_child_uses_the_store_and_harms_nobody() -> None:
    code = """
import threading
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
other = TCPStore("127.0.0.1", master.port, timeout=PATIENCE)
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
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
port = master.port
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
master.close()
TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE).set("k", "v")
say("good")
"""
    with running((code,)) as (program,):
        assert line(program) == "good"
        output(program)


def test_a_child_just_forked_does_not_keep_the_port() -> None:
    """A child that has not yet run a line of Python: C's `fork` calls none of Python's hooks."""
    code = """
import ctypes, signal
master = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
child = ctypes.PyDLL(None).fork()
if child == 0:
    while True: signal.pause()
try:
    master.close()
    TCPStore("127.0.0.1", master.port, is_master=True, timeout=PATIENCE)
finally:
    os.kill(child, signal.SIGKILL)
say("good")
"""
    with running((code,)) as (program,):
        assert output(program) == "good"
