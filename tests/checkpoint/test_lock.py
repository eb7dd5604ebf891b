"""The lock on a folder: records of other hosts, leases, and two saves of one process."""

import errno
import os
import threading

import msgspec
import pytest

from dure.checkpoint import lock
from dure.checkpoint.folder import Folder
from dure.store.identity import Identity
from tests.waiting import until

FAR = Identity(4711, "81234", "node7", "another boot")


@pytest.fixture
def shared(monkeypatch):
    """File systems are taken for those of several hosts, and waiting takes no time."""
    clock = [0.0]
    monkeypatch.setattr(lock, "_ONE_HOST", frozenset())
    monkeypatch.setattr(lock, "_clock", lambda: clock[0])
    monkeypatch.setattr(lock, "_pause", lambda s: clock.__setitem__(0, clock[0] + s))
    return clock


def _record(folder, process=FAR, age_s=0.0):
    path = folder / ".lock"
    path.write_bytes(msgspec.json.encode(lock.LockRecord("their job", process)))
    at = path.stat().st_mtime - age_s
    os.utime(path, (at, at))


def _saves(folder):
    mine = Folder(folder)
    mine.hold()
    mine.release()


def test_a_record_of_another_host_holds_for_the_rest_of_its_lease(tmp_path, shared):
    for age_s, waited_s in [(0, 60), (45, 15), (61, 0), (1000, 0)]:
        shared[0] = 0.0
        _record(tmp_path, age_s=age_s)
        _saves(tmp_path)
        assert waited_s - 0.1 <= shared[0] <= waited_s + 2
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["renewed", "taken over"])
def test_a_holder_on_another_host_that_shows_a_sign_is_alive(tmp_path, shared, monkeypatch, how):
    _record(tmp_path, age_s=20)

    def sign(_):
        if how == "renewed":
            os.utime(tmp_path / ".lock")
        else:
            (tmp_path / ".lock").unlink()
            _record(tmp_path, age_s=20)

    monkeypatch.setattr(lock, "_pause", sign)
    with pytest.raises(OSError, match="pid 4711 on node7") as caught:
        _saves(tmp_path)
    assert caught.value.errno == errno.EBUSY
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("data", [b"", b'{"job": "x", "proc'])
def test_a_record_that_was_not_written_to_its_end_holds_for_a_lease(tmp_path, shared, data):
    (tmp_path / ".lock").write_bytes(data)
    _saves(tmp_path)
    assert 59 <= shared[0] <= 62


def test_a_holder_renews_its_lock_on_a_file_system_of_several_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_ONE_HOST", frozenset())
    monkeypatch.setattr(lock, "RENEW_S", 0.01)
    mine, path = Folder(tmp_path), tmp_path / ".lock"
    mine.hold()
    os.utime(path, (0, 0))
    until(lambda: path.stat().st_mtime > 0, "a renewal")
    mine.release()
    until(lambda: "dure-checkpoint-lock" not in {t.name for t in threading.enumerate()})


def test_a_second_save_of_one_process_waits_for_the_first(tmp_path):
    first, order = Folder(tmp_path), []
    first.hold()
    (tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    second = Folder(tmp_path.parent / f"{tmp_path.name}-link")
    waiting = threading.Thread(target=lambda: (second.hold(), order.append("second")))
    waiting.start()
    with pytest.raises(OSError, match="this thread"):
        Folder(tmp_path).hold()
    order.append("first")
    first.release()
    waiting.join()
    second.release()
    assert order == ["first", "second"]
