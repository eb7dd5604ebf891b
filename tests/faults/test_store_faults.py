"""Processes that die at the worst moment, and what the others see."""

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from dure.errors import StoreLost
from dure.store import FileStore, TCPStore
from procs.store_programs import line, running

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_writer_killed_in_the_middle_of_a_record_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = """
store = FileStore(args[0])
store.set("whole", "1")
pwrite = os.pwrite
def half(fd, data, at):
    pwrite(fd, data[: len(data) // 2], at)
    say("written")
    sys.stdin.read()
os.pwrite = half
store.set("torn", "x" * 100)
"""
    with running((code, str(path))) as (writer,):
        assert line(writer) == "written"  # it holds the lock now, for ever
        size = path.stat().st_size
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        store = FileStore(path, timeout=TIMEOUT)
        assert store.list_keys() == ["whole"]
        assert path.stat().st_size != size
        store.set("after", "2")
        assert FileStore(path).multi_get(["whole", "after"]) == [b"1", b"2"]


@pytest.mark.parametrize("child", ["", "os.fork() or sys.exit(sys.stdin.read())"])
def test_a_killed_server_is_noticed_although_a_forked_child_of_it_lives(child: str) -> None:
    code = """
store = TCPStore("127.0.0.1", 0, is_master=True)
other = TCPStore("127.0.0.1", store.port)
CHILD
say(store.port)
sys.stdin.read()
"""
    with running((code.replace("CHILD", child),)) as (server,):
        store = TCPStore("127.0.0.1", int(line(server)), timeout=TIMEOUT)
        store.set("pid", str(server.pid))
        server.kill()
        start = time.monotonic()
        with pytest.raises(StoreLost):
            store.get("never")
        store.close()
        assert time.monotonic() - start < 15


def test_a_stopped_server_ends_in_a_timeout() -> None:
    code = """
store = TCPStore("127.0.0.1", 0, is_master=True)
say(store.port)
sys.stdin.read()
"""
    with running((code,)) as (server,):
        store = TCPStore("127.0.0.1", int(line(server)), timeout=timedelta(milliseconds=100))
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            store.get("k")
        server.send_signal(signal.SIGCONT)
        store.set_timeout(TIMEOUT)
        assert store.add("n", 1) == 1
        store.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_that_dies_before_all_came_is_named(kind: str, port: int, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/meeting"
    code = "say('up'); rendezvous(args[0], int(args[1]), 3, timeout=timedelta(seconds=20))"
    with running((code, url, "0"), (code, url, "1")) as programs:
        for program in programs:
            line(program)
        watched = WATCH % (url,)
        with running((watched,)) as (watcher,):
            assert line(watcher) == "both came"
            programs[1].kill()
            programs[1].wait()
            _, err = programs[0].communicate(timeout=100)
        assert "RendezvousError" in err
        assert f"pid {programs[1].pid}" in err


WATCH = """
from dure.store.init_method import find_place
from dure.store.prefix import PrefixStore
spot = find_place("%s", 2, 3)
store = spot.place.open(2, 3, 20)
PrefixStore(f"dure/{spot.place.name}/", store).wait(["0/member/0", "0/member/1"])
say("both came")
sys.stdin.read()
os._exit(0)
"""
