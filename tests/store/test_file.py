"""The file store's file: lines without an end, foreign and unsafe files, files that vanish."""

import fcntl
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from dure.errors import StoreError, StoreTimeout
from dure.store import FileStore

from .conftest import TIMEOUT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_every_possible_torn_line_is_cut_off(path: Path) -> None:
    current = FileStore(path, timeout=TIMEOUT)
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
    assert current.get("next") == b"3"


@pytest.mark.parametrize("content", [b"", b"dure"])
def test_an_empty_or_just_begun_file_is_a_store(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "v")
    assert FileStore(path, timeout=TIMEOUT).get("k") == b"v"


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
    if then == "replaced":  # by another store with the same lines, and one more
        path.write_bytes(content + content.splitlines(keepends=True)[-1])
    for use in (lambda: store.set("k", "v"), lambda: store.check(["k"])):
        with pytest.raises(StoreError):
            use()
    store.close()
    assert path.exists() == (then != "deleted")


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


def owned_by_another(path: Path, by_link: bool = False) -> None:
    """Make a file, or a link to one, of another user in a directory where all may make files."""
    if os.geteuid():
        pytest.skip("needs root: only root can give files away")
    target = path.with_name("target") if by_link else path
    target.touch(0o600)
    if by_link:
        path.symlink_to(target)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    FileStore(path, timeout=TIMEOUT).close()  # in a directory of our own no other user made it
    path.parent.chmod(0o1777)


NO_STORES: dict[str, Callable[[Path], object]] = {
    "not a store": lambda path: path.write_bytes(b"#!/bin/sh\necho\n"),
    "of another build": lambda path: path.write_bytes(b"dure store 1\n"),
    "written by all": lambda path: (path.touch(), path.chmod(0o666)),
    "another user's": owned_by_another,
    "a link of another user": lambda path: owned_by_another(path, by_link=True),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a directory": lambda path: path.mkdir(),
    "in no directory": lambda path: path.symlink_to(path.parent / "none" / "store"),
}


@pytest.mark.parametrize("what", NO_STORES)
def test_what_is_no_file_of_our_own_is_refused_at_once_and_left_alone(
    what: str, path: Path
) -> None:
    NO_STORES[what](path)
    content = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError):
        FileStore(path, timeout=TIMEOUT)
    assert not path.is_file() or path.read_bytes() == content
    path.parent.chmod(0o700)


def test_a_new_file_is_closed_to_others(path: Path) -> None:
    path.parent.chmod(0o1777)
    FileStore(path, timeout=TIMEOUT).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.parent.chmod(0o700)
