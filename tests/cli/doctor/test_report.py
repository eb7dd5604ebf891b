"""What belongs into a bug report, and no secret."""

import json
from pathlib import Path

import pytest

from dure.cli.doctor import report
from dure.cli.doctor.checks import problem, warning
from tests.trace.made_up import record, write

KEY = "00ff" * 16
SECRETS = {
    "DURE_JOB_KEY_FILE": "no-path-but-the-key",
    "DURE_ETCD_PASSWORD_FD": "hunter2hunter2",
    "HF_TOKEN": "planted-in-a-variable",
    "AWS_SECRET_ACCESS_KEY": "first line\nsecond line",
    "NCCL_AUTH": "planted-under-nccl",
}
SHOWN = {
    "DURE_STORE_ADDR": "etcd://user:planted-password@host:1/job",
    "NCCL_DEBUG": f"key {KEY}",
    "TORCH_LOGS": "Bearer planted-bearer",
}


def test_secrets_are_left_out_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**SECRETS, **SHOWN, "OMP_NUM_THREADS": "7"}.items():
        monkeypatch.setenv(name, value)
    trace = "Traceback\n  f(token='planted-argument')\nghp_plantedplantedplanted"
    error = {"message": "ValueError: planted-in-a-variable", "extraInfo": {"py_callstack": trace}}
    (tmp_path / "error.json").write_text(json.dumps({"message": error}))
    found = [problem("job key", "names no-path-but-the-key: no such file", "rm second line")]
    text = report.report(found, tmp_path)
    planted = [line for value in SECRETS.values() for line in value.splitlines()]
    planted += [KEY, "planted-password", "planted-bearer", "planted-argument", "ghp_planted"]
    assert [secret for secret in planted if secret in text] == []
    assert "DURE_JOB_KEY_FILE: (set, not shown)" in text
    assert "HF_TOKEN:" not in text  # is not ours, so nothing is said of it
    assert "OMP_NUM_THREADS: 7" in text
    assert "DURE_STORE_ADDR: etcd://(left out)host:1/job" in text
    assert "ValueError: (value of HF_TOKEN)" in text


def test_a_secret_in_a_table_of_flight_records_is_not_broken_into_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = "planted words " * 8
    monkeypatch.setenv("MY_TOKEN", secret)
    monkeypatch.setenv("TORCH_LOGS", "x" * 390 + secret)  # is cut after 400 characters
    for rank in range(2):
        write(tmp_path, rank, [record(rank, 1, file=secret)])
    text = report.report([], tmp_path)
    assert "group world" in text
    assert "planted" not in text


@pytest.mark.parametrize(
    "text",
    [
        *("aws_secret_access_key=planted/1", "secret_key: planted", "access_key=planted"),
        *("AccountKey=planted==;", "passphrase = planted", "MYSQL_PWD=planted"),
        *("password='two planted'", '{"secret": "two planted"}', "http://me:two/planted@host/"),
        *("redis://me:two@planted@host", "Authorization: Basic cGxhbnRlZA==planted"),
        *("said two\\tplanted", "at x?y=two%09planted&z", "two\tplanted"),
    ],
)
def test_secrets_are_left_out_in_many_forms(text: str) -> None:
    assert "planted" not in report.without_secrets(text, {"MY_TOKEN": "two\tplanted"})


def test_names_of_authors_and_urls_without_a_password_are_left_as_they_are() -> None:
    text = "http://host:80/a and tcp://[::1]:2, me: 'x'; basic form"
    environ = {"GIT_AUTHOR_NAME": "http://host", "OLDPWD": "tcp://"}
    assert report.without_secrets(text, environ) == text


def test_a_private_key_above_the_last_lines_of_an_error_is_left_out(tmp_path: Path) -> None:
    key = ["-----BEGIN PRIVATE KEY-----", *["planted"] * 80, "-----END PRIVATE KEY-----"]
    error = {"message": "ValueError", "extraInfo": {"py_callstack": "\n".join(key)}}
    (tmp_path / "error.json").write_text(json.dumps({"message": error}))
    assert "planted" not in report.report([], tmp_path)


def test_report_is_markdown_with_a_part_that_fails_named_and_all_others_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> str:
        raise OSError("no /proc here")

    monkeypatch.setattr(report, "_machine", fails)
    text = report.report([warning("cores", "few ``` of them", "More.")])
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *("Versions", "Machine", "Limits", "Environment variables"),
        "Findings of the doctor",
    ]
    assert "could not be read: OSError: no /proc here" in text
    assert text.count("```") == 2 * len(titles)
    assert "warning  cores: few ''' of them" in text
    assert "-> More." in text
