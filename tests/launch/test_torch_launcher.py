"""torch's launcher for functions and programs; parts of torchrun."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dure.run
from dure.errors import LaunchError, UsageError
from dure.launch.torch_launcher import LaunchConfig, elastic_launch


def fails_once() -> tuple[str, str]:
    """Fail in the first round; return what the rank is."""
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    return os.environ["RANK"], os.environ["ROLE_NAME"]


def test_elastic_launch_restarts_and_returns_the_result_of_each_rank(tmp_path: Path):
    config = LaunchConfig(1, 1, 2, max_restarts=1, role="trainer", logs_specs=str(tmp_path))
    results = elastic_launch(config, fails_once)()
    assert results == {0: ("0", "trainer"), 1: ("1", "trainer")}
    assert (tmp_path / "attempt_1" / "rank_1").is_dir()


def test_elastic_launch_starts_a_program():
    config = LaunchConfig(1, 1, 2, max_restarts=0)
    code = "import os, sys; sys.exit(int(os.environ['RANK']) * int(sys.argv[1]))"
    assert elastic_launch(config, sys.executable)("-c", code, 0) == {0: None, 1: None}
    with pytest.raises(LaunchError, match="rank 1"):
        elastic_launch(config, sys.executable)("-c", code, 3)


def test_settings_of_torch_are_settings_of_a_job():
    config = LaunchConfig(
        *(2, 3, 8),
        run_id="me",
        rdzv_endpoint="head:29400",
        rdzv_backend="static",
        rdzv_configs={"rank": 1, "timeout": 60},
        signals_to_handle="SIGTERM, SIGUSR1",
        shutdown_timeout=7,
        logs_specs=SimpleNamespace(root_log_dir="/logs"),
    )
    settings = dict(config.settings())
    assert settings["nnodes"] == (2, 3)
    assert settings["endpoint"] == "head:29400"
    assert (settings["node_rank"], settings["join_timeout_s"]) == (1, 60.0)
    assert settings["signals"] == (signal.SIGTERM, signal.SIGUSR1)
    assert (settings["grace_s"], settings["max_restarts"]) == (7, 3)
    assert settings["log_dir"] == Path("/logs")
    assert "endpoint" not in LaunchConfig(1, 1, 2, rdzv_endpoint="head:29400").settings()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rdzv_backend": "c10d"},  # without an endpoint
        {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "head:2379"},
        {"rdzv_backend": "c10d", "rdzv_endpoint": "head:1", "signals_to_handle": "SIGNONE"},
    ],
)
def test_settings_that_are_not_possible_are_refused(wrong: dict[str, str]):
    with pytest.raises(UsageError):
        elastic_launch(LaunchConfig(1, 2, 2, **wrong), max)  # pyright: ignore[reportArgumentType]


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
