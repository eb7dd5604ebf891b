"""What `dure run` prints before the job."""

from __future__ import annotations

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


def test_a_refused_choice_of_streams_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_command_line(["run", "-n", "2", "-r", "0:1,5:2", "--no-python", "true"]) == 2
    assert "--redirects names 5" in capsys.readouterr().err
    assert list(tmp_path.glob("logs_dure_*")) == []
