"""Queries without communication: about groups and ranks, and about this installation.

Torch's debug levels are here too. They decide which lines of Dure's log are shown (`trace.logs`);
the checks that torch makes at some levels only, Dure always makes.
"""

from __future__ import annotations

from enum import Enum

import torch

from dure import env, torch_private
from dure.comm.backends.mpi import library as mpi_library
from dure.comm.backends.registry import known_backends
from dure.comm.group import ProcessGroup
from dure.comm.world import GroupMember, World, current_world, resolve, world_to_compile
from dure.errors import UsageError
from dure.native import available as native_available
from dure.trace import logs

# ---- groups and ranks ----------------------------------------------------------------------------


def _outside(group: object) -> bool:
    return group is GroupMember.NON_GROUP_MEMBER


def _world() -> World:
    return world_to_compile() if torch.compiler.is_dynamo_compiling() else current_world()


def _found(group: ProcessGroup | None, op: str) -> ProcessGroup:
    if group is None and torch.compiler.is_dynamo_compiling():
        return world_to_compile().need_default()
    return resolve(group, op)


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in a group.

    Args:
        group: The group; the default group if None.

    Returns:
        The rank, from 0 to the group's size - 1; -1 if this process is not a member.

    Example:
        ```python
        rank = dist.get_rank()
        assert 0 <= rank < dist.get_world_size()
        ```
    """
    return -1 if _outside(group) else _found(group, "get_rank").rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks of a group.

    Args:
        group: The group; the default group if None.

    Returns:
        The number of ranks; -1 if this process is not a member.

    Example:
        ```python
        batch_size = 64 // dist.get_world_size()             # the same total for any size
        ```
    """
    return -1 if _outside(group) else _found(group, "get_world_size").size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in a group of a global rank.

    Args:
        group: The group.
        global_rank: A rank of the default group.

    Returns:
        Its rank in `group`.

    Raises:
        NotInGroupError: It is not a member of the group.

    Example:
        ```python
        pair = dist.new_group([0, 1])
        assert dist.get_group_rank(pair, 1) == 1
        ```
    """
    return _found(group, "get_group_rank").group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank of a group.

    Args:
        group: The group.
        group_rank: A rank of the group.

    Returns:
        Its rank in the default group.

    Raises:
        NotInGroupError: The group has no such rank.

    Example:
        ```python
        pair = dist.new_group([0, 1])
        assert dist.get_global_rank(pair, 1) == 1
        ```
    """
    pg = _found(group, "get_global_rank")
    return pg.global_ranks[pg.peer(None, group_rank, "get_global_rank", "rank")]


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of the members of a group.

    Args:
        group: The group; the default group if None.

    Returns:
        The global ranks, in the order of the ranks in the group.

    Example:
        ```python
        pair = dist.new_group([0, 1])                        # all ranks call it
        assert dist.get_process_group_ranks(pair) == [0, 1]
        assert dist.get_group_rank(pair, 1) == 1
        assert dist.get_global_rank(pair, 0) == 0
        ```
    """
    return list(_found(group, "get_process_group_ranks").global_ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of a group's backend, such as "shm".

    Args:
        group: The group; the default group if None.

    Returns:
        The name of the backend for CPU tensors.

    Example:
        ```python
        assert dist.get_backend() == "shm"
        ```
    """
    return _found(group, "get_backend").backend_name


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return which backend serves which kind of device.

    Args:
        group: The group; the default group if None.

    Returns:
        Devices and backends, such as "cpu:shm" or "cpu:shm,cuda:nccl".

    Example:
        ```python
        assert dist.get_backend_config() == "cpu:shm"
        ```
    """
    return _found(group, "get_backend_config").backend_config


def get_pg_count() -> int:
    """Return how many groups this rank is a member of.

    Returns:
        The number of groups, the default group included.

    Example:
        ```python
        before = dist.get_pg_count()
        dist.new_group([0, 1])
        assert dist.get_pg_count() == before + 1
        ```
    """
    return len(_world().groups)


def is_initialized() -> bool:
    """Tell whether the default group exists.

    Returns:
        True after `init_process_group`, until `destroy_process_group`.

    Example:
        ```python
        assert dist.is_initialized()
        ```
    """
    return _world().default is not None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number on its host, as the launcher set it in LOCAL_RANK.

    Args:
        fallback_rank: What to return where LOCAL_RANK is not set.

    Returns:
        The number of this process among those of its host, from 0 on.

    Raises:
        UsageError: LOCAL_RANK is not set and there is no fallback.

    Example:
        ```python
        assert dist.get_node_local_rank(fallback_rank=0) >= 0
        ```
    """
    rank = env.integer("LOCAL_RANK", fallback_rank)
    if rank is None:
        raise UsageError(
            "LOCAL_RANK is not set",
            op="get_node_local_rank",
            fix="Start the program with `dure run`, or give fallback_rank.",
        )
    return rank


# ---- this installation and this machine ----------------------------------------------------------


def is_available() -> bool:
    """Tell that the package works here.

    Returns:
        True.

    Example:
        ```python
        assert dist.is_available()
        ```
    """
    return True


