"""The lock on a folder: children that are forked while it is held, and a holder that is stopped."""

import errno
import os
import signal
from multiprocessing import current_process

import pytest

from dure.checkpoint import lock
from dure.checkpoint.catalog import Manifest, clear, publish
from dure.checkpoint.folder import Folder
from dure.testing.pool import start_server
from tests.waiting import PATIENCE_S


def _hold_and_fork(path, pipe, release):
    """Fork a child while the lock is held, and send its number; then be killed."""
    current_process().authkey = b"of a program that was executed"
    held = Folder(path)
    begun = held.begin(1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"!")
        signal.pause()
    os.read(read_end, 1)  # from here on the child no longer has the file of the lock open
    if release:
        held.release()
    pipe.send((child, str(begun)))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_lock_ends_although_a_child_forked_meanwhile_lives(tmp_path, monkeypatch, how):
    context = start_server()
    here, there = context.Pipe()
    holder = context.Process(target=_hold_and_fork, args=(tmp_path, there, how == "released"))
    holder.start()
    assert here.poll(PATIENCE_S)
    child, _ = here.recv()
    try:
        mine = Folder(tmp_path)
        if how == "killed":
            with pytest.raises(OSError, match="another job"):
                mine.hold()
            here.send("end")
            holder.join(PATIENCE_S)
        monkeypatch.setattr(lock, "_pause", lambda _: pytest.fail("the lock is still held"))
        mine.hold()
        mine.release()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.join()


def _release_in_a_child(path, pipe):
    held = Folder(path)
    begun = held.begin(1)
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    try:
        Folder(path).hold()
    except OSError as e:
        pipe.send((begun.is_dir(), e.errno))
    else:
        pipe.send((begun.is_dir(), None))


def test_a_forked_child_neither_releases_the_lock_nor_removes_what_is_being_saved(tmp_path):
    context = start_server()
    here, there = context.Pipe()
    holder = context.Process(target=_release_in_a_child, args=(tmp_path, there))
    holder.start()
    assert here.poll(PATIENCE_S)
    assert here.recv() == (True, errno.EBUSY)
    holder.join()


def _save_instead(path, pipe):
    (path / ".lock").unlink()  # as another host does when the holder's lease is over
    begun = Folder(path).begin(3)
    (begun / "part").write_text("a half")
    pipe.send("begun")
    pipe.recv()


def test_a_holder_that_was_stopped_before_the_rename_commits_no_other_save(tmp_path, monkeypatch):
    context = start_server()
    here, there = context.Pipe()
    other = context.Process(target=_save_instead, args=(tmp_path, there))
    mine = Folder(tmp_path)
    begun, check = mine.begin(3), mine.check

    def stopped_after_the_check():
        check()
        other.start()
        assert here.poll(PATIENCE_S) and here.recv() == "begun"

    monkeypatch.setattr(mine, "check", stopped_after_the_check)
    try:
        with pytest.raises(FileNotFoundError):
            mine.commit(begun)
        assert mine.places() == []
    finally:
        other.kill()
        other.join()


def test_a_manifest_of_a_stopped_save_is_never_put_in_place_after_the_next_one_began(tmp_path):
    with pytest.raises(FileNotFoundError):
        publish(tmp_path, Manifest({}, 1, "0" * 32, {}, "{}"), check=lambda: clear(tmp_path))
    assert list(tmp_path.iterdir()) == []
