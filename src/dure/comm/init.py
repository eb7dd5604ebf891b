"""Joining a job and leaving it: init_process_group, destroy_process_group, process_group."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from dure import env
from dure.comm.backends.mpi import library as mpi_library
from dure.comm.backends.mpi.place import find_mpi_place
from dure.comm.backends.registry import device_types_of, parse_backend
from dure.comm.background import abandon_tasks, finish_at_exit, finish_tasks, raise_first
from dure.comm.creation import (
    RENDEZVOUS_LIMIT,
    GroupSpec,
    as_timeout,
    create_groups,
    default_pg_timeout,
    forget_keys,
)
from dure.comm.futures import waiters
from dure.comm.gpus import each_has_its_own, visible_gpus
from dure.comm.group import ProcessGroup
from dure.comm.names import Backend
from dure.comm.recording import begin_recording, end_recording
from dure.comm.splitting import connect
from dure.comm.subgroups import split_group
from dure.comm.world import GroupMember, World, current_world, resolve, when_left
from dure.errors import DureError, PerformanceWarning, RendezvousError, UsageError
from dure.native import available as native_available
from dure.placement import System, detect
from dure.store.base import Store
from dure.store.init_method import read_init_method
from dure.store.lifetime import at_process_end
from dure.store.rendezvous import Rendezvous, rendezvous, rendezvous_alone, rendezvous_at
from dure.trace import logs

ProcessGroup.splitter = split_group  # pyright: ignore[reportAttributeAccessIssue]

_log = logs.logger("comm")


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Join the job: find the other ranks, and create the default group.

    Args:
        backend: "shm", "hybrid", "hybrid_mpi", "threads", "gloo", "mpi", "nccl", or one for each
            kind of device such as "cpu:hybrid,cuda:nccl". All but nccl take CUDA tensors, too: they
            copy them to the host and back. "fake": a dry run of a world of any size in one process;
            nothing is sent. None: "shm" if all ranks share a host, else "hybrid", which is shared
            memory inside a host and gloo between hosts; and "nccl" for CUDA tensors if each rank
            has a GPU of its own: its `device_id`, or else, of the GPUs that it sees, the one of its
            number on the host.
        init_method: "env://", "tcp://HOST:PORT", "file:///PATH" or "etcd://HOST:PORT/JOB". None:
            "env://". If RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT are not set, the values are
            those of Slurm, an MPI launcher or another cluster that started the ranks (`dure env`
            shows them).
        timeout: How long operations wait for their peers, and joining for the other ranks. By
            default operations wait 30 minutes; joining, and every later creation of a group, waits
            5 minutes.
        world_size: Number of ranks of the job; by default that of WORLD_SIZE.
        rank: This rank's number; by default that of RANK.
        store: A store that all ranks share, instead of `init_method`; `rank` and `world_size` are
            required then.
        group_name: Distinguishes jobs that use one store.
        pg_options: Options of the backend: ``{"verify": True}`` of any, ProcessGroupNCCL.Options
            of nccl, any object of a registered one. Options that no backend uses are refused.
        device_id: The device that this rank is bound to. Over nccl, new groups are split off the
            default group if all ranks pass one (docs/gpu.md).

    Raises:
        UsageError: The default group exists; contradictory arguments; no such backend.
        RendezvousError: An environment variable is missing; the port is taken; two ranks have one
            number; ranks disagree on the world size; a file is stale; the job key is wrong.
        RendezvousTimeout: Some ranks did not call; `came` and `missing` name them.

    Collective:
        Every rank of the job calls, once.

    Cost:
        Some round trips to the store, and the connections of the backend.

    Example:
        ```python
        import dure as dist  # started by: dure run --nproc 2 program.py

        dist.init_process_group()
        print(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
        ```
    """
    world = current_world()
    _check_may_join(world, store, init_method)
    limit = as_timeout(timeout, default_pg_timeout)
    join_limit = RENDEZVOUS_LIMIT if timeout is None else limit
    named = set() if backend is None else set(parse_backend(Backend(backend)).values())
    _check_variables(rank)
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    gpus = () if backend else visible_gpus(device)
    explicit = not (init_method is None and store is None and rank < 0 and world_size < 0)
    if named == {"fake"}:
        found = _rendezvous_alone(init_method or "env://", rank, world_size)
    elif not explicit and _wants_mpi(backend):
        found = _rendezvous_by_mpi(join_limit, group_name, gpus)
    else:
        found = rendezvous(init_method, rank, world_size, store, join_limit, group_name, gpus)
    with _left_on_error(world, found):
        chosen, why = _chosen_backend(backend, found)
        spec = GroupSpec(
            name=group_name or "world",
            global_ranks=tuple(range(found.world_size)),
            backend=chosen,
            timeout=limit,
            desc="default_pg",
            pg_options=pg_options,
            device_id=device,
            creation_timeout=join_limit,
            why=why,
        )
        with world.beginning:
            (world.default,) = create_groups(world, found.store, found.rank, [spec])
            connect(world.default)
        _to_leave.add(world)
        _leave_first()
        begin_recording(found.store)


