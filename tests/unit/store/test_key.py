"""Where the job key comes from, and that it stays a secret."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from dure.errors import StoreError
from dure.store.key import JobKey, load_for, mint, user_key_path

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
    assert key.fingerprint == pickle.loads(pickle.dumps(key)).fingerprint
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
