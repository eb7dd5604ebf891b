"""torch's launcher for functions: `LaunchConfig` and `elastic_launch`.

`dure.spawn` starts functions, `run_job` programs; `LaunchError` is torch's ChildFailedError.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal  # Any: arguments and results of the user's function

from dure.errors import UsageError
from dure.launch.functions import results_of_ranks
from dure.launch.job import run_job
from dure.launch.spec import JobSpec

__all__ = ["LaunchConfig", "elastic_launch"]

_Backend = Literal["c10d", "static", "etcd"]
_BACKENDS: tuple[_Backend, ...] = ("c10d", "static", "etcd")


@dataclass
class LaunchConfig:
    """torch's settings of a launch.

    `rdzv_backend`, `rdzv_endpoint` and `node_rank` (in `rdzv_configs`, as "rank") are used with
    several hosts only. `logs_specs` is a directory, or an object of torch's that has one.
    `monitor_interval`, `metrics_cfg`, `event_log_handler`, `log_line_prefix_template` and
    `numa_options` have no effect.

    Example:
        ```python
        from dure.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", max_restarts=0
        )
        ```
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: object = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict[str, Any])
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict[str, str])
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: object = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the same as fields of `JobSpec`.

        Raises:
            UsageError: A signal or the backend is unknown, or several hosts have no endpoint.
        """
        settings: dict[str, Any] = {
            "log_dir": _directory(self.logs_specs),
            "max_restarts": self.max_restarts,
            "grace_s": self.shutdown_timeout,
            "local_addr": self.local_addr,
            "run_id": self.run_id or None,
            "role": self.role,
            "stdout_filters": tuple(self.duplicate_stdout_filters or ()),
            "stderr_filters": tuple(self.duplicate_stderr_filters or ()),
            "virtual_local_rank": self.virtual_local_rank,
            "signals": tuple(map(_signal, self.signals_to_handle.split(","))),
        }
        if self.max_nodes > 1:
            settings |= self._hosts()
        return settings

    def _hosts(self) -> dict[str, Any]:
        backend: _Backend | None = next(
            (name for name in _BACKENDS if name == self.rdzv_backend), None
        )
        if backend is None or not self.rdzv_endpoint:
            raise UsageError(
                f"several hosts need an endpoint, and one of the backends {', '.join(_BACKENDS)}",
                seen=f"rdzv_backend={self.rdzv_backend!r}, rdzv_endpoint={self.rdzv_endpoint!r}",
            )
        timeout_s = self.rdzv_configs.get("timeout", 900)
        hosts: dict[str, Any] = {
            "nnodes": (self.min_nodes, self.max_nodes),
            "endpoint": self.rdzv_endpoint,
            "rdzv_backend": backend,
            "join_timeout_s": float(self.rdzv_timeout if self.rdzv_timeout > 0 else timeout_s),
        }
        if backend == "static":
            hosts["node_rank"] = int(self.rdzv_configs.get("rank", 0))
        return hosts


class elastic_launch:  # torch's name
    """Calls a function, or starts a program, on the ranks of this host.

    With several hosts, each of them does so.

    Args:
        config: The settings.
        entrypoint: The function, or the program: `elastic_launch(config, "python")("train.py")`.
        health_check_server: No effect: see `JobSpec.health_port`.

    Raises:
        UsageError: The settings are not possible.

    Example:
        ```python
        import os

        if dist.get_rank() == 0:  # one process starts the ranks
            results = elastic_launch(config, os.getenv)("RANK")
            assert results == {0: "0", 1: "1"}
        ```
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str,
        health_check_server: object = None,
    ) -> None:
        self._config, self._entrypoint = config, entrypoint
        self._settings = config.settings()

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Return the result of each rank of this host; None for each if a program was started.

        Raises:
            LaunchError: A rank failed.
        """
        nproc, entrypoint = self._config.nproc_per_node, self._entrypoint
        if not isinstance(entrypoint, str):
            start = "fork" if self._config.start_method == "fork" else "spawn"
            return results_of_ranks(entrypoint, nproc, args, start, **self._settings)
        words = tuple(map(str, args))
        result = run_job(
            JobSpec(
                program=entrypoint, args=words, kind="executable", nproc=nproc, **self._settings
            )
        )
        result.check()
        return dict.fromkeys((rank.rank for rank in result.ranks), None)


def _directory(logs_specs: object) -> Path | None:
    """Return the directory of torch's LogsSpecs, or the one that was given."""
    given = getattr(logs_specs, "root_log_dir", logs_specs)
    return Path(given) if isinstance(given, (str, Path)) else None


def _signal(name: str) -> int:
    try:
        return signal.Signals[name.strip()]
    except KeyError:
        raise UsageError(f"signals_to_handle has an unknown signal: {name!r}") from None
