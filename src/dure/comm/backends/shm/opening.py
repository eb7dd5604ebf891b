"""Creation of the segment that the ranks of a group share.

Rank 0 makes the segment and offers "pid:fd:nonce", or "!" and why it could not. The others map it,
and all ranks wait, in the segment, until each has. A rank that cannot map it writes the reason to
"shm/refused" in the group's store, so that all ranks raise the same error at once.

The offer is part of the exchange in which the ranks create the group; `create` exchanges it alone,
through the store.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Sequence

from dure import env
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.shm.backend import ShmBackend
from dure.comm.backends.shm.copying import single_copies_wanted
from dure.errors import DureError, RendezvousError, RendezvousTimeout, UsageError
from dure.native import Group, require
from dure.store.system import cpu_quota

__all__ = ["MAX_RANKS", "ShmOpening", "create"]

MAX_RANKS = 256
_SEGMENT_KEY = "shm/segment"
_REFUSED_KEY = "shm/refused"
_quota = functools.cache(cpu_quota)
_LOOK_S = 0.05
"""How long a rank waits for the others before it checks whether one of them failed."""


class ShmOpening:
    """One rank's part of a group that is being created (see `backends.registry.Opening`).

    Raises:
        UsageError: The engine is not built, this is not Linux, there are too many ranks, or
            DURE_SINGLE_COPY is neither a number nor auto or off.
    """

    def __init__(self, options: BackendOptions) -> None:
        require("the backend 'shm'")
        if options.size > MAX_RANKS:
            raise UsageError(
                f"the shm backend takes at most {MAX_RANKS} ranks",
                seen=f"the group has {options.size}",
                fix="Use the gloo backend.",
            )
        self._options = options
        self._group: Group | None = None
        self._segment_bytes = 0
        self._single_copies = single_copies_wanted()
        self._migrates = env.flag("DURE_CORE_MIGRATION")
        self.offer = self._make() if options.rank == 0 else b""

    def _limits(self) -> tuple[float, int]:
        # A container may run on all cores of the machine, but not for all of the time.
        cores = int(min(len(os.sched_getaffinity(0)), _quota())) // self._options.threads
        return self._options.timeout.total_seconds(), max(1, cores)

    def _make(self) -> bytes:
        nonce = secrets.randbits(63)
        try:
            self._group = Group.create(
                0,
                self._options.size,
                *self._limits(),
                nonce,
                single_copies=self._single_copies,
                migrates=self._migrates,
            )
        except (OSError, RuntimeError) as error:
            if isinstance(error, DureError):
                raise
            return b"!" + self._reason(error).encode()
        self._segment_bytes = os.stat(self._group.file).st_size
        return f"{os.getpid()}:{self._group.file}:{nonce}".encode()

    def _reason(self, error: Exception) -> str:
        return f"rank {self._options.rank} (pid {os.getpid()}, uid {os.getuid()}): {error}"

    def connect(self, offers: Sequence[bytes]) -> None:
        """Map the segment that rank 0 offers.

        Raises:
            RendezvousError: There is none, or it cannot be mapped; the same on all ranks.
        """
        options = self._options
        if offers[0].startswith(b"!"):
            raise _refused(options, offers[0][1:].decode())
        if options.rank == 0:
            return
        pid, fd, nonce = map(int, offers[0].split(b":"))
        try:
            self._segment_bytes = os.stat(f"/proc/{pid}/fd/{fd}").st_size
            self._group = Group.attach(
                options.rank,
                options.size,
                *self._limits(),
                pid,
                fd,
                nonce,
                migrates=self._migrates,
            )
        except (OSError, RuntimeError) as error:
            if isinstance(error, DureError):
                raise
            # Others may fail because this rank did, so all report the first reason.
            first = options.store.compare_set(_REFUSED_KEY, "", self._reason(error))
            raise _refused(options, first.decode()) from None

    def complete(self) -> ShmBackend:
        """Return the backend when all ranks have mapped the segment.

        Raises:
            RendezvousError: A rank cannot map it; the same on all ranks.
            RendezvousTimeout: Not all ranks came within the group's timeout.
        """
        options, group = self._options, self._group
        assert group is not None
        deadline = time.monotonic() + options.timeout.total_seconds()
        while group.attached() < options.size:
            group.wait_attached(_LOOK_S)
            if group.attached() == options.size:
                break
            if options.store.check([_REFUSED_KEY]):
                raise _refused(options, options.store.get(_REFUSED_KEY).decode())
            if time.monotonic() > deadline:
                missing = group.not_attached()
                raise RendezvousTimeout(
                    "not all ranks mapped the group's shared segment",
                    came=tuple(r for r in range(options.size) if r not in missing),
                    missing=tuple(missing),
                    group=options.name,
                    rank=options.rank,
                    world_size=options.size,
                )
        try:
            group.ready()
        except OSError as error:  # a peer's symmetric heap cannot be mapped
            raise _refused(options, f"rank {options.rank}: {error}") from None
        self._group = None
        return ShmBackend(group, options, self._segment_bytes)

    def withdraw(self) -> None:
        """Close the segment, unless it has been handed out."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def create(options: BackendOptions) -> ShmBackend:
    """Make a group whose ranks exchange their offers in the group's store.

    Raises:
        UsageError: The engine is not built, this is not Linux, or there are too many ranks.
        RendezvousError: A rank cannot map the segment; the same on all ranks.
        RendezvousTimeout: Not all ranks came within the group's timeout.
    """
    opening = ShmOpening(options)
    try:
        if options.rank == 0:
            options.store.set(_SEGMENT_KEY, opening.offer)
        options.store.wait([_SEGMENT_KEY], options.timeout)
        opening.connect([options.store.get(_SEGMENT_KEY)])
        return opening.complete()
    except BaseException:
        opening.withdraw()
        raise


def _refused(options: BackendOptions, reason: str) -> RendezvousError:
    return RendezvousError(
        "the ranks cannot share memory",
        group=options.name,
        rank=options.rank,
        world_size=options.size,
        seen=reason,
        fix="Raise that limit for all ranks, or use backend='gloo'."
        if "RLIMIT_" in reason
        else "Run all ranks on one host, in one container, as one user; or give each rank a "
        "DURE_HOST_ID of its own, and it counts as a host; or use backend='gloo'.",
    )
