"""Where the job key comes from, and that it stays a secret."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from dure.errors import StoreError
from dure.store.key import (
    JobKey,
    control_key,
    key_from_file,
    load_for,
    mint,
    name_of,
    user_key_path,
)

ELSEWHERE = "192.0.2.1"  # an address of documentation; never this machine's


def test_the_text_form_does_not_show_the_key() -> None:
    key = mint()
    pair = key.pair("store server")
    for text in (repr(key), str(key), f"{key}", repr(pair)):
        assert key.raw.hex() not in text
        assert repr(key.raw)[2:-1] not in text
        assert pair.secret.decode() not in text


def test_the_fingerprint_tells_keys_apart() -> None:
    key = mint()
    assert key.fingerprint == JobKey(key.raw).fingerprint
    assert key.fingerprint != mint().fingerprint


def test_pairs_are_the_same_everywhere_and_differ_by_purpose() -> None:
    key = mint()
    server, client = key.pair("store server"), key.pair("store client")
    assert server == JobKey(key.raw).pair("store server")
    assert len({server.secret, client.secret, server.public, client.public}) == 4
    assert zmq.curve_public(server.secret) == server.public


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(StoreError):
        JobKey(bytes(size))


def test_a_file_without_a_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.touch(0o600)
    path.write_bytes(b"short")
    with pytest.raises(StoreError) as caught:
        key_from_file(path)
    assert str(path) in caught.value.seen
    with pytest.raises(StoreError) as caught:
        key_from_file(tmp_path / "none")
    assert "DURE_JOB_KEY_FILE" not in str(caught.value)


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


def test_a_closed_descriptor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURE_JOB_KEY_FD", "9999")
    with pytest.raises(StoreError):
        load_for("localhost")


def test_a_file_that_only_we_can_read_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path = mint(), tmp_path / "key"
    path.write_bytes(key.raw)
    path.chmod(0o600)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(path))
    assert load_for(ELSEWHERE) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_open_to_others_is_refused_with_the_cure(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_bytes(mint().raw)
    path.chmod(mode)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(path))
    with pytest.raises(StoreError) as caught:
        load_for("localhost")
    assert "chmod 600" in caught.value.fix


def test_the_users_own_key_is_made_once_by_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: load_for("127.0.0.1"), range(16)))
    assert len(keys) == 1
    path = user_key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["key"]


def test_another_host_uses_an_existing_key_and_makes_none() -> None:
    with pytest.raises(StoreError) as caught:
        load_for(ELSEWHERE)
    assert str(user_key_path()) in caught.value.fix
    assert not user_key_path().exists()
    key = load_for("127.0.0.1")
    assert load_for(ELSEWHERE) == key


def test_a_home_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError):
        load_for("127.0.0.1")


def test_a_home_that_cannot_be_looked_into_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + 300 * "x")  # ENAMETOOLONG, also for root
    with pytest.raises(StoreError):
        load_for("127.0.0.1")


def test_a_key_is_neither_pickled_nor_taken_apart() -> None:
    key = mint()
    for secret in (key, key.pair("store server")):
        with pytest.raises(StoreError):
            pickle.dumps(secret)
        with pytest.raises(StoreError):
            pickle.dumps({"deep": [secret]}, protocol=0)
    with pytest.raises(TypeError):
        json.dumps(key)
    with pytest.raises(TypeError):
        msgspec.json.encode(key)
    assert not hasattr(key, "__dict__")


def test_equal_keys_are_equal() -> None:
    key = mint()
    assert key == JobKey(bytes(key.raw))
    assert len({key, JobKey(bytes(key.raw)), mint()}) == 2
    assert key != key.raw


def test_a_symbolic_link_of_our_own_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = mint()
    written(tmp_path / "key", key)
    (tmp_path / "link").symlink_to(tmp_path / "key")
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(tmp_path / "link"))
    assert load_for(ELSEWHERE) == key


@pytest.mark.parametrize("who", ["link", "file", "directory"])
def test_what_belongs_to_another_user_is_refused(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder / "key", mint())
    (folder / "link").symlink_to("key")
    path = {"link": folder / "link", "file": folder / "key", "directory": folder}[who]
    os.chown(path, 65534, 65534, follow_symlinks=False)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(folder / "link"))
    with pytest.raises(StoreError):
        load_for("localhost")


@pytest.mark.parametrize(("mode", "good"), [(0o777, False), (0o775, False), (0o1777, True)])
def test_the_directory_must_be_closed_to_others_or_sticky(
    mode: int, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = mint()
    written(tmp_path / "key", key)
    tmp_path.chmod(mode)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(tmp_path / "key"))
    if good:
        assert load_for(ELSEWHERE) == key
    else:
        with pytest.raises(StoreError) as caught:
            load_for(ELSEWHERE)
        assert "chmod go-w" in caught.value.fix
    tmp_path.chmod(0o700)


def test_a_pipe_in_place_of_the_file_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(StoreError):
        load_for("localhost")
    monkeypatch.setenv("DURE_JOB_KEY_FILE", "/dev/zero")
    with pytest.raises(StoreError):
        load_for("localhost")
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(tmp_path))
    with pytest.raises(StoreError):
        load_for("localhost")


def written(path: Path, key: JobKey) -> None:
    path.touch(0o600)
    path.write_bytes(key.raw)


def test_who_has_no_launcher_gets_a_key_for_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = load_for("localhost")
    named = load_for("localhost", job="slurm 17.0 0")
    assert named == load_for("localhost", job="slurm 17.0 0")
    assert len({user, named, load_for("localhost", job="slurm 17.0 1")}) == 3
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(user.raw)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(path))  # one that was given is taken as it is
    assert load_for("localhost", job="slurm 17.0 0") == user


def test_the_names_of_loopback_are_one() -> None:
    assert name_of("127.0.0.1", 1) == name_of("localhost", 1) == name_of("LOCALHOST", 1)
    assert len({name_of(host, 1) for host in ("localhost", "10.0.0.1", "node-1")}) == 3
    assert name_of("a", 1) != name_of("a", 2)


def test_agents_of_another_job_or_endpoint_have_another_key() -> None:
    user = mint()
    keys = {control_key(user, "h:1", "a"), control_key(user, "h:1", "b"), user}
    assert len(keys | {control_key(user, "h:2", "a"), control_key(mint(), "h:1", "a")}) == 5
