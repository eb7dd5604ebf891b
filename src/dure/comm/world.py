"""The world of a rank: its default group and its other groups.

A rank is a process, or a thread of one. The current world is found through a context variable that
falls back to the process's own world: a thread that a program starts itself sees the process's
groups, while a thread-rank (`new_world`) sees only its own. Objects that outlive a call (DDP, a
mesh) hold their group, because autograd may call them on a thread with an empty context.

After a fork the child has no groups: a group's memory, sockets and threads belong to the parent.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from dure.errors import NotInGroupError, UsageError
from dure.trace import logs

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.store.rendezvous import Rendezvous


class World:
    """All groups of one rank.

    `beginning` is held while the default group is created: a rank that has created it may call a
    function here (`dure.rpc`) before this rank's own thread has finished.

    Threads:
        Groups are added and removed under `lock`; reading `default` needs none.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.eager_bytes: int | None = None  # see `BackendOptions`; stays when groups are left
        self.clear()

    def clear(self) -> None:
        """Forget everything (the groups have been closed, or belong to a parent process)."""
        self.beginning = threading.RLock()
        self.is_parents = False  # the default group was that of a parent process
        self.default: ProcessGroup | None = None
        self.groups: dict[str, ProcessGroup] = {}
        self.rendezvous: Rendezvous | None = None
        self.num_created = 0
        self.created_locally: dict[tuple[int, ...], int] = {}

    def clear_in_child(self) -> None:
        """Forget the groups of the parent process, and remember that it had a default group."""
        is_parents = self.is_parents or self.default is not None
        self.clear()
        self.is_parents = is_parents

    def need_default(self) -> ProcessGroup:
        """Return the default group, or raise; wait while it is being created."""
        if self.default is None:
            with self.beginning:
                if self.default is not None:
                    return self.default
            if self.is_parents:
                raise UsageError(
                    "the default group belongs to the process that this one was forked from",
                    fix="Call from the rank's own process, or dure.init_process_group() here.",
                )
            raise UsageError(
                "the default process group has not been initialized",
                fix="Call dure.init_process_group() first (and not after destroy_process_group()).",
            )
        return self.default


_process_world = World()
_current: contextvars.ContextVar[World]
_current = contextvars.ContextVar("dure_world", default=_process_world)
os.register_at_fork(after_in_child=_process_world.clear_in_child)


_has_thread_ranks = False
"""Whether this process has had thread-ranks; a condition of compiled code."""

when_left: list[Callable[[], object]] = []
"""Called when a rank has left its job: other modules remove what they keep for groups."""


def current_world() -> World:
    """Return the world of the calling rank."""
    return _current.get()


def _rank_here() -> int | None:
    found = current_world().rendezvous
    return None if found is None else found.rank


logs.find_rank = _rank_here


def world_to_compile() -> World:
    """Return the world of the calling rank, for compiled code, which cannot use context variables.

    The values that are read of it become conditions of the compiled code: it is compiled again for
    another default group. If ranks are threads the graph breaks instead.
    """
    return _current.get() if _has_thread_ranks else _process_world


def is_thread_rank() -> bool:
    """Return whether the calling rank shares its process with others (`dure.testing`)."""
    return _current.get() is not _process_world


@contextmanager
def new_world() -> Iterator[World]:
    """Give the calling thread a separate, empty world for the length of a `with` block."""
    global _has_thread_ranks
    _has_thread_ranks = True
    token = _current.set(World())
    try:
        yield current_world()
    finally:
        _current.reset(token)


class _NonMember:
    """The return value of `new_group` on ranks outside the new group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def __reduce__(self) -> str:
        return "_NON_MEMBER"


_NON_MEMBER = cast("ProcessGroup", _NonMember())  # may be passed as any group


class _GroupMeta(type):
    """Makes WORLD a property of the class, as in torch.distributed."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        return current_world().default


class GroupMember(metaclass=_GroupMeta):
    """torch's names of predefined groups.

    `WORLD` is the default group, None before initialization; `NON_GROUP_MEMBER` is any group that
    this rank is not in.

    Example:
        ```python
        assert dist.GroupMember.WORLD is dist.group.WORLD
        ```
    """

    NON_GROUP_MEMBER = _NON_MEMBER


group = GroupMember


def resolve(group: object, op: str) -> ProcessGroup:
    """Return `group`, or the default group for None; raise for anything that is not a group."""
    if group is None:
        return _current.get().default or current_world().need_default()
    if group is _NON_MEMBER:
        raise NotInGroupError(
            "Invalid process group specified: this rank is not a member of it",
            op=op,
            fix="Call on the group's members only (dure.get_rank(group) is -1 elsewhere).",
        )
    if not hasattr(group, "global_ranks"):
        raise UsageError(f"{group!r} is not a process group", op=op, fix="Pass group=None for all.")
    return group  # pyright: ignore[reportReturnType]


def group_named(name: str, op: str) -> ProcessGroup:
    """Return the group of this name, or the channel; "0" is the default group, as in torch.

    Raises:
        UsageError: This rank has no such group now.
    """
    world = current_world()
    default = world.need_default()
    found = world.groups.get(name)
    if found is not None:
        return found
    parent = world.groups.get(name.removesuffix("[1]"))
    if parent is not None:
        return parent.channel(1)
    if name == "0":
        return default
    raise UsageError(
        f"this rank has no group named {name!r}",
        op=op,
        seen="its groups are " + ", ".join(map(repr, world.groups.values())),
        fix="Make the group first. A graph finds its groups by name: capture the function again "
        "with groups that exist.",
    )
