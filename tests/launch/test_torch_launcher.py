"""torch's launcher for functions and programs."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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
