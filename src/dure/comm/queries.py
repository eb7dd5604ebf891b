"""Questions about groups and ranks that need no communication."""

from __future__ import annotations

from dure import env
from dure.comm.group import ProcessGroup
from dure.comm.world import GroupMember, current_world, resolve
from dure.errors import UsageError

__all__ = [
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_initialized",
]


def _outside(group: object) -> bool:
    return group is GroupMember.NON_GROUP_MEMBER


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's number in `group` (None: the world), -1 if it is not a member."""
    return -1 if _outside(group) else resolve(group, "get_rank").rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return how many ranks `group` (None: the world) has, -1 if this rank is not a member."""
    return -1 if _outside(group) else resolve(group, "get_world_size").size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in `group` of `global_rank`; raise `NotInGroupError` if it has none."""
    return resolve(group, "get_group_rank").group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of rank `group_rank` of `group`."""
    pg = resolve(group, "get_global_rank")
    return pg.global_ranks[pg.peer(None, group_rank, "get_global_rank", "rank")]


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of `group`'s members, in the order of their ranks in it."""
    return list(resolve(group, "get_process_group_ranks").global_ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of the group's backend, such as "shm"."""
    return resolve(group, "get_backend").backend_name


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return which backend serves which kind of device, such as "cpu:shm"."""
    return resolve(group, "get_backend_config").backend_config


def get_pg_count() -> int:
    """Return how many groups this rank is a member of."""
    return len(current_world().groups)


def is_initialized() -> bool:
    """Tell whether the default group exists."""
    return current_world().default is not None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number on its host, as the launcher set it in LOCAL_RANK.

    Args:
        fallback_rank: What to return where LOCAL_RANK is not set.

    Raises:
        UsageError: LOCAL_RANK is not set and there is no fallback.
    """
    rank = env.integer("LOCAL_RANK", fallback_rank)
    if rank is None:
        raise UsageError(
            "LOCAL_RANK is not set",
            op="get_node_local_rank",
            fix="Start the program with `dure run`, or give fallback_rank.",
        )
    return rank
