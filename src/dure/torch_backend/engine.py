"""Which of our backends serves a group of torch's, and how the group is built on it.

Ranks that share a host use shared memory; those of several hosts shared memory inside each host and
Gloo between them; where our engine is not built for some rank, Gloo alone. All ranks must choose
alike, and none can know alone: each one says in the store where it is and whether its
engine can run, and all decide by the same rule on what all have said. DURE_BACKEND overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from dure import env
from dure.comm.creation import GroupSpec, create_groups
from dure.comm.group import ProcessGroup
from dure.comm.queries import is_backend_available
from dure.comm.recording import begin_recording
from dure.comm.world import World
from dure.errors import RendezvousTimeout, StoreTimeout
from dure.store.base import Store
from dure.store.identity import myself
from dure.torch_backend.store import TorchStore

__all__ = ["Plan", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What torch wants a group to be.

    Attributes:
        store: Torch's store for this group and no other.
        rank: Group rank of this process.
        global_ranks: Global rank of each group rank.
        timeout: How long an operation waits for its peers.
        name: The group's name, the same on all ranks.
        desc: What the group is for.
        pg_options: Options of the backend.
    """

    store: c10d.Store
    rank: int
    global_ranks: tuple[int, ...]
    timeout: timedelta
    name: str = ""
    desc: str = ""
    pg_options: object = None


def build(plan: Plan) -> ProcessGroup:
    """Build our side of a group; every one of its ranks must do so.

    Raises:
        RendezvousTimeout: A rank did not come; it is named.
        Desync: The ranks do not agree on the group.
    """
    store = TorchStore(plan.store)
    spec = GroupSpec(
        name=plan.name or "default",
        global_ranks=plan.global_ranks,
        backend=_choose(store, plan),
        timeout=plan.timeout,
        desc=plan.desc,
        pg_options=plan.pg_options,
    )
    # The world is thrown away: it is torch that knows which groups there are.
    (group,) = create_groups(World(), store, plan.global_ranks[plan.rank], [spec])
    group.in_torch = True
    try:
        begin_recording(store)
    except BaseException:
        group.close(abort=True)
        raise
    return group


def _choose(store: Store, plan: Plan) -> str:
    named = env.text("DURE_BACKEND")
    if named:
        return named
    size = len(plan.global_ranks)
    keys = [f"place/{r}" for r in range(size)]
    able = "able" if is_backend_available("shm") else "unable"
    store.set(keys[plan.rank], f"{able} {myself().host_id}")
    try:
        store.wait(keys, plan.timeout)
    except StoreTimeout as error:
        missing = tuple(r for r in range(size) if keys[r] in error.keys)
        raise RendezvousTimeout(
            "not all ranks came to create the group",
            group=plan.name,
            rank=plan.rank,
            world_size=size,
            elapsed_s=plan.timeout.total_seconds(),
            came=tuple(r for r in range(size) if r not in missing),
            missing=missing,
            fix="All ranks must create the same groups in the same order.",
        ) from None
    places = {store.get(k) for k in keys}
    if not all(place.startswith(b"able") for place in places):
        return "gloo"
    return "shm" if len(places) == 1 else "hybrid"
