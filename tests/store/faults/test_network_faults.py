"""Processes that die at the worst moment, and what the others see."""

import signal
from datetime import timedelta
from pathlib import Path

import pytest

from dure.store import FileStore, TCPStore
from tests.store.procs.store_programs import line, running
from tests.waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


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


def test_a_stopped_server_ends_in_a_timeout() -> None:
    code = """
store = TCPStore("127.0.0.1", 0, is_master=True)
say(store.port)
sys.stdin.read()
"""
    with running((code,)) as (server,):
        store = TCPStore("127.0.0.1", int(line(server)), timeout=TIMEOUT)
        server.send_signal(signal.SIGSTOP)
        store.set_timeout(timedelta(milliseconds=100))
        with pytest.raises(TimeoutError):
            store.get("k")
        server.send_signal(signal.SIGCONT)
        store.set_timeout(TIMEOUT)
        assert store.add("n", 1) == 1
        store.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_that_dies_before_all_came_is_named(kind: str, port: int, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/meeting"
    code = """
try:
    rendezvous(args[0], int(args[1]), 3, timeout=PATIENCE)
except RendezvousError as error:
    say(type(error).__name__, error.seen)
"""
    with running((code, url, "0"), (code, url, "1"), (WATCH, url)) as (first, second, watcher):
        assert line(watcher) == "both came"
        second.kill()
        second.wait()
        said = line(first)
        assert said.startswith("RendezvousError")
        assert f"pid {second.pid}" in said


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
