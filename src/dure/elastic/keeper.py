"""The store of an elastic job, and the way to another when it is lost.

Three kinds of process may hold the store: an agent of the launcher, rank 0 (a program started
without a launcher), or, later, whichever rank took it over. When it dies:

1. If agents on other hosts have stores of their own, all go to the next one (`store/ladder.py`).
2. On one host, the lowest rank that lives opens a store at a Unix socket whose name is made of the
   job's name, the job key and that rank's token, and all others dial it. A rank whose process has
   ended is passed by, so all come to the same one, each from its own list of members.

The new store is empty but for what the ranks bring along: the latest plan (`Council.move`).

A store may be given up while it lives: its agent was stopped, or starved, and the other agents have
opened the next one. It then holds a note that says so (`moved`), and ranks follow that, too; who
comes later looks for them in the new store only.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

from dure import env
from dure.elastic.roster import Member, Plan
from dure.errors import StoreError, StoreLost, StoreTimeout
from dure.placement import detect
from dure.store.base import Store
from dure.store.finding import find_place
from dure.store.identity import Identity, alive, process_at
from dure.store.ladder import Ladder, moved_to, rungs_of
from dure.store.memory import HashStore
from dure.store.network import NetworkStore, job_key
from dure.store.places import LocalPlace, Spot
from dure.store.prefix import PrefixStore

__all__ = ["Keeper"]

_TRY_S = 0.1
_MOVE_S = 30.0
"""How long a note about another store is followed, while there is still this one."""

_JOIN_S = 300.0
_ANSWER = timedelta(seconds=10)
"""How long the store may take to answer; what is waited for there has limits of its own."""


class Keeper:
    """This process's way to the job's store.

    Args:
        store: A store that the caller gave, and that cannot be replaced; None finds it.
        rank: This process's number; -1 takes it from the environment.
        world_size: How many ranks start; -1 likewise.
        turn: How many elastic runs of the program were before this one.

    Attributes:
        rank: This process's number.
        world_size: How many ranks start.
        keys: The job's own keys in the store that is in use.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int, turn: int = 0) -> None:
        self.rank, self.world_size = rank, world_size
        self._given = store is not None
        self._ladder: Ladder | None = None
        self._in_vain: set[str] = set()  # notes that have led nowhere
        self._holder: Identity | None = None
        self._held_by_rank_0 = False
        self._name = "given"
        self._base = store if store is not None else self._open(rank, world_size)
        self._name = f"{self._name}/{turn}"
        self.keys = PrefixStore(f"dure/elastic/{self._name}", self._base)

    def _open(self, rank: int, world_size: int) -> Store:
        if rank < 0 and _is_alone():
            self.rank, self.world_size, self._given, self._name = 0, 1, True, "alone"
            return HashStore()
        spot: Spot = find_place(None, rank, world_size)
        self.rank, self.world_size, self._name = spot.rank, spot.world_size, spot.place.name
        if env.flag("DURE_ELASTIC"):  # one job, whichever process was started how often
            self._name = env.text("TORCHELASTIC_RUN_ID") or "elastic"
        self._held_by_rank_0 = spot.place.held_by_rank_0
        store = spot.place.open(spot.rank, spot.world_size, _JOIN_S)
        store.set_timeout(_ANSWER)
        pid = env.integer("DURE_STORE_PID")
        if pid is not None:
            self._holder = process_at(pid)
        return store

    def _note_rungs(self, store: Store) -> None:
        """Remember the stores of other agents, while there is somebody to ask."""
        if self._given or self._holder is not None or not isinstance(store, NetworkStore):
            return
        rungs = rungs_of(store)
        if len(rungs) > 1:
            host = _address(store).rpartition(":")[0]
            self._ladder = Ladder(rungs, job_key(host), timeout=_ANSWER)

    def know(self, plan: Plan | None) -> None:
        """Learn who the ranks are, who holds the store, and where others would be."""
        if plan is not None and self._held_by_rank_0 and self._holder is None:
            self._holder = next((m.process for m in plan.members if m.rank == 0), None)
        with contextlib.suppress(StoreError):
            self._note_rungs(self._base)

    @property
    def lost(self) -> bool:
        """Whether the process that holds the store is known to have ended. Cost: 20 us."""
        return self._holder is not None and alive(self._holder) is False

    @property
    def movable(self) -> bool:
        """Whether another part of the job could have a store of its own."""
        return self._ladder is not None

    @property
    def astray(self) -> bool:
        """Whether the store that is in use is not the job's first."""
        ladder = self._ladder
        return ladder is not None and _address(self._base) != ladder.addresses[0]

    @property
    def note(self) -> str:
        """Where the job has gone, if the store that is in use says so; empty otherwise.

        Cost: a round trip, where there are several agents.
        """
        if self._ladder is None:
            return ""
        moved = moved_to(self._base) or ""
        return "" if moved == _address(self._base) or moved in self._in_vain else moved

    def moved(self) -> bool:
        """Tell whether the job has gone to another store, though this one answers."""
        return bool(self.note)

    def follow(self, plan: Plan | None, me: Member, timeout_s: float) -> Store:
        """Return the job's keys in the store that is in use now, be it the same or another.

        Args:
            plan: The latest plan; None for a process that is in none yet.
            me: This process.
            timeout_s: How long to look.

        Raises:
            StoreLost: There is none, and why.

        Collective:
            All members of the plan that are left call.
        """
        if self._given:
            raise StoreLost("the store that the program gave is lost", rank=me.rank)
        old, note = self._base, ""
        if self._ladder is not None:
            with contextlib.suppress(StoreError):
                note = self.note
            with contextlib.suppress(StoreLost, StoreTimeout):
                self._base = self._ladder.advance(min(timeout_s, _MOVE_S) if note else timeout_s)
                self._holder = None
        if _address(self._base) == _address(old):
            self._in_vain.add(note)
        if self._base is old and not self._still_there(old):
            if plan is None:
                raise StoreLost("the job's store was lost before this rank came", rank=me.rank)
            self._base = self._succeed(plan, me, timeout_s)
        if self._base is not old:
            _give_up(old)
        self.keys = PrefixStore(f"dure/elastic/{self._name}", self._base)
        return self.keys

    def _still_there(self, store: Store) -> bool:
        if self.lost:
            return False
        with contextlib.suppress(StoreError):
            store.check([])
            return True
        return False

    def _succeed(self, plan: Plan, me: Member, timeout_s: float) -> Store:
        """Open, or find, the store of the lowest member that lives."""
        if any(m.process.host_id != me.process.host_id for m in plan.members):
            raise StoreLost(
                "the process that held the store has ended",
                rank=me.rank,
                seen="the ranks that are left are on several hosts, and no agent has another",
                fix="Start the job with `dure run` on every host.",
            )
        deadline = time.monotonic() + timeout_s
        for member in plan.members:
            place = LocalPlace(name=f"elastic {self._name} {member.token}")
            if member.token == me.token:
                self._holder = me.process
                store = place.open(0, len(plan.members), timeout_s)
                store.set_timeout(_ANSWER)
                return store
            while alive(member.process) is not False:
                with contextlib.suppress(StoreTimeout):
                    store = place.open(1, len(plan.members), _TRY_S)
                    store.set_timeout(_ANSWER)
                    self._holder = member.process
                    return store
                if time.monotonic() > deadline:
                    raise StoreLost(
                        "the process that held the store has ended, and the next one does not "
                        "take its place",
                        rank=me.rank,
                        elapsed_s=timeout_s,
                        seen=f"{member} lives, but is elsewhere",
                    )
        raise StoreLost("no rank is left to hold the store", rank=me.rank)

    def close(self) -> None:
        """Leave the store; one that the caller gave stays open."""
        if not self._given:
            self._base.set_timeout(timedelta(seconds=1))
            with contextlib.suppress(StoreError):
                self._base.close()


def _is_alone() -> bool:
    """Tell whether nobody has started this process as a rank of a job."""
    told = env.text("RANK") is not None or env.text("WORLD_SIZE") is not None
    return not told and detect(env.everything()).member is None


def _address(store: Store) -> str:
    """Return "host:port" of a store; empty where it is none of the network."""
    return store.endpoint.rpartition("/")[2] if isinstance(store, NetworkStore) else ""


def _give_up(store: Store) -> None:
    with contextlib.suppress(StoreError):
        store.close()
