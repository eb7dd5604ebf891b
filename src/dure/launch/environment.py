"""What a rank finds in its environment: torchrun's variables, and Dure's.

A pure computation, so that it can be read, printed and tested without starting anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dure.launch.spec import JobSpec

__all__ = ["JobAddress", "default_threads", "rank_variables"]

MASTER_ADDR = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAddress:
    """How the ranks of a job find each other, and the launcher.

    `name` tells the job from all others; `master_port` is free for rank 0 to listen on; `store`
    is the host:port of the launcher's own store; the key can be read from the inherited descriptor
    `key_fd`, and, by processes that closed it, from `key_file`.
    """

    name: str
    master_port: int
    store: str
    key_fd: int
    key_file: str


def default_threads(cores: int, nproc: int) -> int:
    """Return how many threads each rank gets for one operator, so that all fit on the cores."""
    return max(1, cores // nproc)


def rank_variables(
    spec: JobSpec, rank: int, address: JobAddress, threads: int | None
) -> dict[str, str | None]:
    """Return what to change in the environment for one rank of a job on this one host.

    Args:
        spec: The job; its `env` has the last word.
        rank: Which rank.
        address: How the ranks find each other.
        threads: OMP_NUM_THREADS, or None to leave it as it is.
    """
    number, of = str(rank), str(spec.nproc)
    variables: dict[str, str | None] = {
        "RANK": number,
        "LOCAL_RANK": number,
        "ROLE_RANK": number,
        "WORLD_SIZE": of,
        "LOCAL_WORLD_SIZE": of,
        "ROLE_WORLD_SIZE": of,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(address.master_port),
        "TORCHELASTIC_RUN_ID": address.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": None,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        "DURE_STORE_ADDR": address.store,
        "DURE_LAUNCHER": address.name,
        "DURE_JOB_KEY_FD": str(address.key_fd),
        "DURE_JOB_KEY_FILE": address.key_file,
        "DURE_INSECURE": None,  # every rank has the key, and the launcher's store asks for it
    }
    if spec.log_dir is not None:
        variables["TORCHELASTIC_ERROR_FILE"] = str(rank_log_dir(spec.log_dir, rank) / "error.json")
    if spec.trace_dir is not None:
        variables["DURE_TRACE_DIR"] = str(spec.trace_dir.absolute())
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables | dict(spec.env)


def rank_log_dir(log_dir: Path, rank: int, attempt: int = 0) -> Path:
    """Return where the files of one rank go: `LOG_DIR/attempt_0/rank_1`."""
    return log_dir.absolute() / f"attempt_{attempt}" / f"rank_{rank}"
