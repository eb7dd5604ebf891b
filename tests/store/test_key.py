"""Where the job key comes from, and that it stays a secret."""

import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from dure.errors import StoreError
from dure.store.key import (
    JobKey,
    control_key,
    load_for,
    mint,
    name_of,
    user_key_path,
)
from tests.waiting import PATIENCE_S

ELSEWHERE = "192.0.2.1"  # an address of documentation; never this machine's


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path that DURE_JOB_KEY_FILE names: a folder of our own, where there is no file yet."""
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(tmp_path / "key"))
    return tmp_path / "key"


def written(path: Path, raw: bytes = b"k" * 32, mode: int = 0o600) -> None:
    path.touch()
    path.chmod(mode)
    path.write_bytes(raw)


def test_pairs_are_the_same_everywhere_and_differ_by_purpose() -> None:
    key = mint()
    server, client = key.pair("store server"), key.pair("store client")
    assert server == JobKey(key.raw).pair("store server")
    assert len({server.secret, client.secret, server.public, client.public}) == 4
    assert zmq.curve_public(server.secret) == server.public


def test_a_key_is_neither_shown_nor_pickled_nor_taken_apart() -> None:
    key = mint()
    assert repr(key) == str(key) == f"JobKey(fingerprint={key.fingerprint})"
    assert key.pair("store server").secret.decode() not in repr(key.pair("store server"))
    for secret in (key, key.pair("store server"), {"deep": [key]}):
        for protocol in (0, pickle.HIGHEST_PROTOCOL):
            with pytest.raises(StoreError):
                pickle.dumps(secret, protocol)
    for write in (json.dumps, msgspec.json.encode):
        with pytest.raises(TypeError):
            write(key)
    assert not hasattr(key, "__dict__")


def test_a_descriptor_goes_before_a_file_and_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = mint()
    with (tmp_path / "key").open("w+b") as file:
        file.write(key.raw)
        file.flush()
        monkeypatch.setenv("DURE_JOB_KEY_FD", str(file.fileno()))
        monkeypatch.setenv("DURE_JOB_KEY_FILE", "/nonexistent")
        assert load_for(ELSEWHERE) == key
        assert load_for(ELSEWHERE) == key
    monkeypatch.setenv("DURE_JOB_KEY_FD", "9999")
    monkeypatch.delenv("DURE_JOB_KEY_FILE")
    with pytest.raises(StoreError):
        load_for("localhost")


def by_another(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root: only root can give files away")
    written(path)
    os.chown(path, 65534, 65534)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda path: None, "DURE_JOB_KEY_FILE"),
    "short": (lambda path: written(path, b"short"), "/dev/urandom"),
    "long": (lambda path: written(path, b"k" * 33), "/dev/urandom"),
    "readable by a group": (lambda path: written(path, mode=0o640), "chmod 600"),
    "readable by all": (lambda path: written(path, mode=0o604), "chmod 600"),
    "writable by a group": (lambda path: written(path, mode=0o620), "chmod 600"),
    "a pipe": (lambda path: os.mkfifo(path, 0o600), "regular"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "regular"),
    "a folder": (lambda path: path.mkdir(), "regular"),
    "another user's file": (by_another, "belongs to user 65534"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_not_safe_is_refused_at_once(what: str, given: Path) -> None:
    make, told = BAD_FILES[what]
    make(given)
    with pytest.raises(StoreError) as caught:
        load_for("localhost")
    assert told in str(caught.value)
    assert str(given.parent) in str(caught.value) or "/dev" in str(caught.value)


def test_the_users_own_key_is_made_once_by_many() -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: load_for("127.0.0.1"), range(16)))
    assert len(keys) == 1
    path = user_key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["key"]


def test_another_host_uses_an_existing_key_makes_none_and_may_wait(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        load_for(ELSEWHERE)
    assert str(user_key_path()) in caught.value.fix
    assert "DURE_JOB_KEY_FILE" in caught.value.fix
    assert not user_key_path().exists()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(load_for, ELSEWHERE, PATIENCE_S)
        made = load_for("127.0.0.1")
        assert waits.result() == made


def test_a_home_that_cannot_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError):
        load_for("127.0.0.1")


def test_who_has_no_launcher_gets_a_key_for_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = load_for("localhost")
    named = load_for("localhost", job="slurm 17.0 0")
    assert named == load_for("localhost", job="slurm 17.0 0")
    assert len({user, named, load_for("localhost", job="slurm 17.0 1")}) == 3
    written(tmp_path / "key", user.raw)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(tmp_path / "key"))
    assert load_for("localhost", job="slurm 17.0 0") == user  # one that was given, as it is


def test_the_names_of_loopback_are_one() -> None:
    assert name_of("127.0.0.1", 1) == name_of("localhost", 1) == name_of("LOCALHOST", 1)
    assert len({name_of(host, 1) for host in ("localhost", "10.0.0.1", "node-1")}) == 3
    assert name_of("a", 1) != name_of("a", 2)


def test_agents_of_another_job_or_endpoint_have_another_key() -> None:
    user = mint()
    keys = {control_key(user, "h:1", "a"), control_key(user, "h:1", "b"), user}
    assert len(keys | {control_key(user, "h:2", "a"), control_key(mint(), "h:1", "a")}) == 5
