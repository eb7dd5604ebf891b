"""`dure env`: what was found, and never the key itself."""

import json

import pytest

from dure.cli.app import run_command_line
from tests.placement.environments import SLURM_STEP


@pytest.fixture
def key_file(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_bytes(b"secret-of-thirty-two-bytes-long!")
    path.chmod(0o600)
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(path))
    monkeypatch.delenv("DURE_JOB_KEY_FD", raising=False)
    for name, value in SLURM_STEP.items():
        monkeypatch.setenv(name, value)
    return path


def test_json_says_what_was_found_and_why(key_file, capsys):
    assert run_command_line(["env", "--json"]) == 0
    text = capsys.readouterr().out
    told = json.loads(text)
    assert told["found"]["system"] == "Slurm"
    assert told["found"]["member"]["rank"] == 5
    assert told["variables"]["SLURM_PROCID"] == "5"
    assert told["found"]["endpoint"].startswith("cn08:")
    assert told["found"]["key"]["source"] == f"DURE_JOB_KEY_FILE={key_file}"
    assert "secret" not in text


def test_unreadable_key_is_said_not_raised(key_file, capsys):
    key_file.chmod(0o644)
    assert run_command_line(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"]["key"]["state"] == "cannot be read"


def test_what_is_set_is_shown_and_the_rest_on_request(key_file, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("DURE_VERIFY", raising=False)
    assert run_command_line(["env"]) == 0
    text = capsys.readouterr().out
    assert "fingerprint" in text and "Slurm" in text and "secret" not in text
    assert "OMP_NUM_THREADS" in text and "SLURM_PROCID" in text
    assert "DURE_VERIFY" not in text and "PATH " not in text
    assert run_command_line(["env", "--all"]) == 0
    assert "DURE_VERIFY" in capsys.readouterr().out
