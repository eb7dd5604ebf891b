"""`dure.run`, with torchrun's functions."""

import signal
import sys
from pathlib import Path

import pytest

import dure.launch
import dure.run
from dure.errors import LaunchError, UsageError


def test_a_job_is_started_with_torchruns_functions(tmp_path: Path):
    program = tmp_path / "prog.py"
    program.write_text("import os, sys; sys.exit(int(os.environ['RANK']) * int(sys.argv[1]))")
    words = ["--nproc-per-node", "2", str(program)]
    dure.run.run(dure.run.parse_args([*words, "0"]))
    with pytest.raises(LaunchError, match="rank 1"):
        dure.run.run(dure.run.parse_args([*words, "3"]))
    parser = dure.run.get_args_parser()
    parser.add_argument("--mine", type=int, default=7)
    args = parser.parse_args(["--mine", "5", *words, "0", "--nproc", "x"])
    assert (args.mine, args.nproc, args.training_script) == (5, 2, str(program))
    assert args.training_script_args == ["0", "--nproc", "x"]


def test_flags_become_a_launch_config():
    words = ["--nnodes=1:2", "--nproc_per_node=4", "--rdzv-endpoint=head", "--max-restarts=2"]
    args = dure.run.parse_args([*words, "-m", "package.train", "--lr", "1"])
    config, program, rest = dure.run.config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 4)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "head:29400")
    assert config.max_restarts == 2
    assert (program, rest) == (sys.executable, ["-u", "-m", "package.train", "--lr", "1"])


def test_flags_of_the_command_alone_are_refused():
    with pytest.raises(UsageError, match="--hosts"):
        dure.run.run(dure.run.parse_args(["--hosts", "a,b", "train.py"]))


def test_main_returns_on_success_and_leaves_ctrl_c_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    for main in (dure.run.main, dure.launch.main):
        main(["--help"])
        assert "nproc" in capsys.readouterr().out
        assert signal.getsignal(signal.SIGINT) is before


def test_main_exits_with_the_code_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        dure.run.main(["--no-such-option"])
    assert caught.value.code == 2
    assert "no-such-option" in capsys.readouterr().err
