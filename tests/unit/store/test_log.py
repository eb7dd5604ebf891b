"""The file store's log: torn tails, foreign files, files that vanish."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from dure.errors import StoreError, StoreTimeout
from dure.store import FileStore
from dure.store.log import Log, Record

TIMEOUT = timedelta(seconds=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_every_possible_torn_tail_is_cut_off(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    store.set("kept", "1")
    whole = path.stat().st_size
    store.set("lost", "2")
    full = path.read_bytes()
    store.close()
    for size in range(whole, len(full)):
        path.write_bytes(full[:size])  # the same inode: what a killed writer leaves
        reader = FileStore(path, timeout=TIMEOUT)
        assert reader.list_keys() == ["kept"]
        reader.set("next", "3")
        assert FileStore(path, timeout=TIMEOUT).get("next") == b"3"


def test_a_file_cut_short_under_a_reader_is_an_error(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "v")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StoreError):
        store.get("k")


def test_a_reader_that_is_up_to_date_survives_anothers_torn_tail(path: Path) -> None:
    first, second = FileStore(path, timeout=TIMEOUT), FileStore(path, timeout=TIMEOUT)
    first.set("k", "1")
    assert second.get("k") == b"1"
    with path.open("ab") as file:
        file.write(b"\x50\x00\x00\x00torn")
    assert second.list_keys() == ["k"]
    first.set("k", "2")
    assert second.get("k") == b"2"


def test_a_flipped_bit_is_noticed(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "value")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert FileStore(path, timeout=TIMEOUT).list_keys() == []


@pytest.mark.parametrize("content", [b"", b"DURE", b"DURElog1"])
def test_an_empty_or_just_begun_file_is_a_store(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    store = FileStore(path, timeout=TIMEOUT)
    store.set("k", "v")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("content", [b"x", b"#!/bin/sh\necho\n", b"DURElog2"])
def test_a_foreign_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError):
        FileStore(path, timeout=TIMEOUT)
    assert path.read_bytes() == content


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        FileStore(tmp_path / "no" / "store")


def test_a_deleted_file_is_an_error_and_closing_is_not(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    path.unlink()
    with pytest.raises(StoreError):
        store.set("k", "v")
    with pytest.raises(StoreError):
        store.check(["k"])
    store.close()
    assert not path.exists()


def test_a_replaced_file_is_an_error(path: Path) -> None:
    store = FileStore(path, timeout=TIMEOUT)
    path.unlink()
    FileStore(path, timeout=TIMEOUT)
    with pytest.raises(StoreError):
        store.set("k", "v")


def test_a_held_lock_ends_in_a_timeout(path: Path) -> None:
    store, log = FileStore(path, timeout=timedelta(milliseconds=30)), Log(path)
    with log.locked(1.0), pytest.raises(StoreTimeout):
        store.set("k", "v")
    store.set("k", "v")


def test_a_full_disk_keeps_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(path)

    def half(fd: int, data: bytes, at: int) -> int:
        if at > 100:
            raise OSError(28, "No space left on device")
        with path.open("r+b") as file:
            file.seek(at)
            return file.write(data[:1])

    with log.locked(1.0) as fd:
        log.read(fd)
        log.write(fd, [Record("set", "k", b"v")])
        before = path.read_bytes()
        monkeypatch.setattr("dure.store.log.os.pwrite", half)
        with pytest.raises(StoreError):
            log.write(fd, [Record("set", "l", b"x" * 200)])
    assert path.read_bytes() == before


def test_the_last_of_world_size_deletes_the_file(path: Path) -> None:
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()


def test_one_that_closed_before_the_other_opened_keeps_the_file(path: Path) -> None:
    first = FileStore(path, 2)
    first.set("k", "v")
    first.close()
    second = FileStore(path, 2)
    assert second.get("k") == b"v"
    second.close()
    assert not path.exists()


def test_one_that_came_back_keeps_the_file_until_all_have_left(path: Path) -> None:
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.close()
    again = FileStore(path, 2)
    second.close()
    again.set("k", "v")
    again.close()
    assert not path.exists()


def test_without_a_world_size_the_file_stays(path: Path) -> None:
    FileStore(path).close()
    assert path.exists()


def test_a_closed_store_says_so(path: Path) -> None:
    store = FileStore(path)
    store.close()
    with pytest.raises(StoreError):
        store.get("k")


def test_a_file_that_everybody_can_write_is_refused(tmp_path):
    path = tmp_path / "store"
    path.touch()
    path.chmod(0o666)
    with pytest.raises(StoreError):
        FileStore(path)
    path.chmod(0o600)
    FileStore(path).close()


def in_a_place_for_everybody(path: Path) -> None:
    path.parent.chmod(0o1777)


@pytest.mark.parametrize("whose", ["file", "link"])
def test_where_everybody_may_make_files_another_users_is_a_trap(whose: str, path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    target = path.with_name("target")
    target.touch(0o600)
    if whose == "link":
        path.symlink_to(target)
    else:
        target.rename(path)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    FileStore(path, timeout=TIMEOUT).close()  # in a directory of our own, nobody else made it
    in_a_place_for_everybody(path)
    with pytest.raises(StoreError):
        FileStore(path, timeout=TIMEOUT)
    path.parent.chmod(0o700)


def test_a_new_file_is_closed_to_others(path: Path) -> None:
    in_a_place_for_everybody(path)
    store = FileStore(path, timeout=TIMEOUT)
    assert path.stat().st_mode & 0o777 == 0o600
    store.close()
    path.parent.chmod(0o700)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_file_is_refused_at_once(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(StoreError):
        FileStore("/dev/null" if kind == "device" else path, timeout=TIMEOUT)
