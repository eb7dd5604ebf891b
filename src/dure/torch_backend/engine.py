"""Choosing Dure's backend for a group of torch.distributed, and building the group.

The backend is shm if all ranks are on one host, hybrid (shm in each host, Gloo between them) if
they are on several, and gloo if the native engine is missing on some rank. All ranks must choose
the same: each writes its host, and whether its engine is available, to the store, and the last one
to do so chooses for all. DURE_BACKEND overrides the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from dure import env
from dure.comm.creation import GroupSpec, create_groups
from dure.comm.group import ProcessGroup
from dure.comm.queries import is_backend_available
from dure.comm.recording import begin_recording
from dure.comm.world import World
from dure.store.base import Store
from dure.store.gathering import Gathering, gather
from dure.store.identity import myself
from dure.torch_backend.store import TorchStore
from dure.torch_private import c10d

__all__ = ["GroupRequest", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The group that torch asks for.

    Attributes:
        store: Torch's store, used only for this group.
        rank: Group rank of this process.
        global_ranks: Global rank of each group rank.
        timeout: How long an operation waits for its peers.
        name: The group's name, the same on all ranks.
        desc: Description of the group.
        pg_options: Options of the backend.
    """

    store: c10d.Store
    rank: int
    global_ranks: tuple[int, ...]
    timeout: timedelta
    name: str = ""
    desc: str = ""
    pg_options: object = None


def build(request: GroupRequest) -> ProcessGroup:
    """Build Dure's group for a request; all its ranks must call.

    Raises:
        RendezvousTimeout: Ranks did not arrive; `missing` has them.
        Desync: The ranks do not agree on the group.
    """
    store = TorchStore(request.store)
    spec = GroupSpec(
        name=request.name or "default",
        global_ranks=request.global_ranks,
        backend=_choose(store, request),
        timeout=request.timeout,
        desc=request.desc,
        pg_options=request.pg_options,
    )
    # The world is not kept: torch keeps the list of groups.
    (group,) = create_groups(World(), store, request.global_ranks[request.rank], [spec])
    group.in_torch = True
    try:
        begin_recording(store)
    except BaseException:
        group.close(abort=True)
        raise
    return group


def _choose(store: Store, request: GroupRequest) -> str:
    named = env.text("DURE_BACKEND")
    if named:
        return named
    size = len(request.global_ranks)
    able = "able" if is_backend_available("shm") else "unable"
    place = f"{able} {myself().host_id}"
    gathering = Gathering(
        store, "place", request.rank, size, _choice_for, once=False, group=request.name
    )
    return gather(gathering, place, request.timeout).decode()


def _choice_for(places: list[bytes]) -> bytes:
    """Return the backend for the places of all ranks."""
    if not all(place.startswith(b"able") for place in places):
        return b"gloo"
    return b"shm" if len(set(places)) == 1 else b"hybrid"