def _check_may_join(world: World, store: Store | None, init_method: str | None) -> None:
    """Raise if this rank has joined a job, or passes two places to meet."""
    if store is not None and init_method is not None:
        raise UsageError("pass either store or init_method, not both", op="init_process_group")
    if world.default is not None:
        raise UsageError(
            "the default process group is initialized already",
            op="init_process_group",
            fix="Call it once in each process, or destroy_process_group() first.",
        )


def _rendezvous_alone(url: str, rank: int, world_size: int) -> Rendezvous:
    """Return the rendezvous of a dry run: only rank and world size, which `url` may have."""
    if "?" in url and not url.startswith("env://"):
        method = read_init_method(url, rank, world_size)
        rank, world_size = method.rank, method.world_size
    return rendezvous_alone(_given("RANK", rank), _given("WORLD_SIZE", world_size))


@contextmanager
def _left_on_error(world: World, found: Rendezvous) -> Iterator[None]:
    """Enter the job; leave it again if the default group cannot be created."""
    world.rendezvous = found
    try:
        yield
    except BaseException:
        leave(world, abort=True)
        raise


def _given(name: str, argument: int) -> int:
    """Return an argument, or if it is missing the variable; -1 if both are missing."""
    number = env.integer(name) if argument == -1 else argument
    return -1 if number is None else number


def _check_variables(rank: int) -> None:
    """Refuse invalid flags; on rank 0 warn about variables that are unknown or set too late.

    `dure run` reports unknown ones itself, once for all ranks.
    """
    env.check_flags()
    logs.configure()
    late = env.set_too_late_note() if env.text("RANK") == "0" else ""
    if late:
        _log.warning("%s", late)
    if env.text("DURE_LAUNCHER") is None and rank <= 0 and env.text("RANK", "0") == "0":
        note = env.unknown_note()
        if note:
            _log.warning("%s", note)


def _wants_mpi(backend: str | None) -> bool:
    """Return whether the ranks find each other through MPI, as far as this rank can decide.

    They do if the program uses an MPI backend, unless RANK or WORLD_SIZE are set without an MPI
    launcher; and if an MPI launcher started the ranks on several hosts, because MPI also sends them
    the job key. On one host, and under srun, variables are enough: mpi4py may use another MPI than
    the launcher, in which every rank is alone.
    """
    named = set() if backend is None else set(parse_backend(backend).values())
    wanted = bool(named & {"mpi", "hybrid_mpi"})
    numbered = env.text("RANK") is not None or env.text("WORLD_SIZE") is not None
    if not mpi_library.launched():
        return wanted and not numbered
    if wanted or numbered:
        return wanted
    placement = detect(env.everything())
    member = placement.member
    placed = placement.system is System.SLURM or (member is not None and member.on_one_host)
    return not placed and mpi_library.installed()


def _rendezvous_by_mpi(timeout: timedelta, group_name: str, gpus: tuple[str, ...]) -> Rendezvous:
    began = time.monotonic()
    method = find_mpi_place(timeout.total_seconds())
    placement = detect(env.everything())
    member = placement.member
    if placement.system in (System.DURE, System.TORCHRUN, System.LAUNCHER):
        member = None  # an mpirun that is itself a rank of `dure run` starts a separate job
    if member is not None and method.world_size != member.world_size:
        raise RendezvousError(
            "MPI and the launcher do not agree on the job",
            seen=f"{placement.system} started {member.world_size} processes, but mpi4py's MPI "
            f"has {method.world_size}",
            fix="Start with the mpirun of the MPI that mpi4py was built with, and no other "
            "(`python -m mpi4py --mpi-library`), or choose a backend that needs no MPI.",
        )
    left_s = max(1.0, timeout.total_seconds() - (time.monotonic() - began))
    return rendezvous_at(method, timedelta(seconds=left_s), group_name, gpus)


def _chosen_backend(backend: str | None, found: Rendezvous) -> tuple[Backend, str]:
    """Return the backend, and why it was chosen."""
    if backend:
        return Backend(backend), "asked for"
    chosen, why = _default_backend(found)
    return Backend(_with_nccl(chosen, found)), why


