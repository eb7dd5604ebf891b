"""What `dure run` prints before the job."""

import tempfile
from pathlib import Path

import pytest

from dure.cli.app import run_command_line


@pytest.mark.parametrize(
    ("flags", "notes"), [([], 1), (["--standalone"], 0), (["--nnodes", "1"], 0)], ids=str
)
def test_a_batch_shell_of_several_hosts_is_pointed_to_srun(
    flags: list[str],
    notes: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    run_command_line(["run", *flags, "--no-python", "true"])
    assert capsys.readouterr().err.count("srun --ntasks-per-node=1 dure run") == notes


ETCD = ["--rdzv-backend=etcd", "--rdzv-endpoint=h", "--rdzv-id=j"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-r", "0:1,5:2"], "--redirects names 5"),
        (["--log-dir", "p.py"], "p.py"),
        (["--trace-dir", "p.py"], "p.py"),
        (["--event-log", "none/x"], "--event-log"),
        (["missing.py"], "missing.py"),
        (["-n", "0"], "at least 1"),
        (["-m", "no_such_module_at_all"], "no such module"),
        (["--key-file", "none"], "none"),
        (["--key-file", "p.py"], "p.py"),  # which others can read
        ([*ETCD, "--rdzv-conf=cert=none"], "cert="),
    ],
)
def test_wrong_value_is_one_line_and_code_2_and_leaves_no_file(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Path("p.py").touch(0o644)
    assert run_command_line(["run", "-n", "2", *words, "p.py"]) == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["p.py"]
