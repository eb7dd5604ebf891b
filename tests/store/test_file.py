"""The file store's file: lines without an end, foreign files, files that vanish."""

import fcntl
import os
from datetime import timedelta
from pathlib import Path

import pytest

from dure.errors import StoreError, StoreTimeout
from dure.store import FileStore
from dure.store.builds import own_build
from tests.waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_every_possible_torn_line_is_cut_off(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    store.set("kept", "1")
    whole = path.stat().st_size
    store.set("lost", "2" * 300)  # longer than what is written next
    full = path.read_bytes()
    store.close()
    for size in (*range(whole, whole + 40), *range(whole + 40, len(full), 20), len(full) - 1):
        path.write_bytes(full[:size])  # the same inode: what a killed writer leaves
        reader = FileStore(path, timeout=TIMEOUT)
        assert reader.list_keys() == ["kept"]
        reader.set("next", "3")
        assert FileStore(path, timeout=TIMEOUT).get("next") == b"3"


def test_a_reader_that_is_up_to_date_survives_anothers_torn_line(path: Path) -> None:
    first, second = FileStore(path, timeout=TIMEOUT), FileStore(path, timeout=TIMEOUT)
    first.set("k", "1")
    assert second.get("k") == b"1"
    with path.open("ab") as file:
        file.write(b'[["set", ["k"')
    assert second.list_keys() == ["k"]
    first.set("k", "2")
    assert second.get("k") == b"2"


@pytest.mark.parametrize("content", [b"", b"dure", b"dure store 123"])
def test_an_empty_or_just_begun_file_is_a_store(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "v")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("content", [b"x", b"#!/bin/sh\necho\n", b"dure shop"])
def test_a_foreign_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError):
        FileStore(path, timeout=TIMEOUT)
    assert path.read_bytes() == content


@pytest.mark.parametrize("then", ["deleted", "replaced", "cut short"])
def test_a_file_that_is_not_what_it_was_is_an_error_and_closing_is_not(
    then: str, path: Path
) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "v")
    content = path.read_bytes()
    if then == "cut short":
        path.write_bytes(content[:-30])
    else:
        path.unlink()
    if then == "replaced":  # by a store of another name with the same lines, and one more
        _, *lines = content.splitlines(keepends=True)
        path.write_bytes(b"".join([b"dure store %032d\n" % 1, *lines, lines[-1]]))
    for use in (lambda: store.set("k", "v"), lambda: store.check(["k"])):
        with pytest.raises(StoreError):
            use()
    store.close()
    assert path.exists() == (then != "deleted")


def test_a_line_that_cannot_be_read_is_an_error_that_names_the_builds(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    with path.open("ab") as file:
        file.write(b'[null,"older",[7,"then","far","another host"]]\n[["of a later version"]]\n')
    with pytest.raises(StoreError) as caught:
        store.get("k")
    assert "older than 0.2.0: pid 7 on far" in (caught.value.fix or "")
    assert f"{own_build()}: pid {os.getpid()} on " in (caught.value.fix or "")


def test_a_held_lock_ends_in_a_timeout(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.set_timeout(timedelta(milliseconds=30))
        with pytest.raises(StoreTimeout):
            store.set("k", "v")
    store.set_timeout(TIMEOUT)
    store.set("k", "v")


def test_a_full_disk_keeps_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "v")
    before, pwrite = path.read_bytes(), os.pwrite

    def half(fd: int, data: bytes, at: int) -> int:
        if at > len(before):
            raise OSError(28, "No space left on device")
        return pwrite(fd, data[:1], at)

    monkeypatch.setattr("dure.store.file.os.pwrite", half)
    with pytest.raises(StoreError):
        store.set("k", "another")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert store.get("k") == b"v"


def test_the_last_of_world_size_deletes_the_file_when_all_have_left(path: Path) -> None:
    first = FileStore(path, 2)
    first.set("k", "v")
    first.close()
    second = FileStore(path, 2)
    again = FileStore(path, 2)  # one that came back
    assert second.get("k") == b"v"
    second.close()
    second.close()
    again.set("k", "v")
    again.close()
    assert not path.exists()
    with pytest.raises(StoreError):
        again.get("k")
    FileStore(path).close()
    assert path.exists()


def test_a_file_that_everybody_can_write_is_refused(path: Path) -> None:
    path.touch()
    path.chmod(0o666)
    with pytest.raises(StoreError):
        FileStore(path)
    path.chmod(0o600)
    FileStore(path).close()


@pytest.mark.needs("root")
@pytest.mark.parametrize("whose", ["file", "link"])
def test_where_everybody_may_make_files_another_users_is_a_trap(whose: str, path: Path) -> None:
    target = path.with_name("target")
    target.touch(0o600)
    if whose == "link":
        path.symlink_to(target)
    else:
        target.rename(path)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    FileStore(path, timeout=TIMEOUT).close()  # in a directory of our own, nobody else made it
    path.parent.chmod(0o1777)
    with pytest.raises(StoreError):
        FileStore(path, timeout=TIMEOUT)
    path.parent.chmod(0o700)


def test_a_new_file_is_closed_to_others(path: Path) -> None:
    path.parent.chmod(0o1777)
    FileStore(path, timeout=TIMEOUT).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.parent.chmod(0o700)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "in no folder"])
def test_what_is_no_file_is_refused_at_once(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    name = {"device": Path("/dev/null"), "in no folder": path / "store"}.get(kind, path)
    with pytest.raises(StoreError):
        FileStore(name, timeout=TIMEOUT)