def _default_backend(found: Rendezvous) -> tuple[str, str]:
    """Return the fastest backend that all ranks can use, and why it was chosen."""
    named = env.text("DURE_BACKEND")
    if named:
        return named, "DURE_BACKEND"
    if found.same_process:
        return "threads", "all ranks are threads of one process"
    usable, reason = native_available()
    if not usable:
        if sys.platform == "linux" and found.rank == 0:
            warnings.warn(
                f"ranks communicate by gloo, without shared memory: {reason}. backend='gloo' asks "
                "for it without this warning.",
                PerformanceWarning,
                stacklevel=3,
            )
        return "gloo", f"the native engine cannot be used: {reason}"
    if found.same_host:
        return "shm", "all ranks are on one host"
    return "hybrid", "ranks are on several hosts"


def _with_nccl(backend: str, found: Rendezvous) -> str:
    """Add NCCL for CUDA tensors to the default backend, if each rank has a GPU of its own.

    Otherwise the default backend takes CUDA tensors, by staging (backends/staged.py).
    """
    if ":" in backend or device_types_of(backend) != ("cpu",):
        return backend
    return f"cpu:{backend},cuda:nccl" if each_has_its_own(found.members) else backend


def destroy_process_group(group: Any = None) -> None:
    """Leave a group, or the job.

    Waits for saves in the background (`dure.checkpoint.async_save`) that use the groups. Pending
    operations end with `Aborted`. Peers that still wait for this rank raise `PeerLost`.

    Args:
        group: The group to leave; None (or the default group) for all groups and the job.

    Raises:
        UsageError: The group is not one of this rank's, or was destroyed before.
        Exception: A save in the background failed, and the program has not read its result. The
            groups are left.

    Collective:
        None: ranks may leave at different times.

    Example:
        ```python
        pair = dist.new_group([0, 1])
        dist.destroy_process_group(pair)
        ```
    """
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    world = current_world()
    if world.default is None and (_has_ended or not threading.main_thread().is_alive()):
        return  # called at exit: the groups were left before, or never made
    pg = resolve(group, "destroy_process_group")
    if world.groups.get(pg.group_name) is not pg:
        raise UsageError(
            "the process group has been destroyed already",
            op="destroy_process_group",
            group=pg.group_name,
        )
    if pg is world.default:
        leave(world)
        return
    errors = finish_tasks(world, pg)
    try:
        for companion in pg.companions:
            _close(world, companion)
    finally:
        _close(world, pg)
    raise_first(errors)


def _close(world: World, pg: ProcessGroup) -> None:
    if world.groups.pop(pg.group_name, None) is None:
        return  # another thread has closed it
    try:
        pg.close()
    finally:
        if world.rendezvous is not None:
            forget_keys(pg, world.rendezvous)


def leave(world: World, abort: bool = False) -> None:
    """Close all groups of a world, the default one last, then leave the store.

    Wait for tasks in the background; with `abort` do not wait, and they fail.
    """
    errors = [] if abort else finish_tasks(world)
    _to_leave.discard(world)
    groups, rendezvous, default = list(world.groups.values()), world.rendezvous, world.default
    world.clear()
    first: DureError | None = None
    for pg in sorted(groups, key=lambda g: g is default):
        try:
            pg.close(abort)
        except DureError as e:
            first = first or e
    if rendezvous is not None:
        rendezvous.close()
    end_recording()
    waiters.close()
    for forget in when_left:
        forget()
    if abort:
        abandon_tasks(world)
    raise_first(errors)
    if first is not None and not abort:
        raise first


_to_leave: set[World] = set()
"""Worlds of this process that are in a job; empty again in a forked child."""


_has_ended = False
"""Whether this process has left jobs because it ends."""


def _leave_at_exit() -> None:
    """Leave the jobs that the program did not leave, so that peers notice it at once."""
    global _has_ended
    finish_at_exit()
    for world in list(_to_leave):
        if world.default is not None:
            _has_ended = True
            leave(world, abort=True)


def _leave_first() -> None:
    """When the process ends, leave before other libraries clean up: peers notice it sooner."""
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


os.register_at_fork(after_in_child=_to_leave.clear)
at_process_end(_leave_at_exit, order=0)


@contextmanager
def process_group(*args: Any, **kwargs: Any) -> Iterator[ProcessGroup]:
    """Join a job for the length of a `with` block.

    Args:
        *args: Those of `init_process_group`.
        **kwargs: Those of `init_process_group`.

    Yields:
        The default group. It is destroyed at the end of the block. If the block raises, it first
        waits for saves in the background, and aborts pending operations, so that leaving does not
        hide the error.

    Example:
        ```python
        with dist.process_group("shm") as world:
            assert world.size() == 2
            dist.barrier()
        ```
    """
    init_process_group(*args, **kwargs)
    world = current_world()
    try:
        yield world.need_default()
    except BaseException as e:
        if world.default is not None:
            try:
                for error in finish_tasks(world):
                    e.add_note(f"also in the background: {type(error).__name__}: {error}")
            finally:
                leave(world, abort=True)
        raise
    if world.default is not None:
        leave(world)
