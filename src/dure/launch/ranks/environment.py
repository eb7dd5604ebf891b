"""What a rank finds in its environment: torchrun's variables, and Dure's.

A pure computation, so that it can be read, printed and tested without starting anything.

*Freed memory.* A training step frees what it has allocated. glibc returns free memory at the top of
its heap to the system, and the next step has it mapped and cleared again, a microsecond per 4 KiB.
If ranks wait for each other, the slowest decides for all. So ranks start with the highest
thresholds that glibc itself would choose, unless the user has set any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dure import env
from dure.errors import UsageError
from dure.launch.ranks.errorfiles import error_file
from dure.launch.spec import JobSpec

__all__ = ["JobAddress", "Round", "early_variables", "rank_variables"]

MASTER_ADDR = "127.0.0.1"

_KEEP_FREED = {
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc takes no more
}
_THRESHOLDS = (*_KEEP_FREED, "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
"""Each of them ends glibc's own adapting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAddress:
    """The identity of a job, and the key that proves that a process belongs to it.

    The key can be read from the inherited descriptor `key_fd`, and, by processes that closed it,
    from `key_file`. `password_fd` has the user's password for etcd, if there is one.
    """

    name: str
    key_fd: int
    key_file: str
    password_fd: int | None = None

    @property
    def secrets(self) -> tuple[int, ...]:
        return (self.key_fd, *(() if self.password_fd is None else (self.password_fd,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One start of all ranks, seen from one host.

    Ranks are numbered host by host, in the order of the nodes.

    Args:
        number: How often the job was restarted before.
        node: The number of this host.
        host: Its name.
        nproc: How many ranks it starts.
        num_hosts: How many hosts take part.
        first_rank: The rank of its local rank 0.
        world_size: How many ranks there are on all hosts.
        hosts: The names of hosts, for records: node 0 knows all, others perhaps the first ones.
        nprocs: How many ranks each of these starts.
        master_addr: The host of rank 0.
        master_port: Free for rank 0 to listen on.
        store: host:port of the job's store.
    """

    number: int = 0
    node: int = 0
    host: str
    nproc: int
    num_hosts: int
    first_rank: int
    world_size: int
    hosts: tuple[str, ...]
    nprocs: tuple[int, ...]
    master_addr: str
    master_port: int
    store: str

    @classmethod
    def of(
        cls,
        hosts: tuple[str, ...],
        nprocs: tuple[int, ...],
        node: int = 0,
        *,
        number: int = 0,
        master_addr: str,
        master_port: int,
        store: str,
    ) -> Round:
        """Return the part of one host in a round whose hosts are all known."""
        return cls(
            number=number,
            node=node,
            host=hosts[node],
            nproc=nprocs[node],
            num_hosts=len(hosts),
            first_rank=sum(nprocs[:node]),
            world_size=sum(nprocs),
            hosts=hosts,
            nprocs=nprocs,
            master_addr=master_addr,
            master_port=master_port,
            store=store,
        )

    def rank(self, local_rank: int) -> int:
        return self.first_rank + local_rank


def rank_variables(
    spec: JobSpec, local_rank: int, address: JobAddress, layout: Round, threads: int | None
) -> dict[str, str | None]:
    """Return what to change in the environment for one rank.

    `spec.env` has the last word; `threads` is OMP_NUM_THREADS, or None to leave it as it is.
    """
    rank, size = str(layout.rank(local_rank)), str(layout.world_size)
    in_etcd = layout.store.startswith("etcd://")
    variables: dict[str, str | None] = {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(layout.nproc),
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": str(layout.node),
        "GROUP_WORLD_SIZE": str(layout.num_hosts),
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": layout.master_addr,
        "MASTER_PORT": str(layout.master_port),
        "TORCHELASTIC_RUN_ID": spec.run_id or address.name,
        "TORCHELASTIC_RESTART_COUNT": str(layout.number),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(
            error_file(spec, address.name, layout.rank(local_rank), layout.number)
        ),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        "DURE_CORE_MIGRATION": env.text("DURE_CORE_MIGRATION") or "1",
        "DURE_STORE_ADDR": layout.store,
        "DURE_LAUNCHER": address.name,
        "DURE_JOB_KEY_FD": str(address.key_fd),
        "DURE_JOB_KEY_FILE": address.key_file,
        "DURE_ETCD_PASSWORD_FD": (
            None if address.password_fd is None else str(address.password_fd)
        ),
        # Every rank has the key, and the launcher's store asks for it; etcd may be without TLS.
        "DURE_INSECURE": env.raw("DURE_INSECURE") if in_etcd else None,
        "DURE_ELASTIC": "1" if spec.elastic else None,
        "DURE_ELASTIC_MIN": str(spec.min_ranks) if spec.elastic else None,
    }
    if spec.trace_dir is not None:
        variables["DURE_TRACE_DIR"] = str(spec.trace_dir.absolute())
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if spec.virtual_local_rank:
        variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _own_gpu(local_rank)}
    return variables | early_variables(spec) | dict(spec.env)


def early_variables(spec: JobSpec) -> dict[str, str | None]:
    """Return what must be set before torch is imported, in ranks and in the zygote."""
    stand_in = {} if spec.stand_in is None else {"DURE_STAND_IN": spec.stand_in}
    return _malloc_variables(spec) | stand_in


def _malloc_variables(spec: JobSpec) -> dict[str, str | None]:
    """Return what has glibc keep freed memory; nothing where the user has chosen otherwise."""
    chosen = {n for n in _THRESHOLDS if n in spec.env or env.raw(n) is not None}
    tunables = spec.env.get("GLIBC_TUNABLES", env.raw("GLIBC_TUNABLES")) or ""
    if spec.malloc_defaults or chosen or "glibc.malloc" in tunables:
        return {}
    return dict(_KEEP_FREED)


def _own_gpu(local_rank: int) -> str:
    """Return the one GPU that a rank is to see, of those that this process sees.

    Raises:
        UsageError: There are fewer.
    """
    visible = env.raw("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    gpus = [gpu.strip() for gpu in visible.split(",")]
    if local_rank >= len(gpus) or not gpus[local_rank]:
        raise UsageError(
            f"there is no GPU for local rank {local_rank}", seen=f"CUDA_VISIBLE_DEVICES={visible}"
        )
    return gpus[local_rank]


def rank_log_dir(log_dir: Path, rank: int, attempt: int = 0) -> Path:
    """Return where the files of one rank go: `LOG_DIR/attempt_0/rank_1`."""
    return log_dir.absolute() / f"attempt_{attempt}" / f"rank_{rank}"
