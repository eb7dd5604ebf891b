"""How groups come into being: the steps that the default group and every other group share.

A group is a name, a key space of its own in the store (a prefix made of the name), and one backend
for each kind of device. Its members check in the store that they agree on who is in it before the
backend is built, so that a disagreement is an error on all of them and not a hang. Whoever waits
for a member here looks now and then whether that one's process still lives.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.registry import create_backend, parse_backend
from dure.comm.backends.verify import backend as verify
from dure.comm.group import ProcessGroup
from dure.comm.world import World
from dure.errors import Desync, DureError, PeerLost, RendezvousTimeout, StoreTimeout, UsageError
from dure.store.base import Store
from dure.store.identity import alive
from dure.store.prefix import PrefixStore

if TYPE_CHECKING:
    from dure.store.rendezvous import Rendezvous

__all__ = ["GroupSpec", "as_timeout", "create_group", "default_pg_timeout"]

default_pg_timeout = timedelta(minutes=30)
"""How long an operation waits for its peers where the program does not say."""

_LOOK_S = 0.05

MEETING_LIMIT = timedelta(minutes=5)
"""How long group creation waits for members, if the group's own timeout is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What a group is to be.

    Attributes:
        name: The same on all members, different from that of every other group of the world.
        global_ranks: Members, in the order of their group ranks.
        backend: Name of a backend, or "cpu:gloo,cuda:nccl".
        timeout: How long an operation waits for its peers.
        desc: What the user called it.
        pg_options: Handed to the backend untouched.
        device_id: The device that this rank is bound to.
    """

    name: str
    global_ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    desc: str = ""
    pg_options: object = None
    device_id: torch.device | None = None


def as_timeout(timeout: timedelta | float | None, default: timedelta) -> timedelta:
    """Return `timeout` as a timedelta; raise unless it is a positive time."""
    if timeout is None:
        return default
    if not isinstance(timeout, timedelta):
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "the timeout must be a datetime.timedelta",
                seen=f"got {timeout!r}",
                fix="Write timedelta(seconds=30).",
            )
        timeout = timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise UsageError("the timeout must be positive", seen=f"got {timeout}")
    return timeout


def create_group(world: World, store: Store, my_global_rank: int, spec: GroupSpec) -> ProcessGroup:
    """Build this rank's side of a group that it is a member of, and add it to the world.

    Collective:
        All members call, with equal `spec`.
    """
    rank = spec.global_ranks.index(my_global_rank)
    prefix = f"group/{spec.name}"
    own = PrefixStore(prefix, store)
    watched = _WatchedStore(prefix, store, world.rendezvous, spec)
    _agree(watched, rank, spec)
    backends = _build_backends(watched, rank, spec)
    group = ProcessGroup(
        name=spec.name,
        rank=rank,
        global_ranks=spec.global_ranks,
        backends=backends,
        store=own,
        timeout=spec.timeout,
        desc=spec.desc,
    )
    with world.lock:
        world.groups[spec.name] = group
    return group


class _WatchedStore(PrefixStore):
    """The keys of a group that is being made; waiting for a member that has died is `PeerLost`."""

    def __init__(self, prefix: str, store: Store, meeting: Rendezvous | None, spec: GroupSpec):
        super().__init__(prefix, store)
        self._spec = spec
        # As they are now: backends keep this store, and a meeting that shrinks is numbered anew.
        members = () if meeting is None else meeting.members
        self._members = [members[r] for r in spec.global_ranks] if members else []

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` exist; look at the members now and then, less and less often."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        look_s = _LOOK_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return super().wait(keys, timedelta(seconds=max(0.0, min(left_s, look_s))))
            except StoreTimeout:
                if left_s <= look_s:
                    raise
            self._look()
            look_s = min(2 * look_s, 1.0)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell at once whether all `keys` exist."""
        here = super().check(keys)
        if not here:
            self._look()
        return here

    def _look(self) -> None:
        for peer, member in enumerate(self._members):
            if alive(member.process) is False:
                raise PeerLost(
                    f"the process of rank {peer} ended before the group was made",
                    group=self._spec.name,
                    world_size=len(self._spec.global_ranks),
                    peer=peer,
                    pid=member.pid,
                    host=member.host,
                    seen=f"global rank {self._spec.global_ranks[peer]}, pid {member.pid}",
                    fix="Make the group of ranks that live: dure.shrink() finds them.",
                )


def _build_backends(own: Store, rank: int, spec: GroupSpec) -> dict[str, Backend]:
    """Build the backend of each kind of device; where one fails, none is left behind."""
    built: dict[str, Backend] = {}
    names = parse_backend(spec.backend)
    try:
        for name in dict.fromkeys(names.values()):
            options = BackendOptions(
                store=PrefixStore(name, own),
                rank=rank,
                size=len(spec.global_ranks),
                global_ranks=spec.global_ranks,
                timeout=spec.timeout,
                name=spec.name,
                device_id=spec.device_id,
                pg_options=spec.pg_options,
            )
            backend = create_backend(name, options)
            if name not in verify.CHECK_THEMSELVES and verify.wanted(options):
                backend = verify.VerifyingBackend(backend, options)
            built[name] = backend
    except BaseException:
        for backend in built.values():
            with suppress(DureError):
                backend.close(True)
        raise
    return {device: built[name] for device, name in names.items()}


def _agree(own: Store, rank: int, spec: GroupSpec) -> None:
    """Compare what the members think the group is; all of them see a difference."""
    mine = f"ranks {list(spec.global_ranks)}, backend {spec.backend!r}"
    own.set(f"spec/{rank}", mine)
    others = range(len(spec.global_ranks))
    keys = [f"spec/{r}" for r in others]
    limit = min(spec.timeout, MEETING_LIMIT)
    try:
        own.wait(keys, limit)
    except StoreTimeout:
        missing = tuple(r for r in others if not own.check([f"spec/{r}"]))
        raise RendezvousTimeout(
            "not all members came to create the group",
            group=spec.name,
            rank=rank,
            world_size=len(spec.global_ranks),
            elapsed_s=limit.total_seconds(),
            came=tuple(r for r in others if r not in missing),
            missing=missing,
            seen=f"missing are global ranks {[spec.global_ranks[r] for r in missing]}",
            fix="All ranks must create the same groups in the same order.",
        ) from None
    calls = {r: text.decode() for r, text in enumerate(own.multi_get(keys))}
    if any(text != mine for text in calls.values()):
        raise Desync(
            "the members do not agree on the group",
            group=spec.name,
            rank=rank,
            world_size=len(spec.global_ranks),
            calls=calls,
            seen="; ".join(f"rank {r} says {text}" for r, text in calls.items()),
            fix="All ranks must create the same groups, with equal arguments, in the same order.",
        )


def check_ranks(ranks: Sequence[int], world_size: int, op: str) -> tuple[int, ...]:
    """Return `ranks` as plain ints; raise unless they differ and lie within the world."""
    try:
        plain = tuple(operator.index(r) for r in ranks)
    except TypeError:
        raise UsageError(
            "ranks must be a list of whole numbers", op=op, seen=f"got {ranks!r}"
        ) from None
    for r in plain:
        if not 0 <= r < world_size:
            raise UsageError(
                f"Rank {r} is out of range",
                op=op,
                seen=f"the world has ranks 0 to {world_size - 1}",
            )
    if len(set(plain)) != len(plain):
        raise UsageError("a rank is named twice", op=op, seen=f"ranks {list(plain)}")
    if not plain:
        raise UsageError("a group needs at least one rank", op=op, seen="ranks=[]")
    return plain