def is_backend_available(backend: str) -> bool:
    """Tell whether the backend `backend` exists and can run on this machine.

    Args:
        backend: The name, such as "shm".

    Returns:
        True if a group with it can be made here.

    Example:
        ```python
        assert dist.is_backend_available("shm") and not dist.is_backend_available("no_such")
        ```
    """
    name = backend.lower()
    if name in {"shm", "hybrid", "hybrid_mpi"} and not native_available()[0]:
        return False
    if name in {"mpi", "hybrid_mpi"}:
        return is_mpi_available()
    if name == "nccl":
        return is_nccl_available()
    if name in {"gloo", "hybrid"}:
        return is_gloo_available()
    return name in known_backends()


def engine_error() -> str:
    """Return why the native engine cannot run on this machine; empty if it can."""
    return native_available()[1]


def is_gloo_available() -> bool:
    """Tell whether torch was built with Gloo.

    Returns:
        True if a group over "gloo" can be made.

    Example:
        ```python
        if dist.is_gloo_available():
            assert dist.is_backend_available("gloo")
        ```
    """
    return torch_private.has_distributed


def is_nccl_available() -> bool:
    """Tell whether torch was built with NCCL, and there is a GPU.

    Returns:
        True if a group over "nccl" can be made.

    Example:
        ```python
        backend = "nccl" if dist.is_nccl_available() else "shm"
        assert dist.is_backend_available(backend)
        ```
    """
    return torch.cuda.is_available() and torch_private.has_nccl


def is_mpi_available() -> bool:
    """Tell whether the backend `mpi` can run: mpi4py is installed, and finds an MPI library.

    MPI is not started by asking.

    Returns:
        True if a group over "mpi" can be made.

    Example:
        ```python
        if not dist.is_mpi_available():
            assert not dist.is_backend_available("mpi")
        ```
    """
    return mpi_library.available()


def is_ucc_available() -> bool:
    """Tell whether there is a backend `ucc`.

    Returns:
        False, unless a backend of this name was registered.

    Example:
        ```python
        assert not dist.is_ucc_available()
        ```
    """
    return "ucc" in known_backends()


def is_xccl_available() -> bool:
    """Tell whether there is a backend `xccl`.

    Returns:
        False, unless a backend of this name was registered.

    Example:
        ```python
        assert not dist.is_xccl_available()
        ```
    """
    return "xccl" in known_backends()


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the backend that suits `device` best on this machine, ranks on one host assumed.

    Args:
        device: A device, or its type.

    Returns:
        The name of the backend.

    Example:
        ```python
        assert dist.get_default_backend_for_device("cpu") == "shm"
        ```
    """
    if torch.device(device).type == "cuda":
        return "nccl"
    return "shm" if native_available()[0] else "gloo"


def is_torchelastic_launched() -> bool:
    """Tell whether a launcher (`dure run`, torchrun) started this process.

    Returns:
        True if a launcher started it.

    Example:
        ```python
        if dist.is_torchelastic_launched():
            assert dist.get_node_local_rank() >= 0
        ```
    """
    return env.text("TORCHELASTIC_RUN_ID") is not None


# ---- debug levels --------------------------------------------------------------------------------


class DebugLevel(Enum):
    """How much of Dure's log is shown on the standard error.

    What torch checks at INFO and DETAIL Dure checks at every level: errors of DDP name parameters
    without a gradient, and ranks compare their calls (over gloo and nccl with DURE_VERIFY=1).

    Obtained from:
        `get_debug_level`.
    """

    OFF = 0
    """Warnings and errors."""
    INFO = 1
    """Groups as they are made, and what was chosen: DURE_LOG=info."""
    DETAIL = 2
    """The same on all ranks, and times of steps of DDP: DURE_LOG=debug."""


_level: DebugLevel | None = None
"""What the program has set."""


def get_debug_level() -> DebugLevel:
    """Return the level that was set, else that of TORCH_DISTRIBUTED_DEBUG.

    Returns:
        The level.

    Raises:
        UsageError: The variable has another value than OFF, INFO and DETAIL.

    Example:
        ```python
        assert isinstance(dist.get_debug_level(), dist.DebugLevel)
        ```
    """
    return DebugLevel[env.debug_level()] if _level is None else _level


def set_debug_level(level: DebugLevel) -> None:
    """Show as much of Dure's log as the level says, from now on, unless DURE_LOG is set.

    Args:
        level: OFF, INFO or DETAIL.

    Raises:
        UsageError: It is not a `DebugLevel`.

    Example:
        ```python
        dist.set_debug_level(dist.DebugLevel.INFO)
        assert dist.get_debug_level() is dist.DebugLevel.INFO
        ```
    """
    global _level
    name = getattr(level, "name", "")  # of torch's, too
    if name not in DebugLevel.__members__:
        raise UsageError(
            "level must be a DebugLevel",
            op="set_debug_level",
            seen=f"got {level!r}",
            fix="For example dure.DebugLevel.DETAIL.",
        )
    _level = DebugLevel[name]
    logs.show_debug_level(name)


def set_debug_level_from_env() -> None:
    """Set the level from TORCH_DISTRIBUTED_DEBUG (OFF, INFO or DETAIL).

    Raises:
        UsageError: The variable has another value.

    Example:
        ```python
        import os

        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() is dist.DebugLevel.OFF
        ```
    """
    set_debug_level(DebugLevel[env.debug_level()])
