"""torch's launcher for functions: `LaunchConfig` and `elastic_launch`, for one host.

`dure.spawn` starts the ranks; `LaunchError` is torch's ChildFailedError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any  # Any: what the user's function takes and returns

from dure.errors import UsageError
from dure.launch.functions import spawn

__all__ = ["LaunchConfig", "elastic_launch"]


@dataclass
class LaunchConfig:
    """torch's settings of a launch. Only `nproc_per_node` and `start_method` have an effect."""

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


class elastic_launch:  # torch's name
    """Calls a function on the ranks of one host.

    Args:
        config: The settings.
        entrypoint: The function.
        health_check_server: No effect.

    Raises:
        UsageError: Several hosts, or a program in place of a function: use `dure run`.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any],
        health_check_server: object = None,
    ) -> None:
        if config.max_nodes != 1 or not callable(entrypoint):
            raise UsageError(
                "elastic_launch calls a function on one host",
                seen=f"max_nodes={config.max_nodes}, {entrypoint!r}",
                fix="Start programs, and ranks on several hosts, with `dure run`.",
            )
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Return the result of each rank.

        Raises:
            LaunchError: A rank failed.
        """
        start = "fork" if self._config.start_method == "fork" else "spawn"
        results = spawn(self._entrypoint, self._config.nproc_per_node, args, start)
        return dict(enumerate(results))
