"""The lock on a folder in a store without locks, with a clock of its own."""

import errno
import os

import msgspec
import pytest

from dure.checkpoint import lease
from dure.checkpoint.folder import Folder
from dure.checkpoint.fsspec_path import FsspecPath
from dure.checkpoint.lock_records import LockRecord
from dure.store.identity import Identity, myself, start_of
from tests.waiting import until

memory = pytest.importorskip("fsspec.implementations.memory", reason="needs fsspec")
MemoryFileSystem = memory.MemoryFileSystem
RUN = FsspecPath("memory://leases/a")
LOCK = RUN / ".lock"
FAR = Identity(4711, "81234", "node7", "another boot")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Waiting takes no time."""
    now = [0.0]
    MemoryFileSystem.store.clear()
    monkeypatch.setattr(lease, "_clock", lambda: now[0])
    monkeypatch.setattr(lease, "_pause", lambda s: now.__setitem__(0, now[0] + s))
    yield now
    MemoryFileSystem.store.clear()


def _written(process, token="theirs", count=0):
    content = lease._Content(LockRecord("their job", process), token, True, count)
    LOCK.write(msgspec.json.encode(content))


def _saves():
    mine = Folder(RUN)
    mine.hold()
    mine.check()
    mine.release()


def test_the_lock_is_an_object_during_a_save_and_absent_after_it(clock):
    mine = Folder(RUN)
    mine.hold()
    assert RUN.names() == [".lock"]
    mine.release()
    assert RUN.names() == []
    assert clock[0] == 0


def test_a_holder_of_another_host_that_is_silent_for_a_lease_is_followed(clock):
    _written(FAR)
    _saves()
    assert 60 <= clock[0] <= 61


def test_a_holder_of_another_host_that_renews_is_alive(clock, monkeypatch):
    _written(FAR)

    def pause(s):
        clock[0] += s
        if clock[0] == 30:
            _written(FAR, count=1)

    monkeypatch.setattr(lease, "_pause", pause)
    with pytest.raises(OSError, match="pid 4711 on node7") as caught:
        _saves()
    assert caught.value.errno == errno.EBUSY
    assert clock[0] < 32
    assert RUN.names() == [".lock"]


def test_a_holder_of_this_host_that_lives_is_named_at_once(clock):
    _written(msgspec.structs.replace(myself(), pid=os.getppid(), start=start_of(os.getppid())))
    with pytest.raises(OSError, match=f"pid {os.getppid()}"):
        _saves()
    assert clock[0] == 0


def test_a_holder_of_this_host_that_has_ended_is_followed_at_once(clock):
    _written(msgspec.structs.replace(myself(), start="1"))
    _saves()
    assert clock[0] == 0


def test_a_holder_whose_object_was_replaced_saves_no_more_and_leaves_that_object():
    mine = Folder(RUN)
    mine.hold()
    _written(FAR)
    with pytest.raises(OSError, match="another job has taken the folder over"):
        mine.check()
    mine.release()
    assert RUN.names() == [".lock"]


def test_a_lock_that_cannot_be_made_is_an_error_and_not_waited_for():
    (FsspecPath("memory://leases") / "file").write(b"")
    with pytest.raises(FileExistsError, match="leases/file"):  # there can be no file below it
        Folder(RUN.with_name("file") / "run").hold()


def test_a_store_that_loses_the_lock_is_named(monkeypatch):
    monkeypatch.setattr(FsspecPath, "write", lambda *_, **__: None)
    with pytest.raises(OSError, match=r"written, and is absent: 'memory://leases/a/\.lock'"):
        Folder(RUN).hold()


def test_an_object_of_another_form_holds_for_a_lease(clock):
    LOCK.write(b"{")
    _saves()
    assert 60 <= clock[0] <= 61


def test_the_object_is_renewed_while_it_is_held(monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    mine = Folder(RUN)
    mine.hold()
    until(lambda: msgspec.json.decode(LOCK.read(0, 1 << 16))["count"] > 1)
    mine.release()
