"""`run`: a program's training loop that outlives the loss of ranks.

    ┌────────────► agree on an epoch ──► make its group ──► bring the state ──► train(state) ──► end
    │                (council.py)                            (snapshot.py)          │
    └──────────────── a peer is lost, or newcomers wait ◄───────────────────────────┘

A rank whose peer is lost learns it from its next collective, wherever that is in `train`. The
exception leaves `train`, and everything that belongs to the old group with it. Survivors then come
to the next epoch, put back the step that stands, and call `train` anew, in the same process.

What a peer's death explains is a failure like that: `PeerLost`, `Aborted`, `CommTimeout`,
`StoreLost`, or an error that was raised because of one. Every other exception is the program's own:
it ends this rank, whose peers see `PeerLost` and go on without it. An error that all ranks raise
ends them one and all.

At the end of `train` all ranks meet once more. If one is lost before that, its peers go through the
loop again: `train` finds that there is nothing left to do.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from dure import env
from dure.comm.init import init_process_group, leave
from dure.comm.world import World, current_world
from dure.elastic import preempt
from dure.elastic.boundary import Boundary, Preempted, Regroup
from dure.elastic.council import Council, JobDone
from dure.elastic.keeper import Keeper
from dure.elastic.options import Options
from dure.elastic.roster import Plan
from dure.elastic.state import Recovery, State
from dure.errors import (
    Aborted,
    CommTimeout,
    PeerLost,
    RendezvousError,
    StoreError,
    StoreLost,
    StoreTimeout,
    UsageError,
)
from dure.trace import line

__all__ = ["run"]

T = TypeVar("T")

_COME_S = 3.0
"""A group that was left cannot be asked any more who is lost, and who has only left it, too, to
follow the store: that one comes within this time."""

_FUTILE = 3
"""More epochs in a row that fail without a loss and without a commit are the program's fault."""

_turns: weakref.WeakKeyDictionary[World, int] = weakref.WeakKeyDictionary()
"""How often each rank has called `run`: each time has keys of its own."""

_EXPLAINED = (PeerLost, Aborted, CommTimeout, StoreLost)
_IN_FORMING = (*_EXPLAINED, StoreTimeout, RendezvousError)

_log = logging.getLogger("dure.elastic")


def run(train: Callable[[State], T], state: State, options: Options | None = None) -> T | None:
    """Call `train(state)` in a group that is made anew when ranks are lost or come.

    Args:
        train: Makes what belongs to one group (`DistributedDataParallel`, loaders), trains from
            where `state` says, and calls `state.commit()` after each step. It is called again, in
            the same process, each time the group has changed; `state` is then as at the last
            commit.
        state: What must not be lost.
        options: How the job behaves.

    Returns:
        What `train` returned; None for a process that came when the others were done.

    Raises:
        Exception: What `train` raised, unless the loss of a peer explains it.
        RendezvousError: Fewer than `min_ranks` are left, and no more came.
        StoreLost: The process that held the job's store has died, and nobody can take its place.
        SystemExit: The job was asked to end (143); see `on_preempt`.

    Collective:
        All ranks of the job call, once at a time, outside any group.

    Cost:
        A lost rank costs tens of milliseconds, what `train` does before its first step, and the
        step that was in the making.
    """
    options = options or Options()
    if current_world().default is not None:
        raise UsageError(
            "elastic.run makes the process group itself",
            op="run",
            fix="Do not call init_process_group before it; use the group within train().",
        )
    line.tell_elastic()
    with preempt.watching():  # unless this is a thread-rank, which cannot
        session = _Session(train, state, options)
        try:
            return session.run()
        except Preempted:
            raise SystemExit(preempt.EXIT_CODE) from None
        finally:
            session.close()


class _Session(Generic[T]):
    """One process's part in an elastic job."""

    def __init__(self, train: Callable[[State], T], state: State, options: Options) -> None:
        self._train, self._state, self._options = train, state, options
        world = current_world()
        turn = _turns[world] = _turns.get(world, -1) + 1
        self._keeper = Keeper(options.store, options.rank, options.world_size, turn)
        patience_s = options.timeout.total_seconds()
        quorum = options.quorum
        if quorum is None:
            quorum = env.text("DURE_ELASTIC_QUORUM") != "0"
        self._council = Council(
            self._keeper.keys,
            self._keeper.rank,
            self._keeper.world_size,
            min_ranks=options.min_ranks or env.integer("DURE_ELASTIC_MIN", 1) or 1,
            patience_s=patience_s,
            enough_s=options.enough_s,
            give_up=preempt.asked,
            elsewhere=self._keeper.moved,
            divisible=lambda: quorum and self._keeper.movable,
            astray=lambda: quorum and self._keeper.astray,
        )
        self._plan: Plan | None = None
        self._stood: Plan | None = None  # the last one whose group was made
        self._kept = state.part_names  # made before `train`, and so valid in any group
        self._boundary = Boundary(self._council, self._keeper, state)
        self._futile, self._passed = 0, 0
        self._failed_at = 0.0
        self._gone: set[int] = set()  # ranks of the last group that were lost before it was left
        self._severed: set[int] = set()  # those whose hosts may live
        self._ended = False

    def run(self) -> T | None:
        """Go from epoch to epoch until `train` has come to its end on all ranks."""
        try:
            plan = self._enter()
        except JobDone:
            return self._not_needed()
        cause: BaseException | None = None
        while True:
            try:
                self._begin(plan, cause)
                cause = None
                result = self._train(self._state)
                self._meet_at_the_end()
                return result
            except (Regroup, Exception) as error:
                if not self._explained(error):
                    raise
                failure = _without_frames(error)
            if cause is None:
                cause, self._failed_at = failure, time.monotonic()
            try:
                plan = self._next(failure)
            except JobDone:
                return self._not_needed()

    def _enter(self) -> Plan:
        """Come as a newcomer, to wherever the job's store is."""
        self._keeper.know(None)
        while True:
            try:
                return self._council.enter()
            except (StoreLost, StoreTimeout):
                keys = self._keeper.follow(None, self._council.me, self._council.patience_s)
                self._council.move(keys, None)

    def _not_needed(self) -> None:
        """End without having trained, or without training on."""
        if preempt.asked():
            raise Preempted
        self._ended = True

    # ---- an epoch ------------------------------------------------------------------------------

    def _begin(self, plan: Plan, cause: BaseException | None) -> None:
        """Make the group of an epoch, and put the state in place.

        Raises:
            CommError, RendezvousError, StoreError: A member ended meanwhile.
        """
        state, last = self._state, self._stood
        agreed_at = time.monotonic()
        self._plan = self._boundary.plan = plan
        self._gone.clear()
        self._severed.clear()
        self._keeper.know(plan)
        me = plan.rank_of(self._council.me.token)
        if plan.source < 0:
            state.begin()
        elif me not in plan.behind:
            state.settle(plan.step)
        try:
            init_process_group(
                self._options.backend,
                store=self._council.watched(plan),
                rank=me,
                world_size=len(plan.members),
                timeout=self._options.timeout,
            )
            made_at = time.monotonic()
            self._bring_state(plan, me)
        except _IN_FORMING as error:
            raise Aborted("the group could not be made", seen=str(error)) from error
        state.attach(self._boundary.cross)
        if plan.source >= 0:
            state.restore()
        if last is not None:
            self._report(last, plan, cause, (agreed_at, made_at))
        self._stood = plan

    def _bring_state(self, plan: Plan, me: int) -> None:
        """Send the state from the rank that has it to those that have not."""
        group = current_world().need_default()
        if me == plan.source:
            for peer in plan.behind:
                self._state.committed.send(group, peer)
        elif me in plan.behind:
            self._state.staged.receive(group, plan.source)
            self._state.promote()

    def _report(
        self, last: Plan, plan: Plan, cause: BaseException | None, times: tuple[float, float]
    ) -> None:
        """Keep, and tell, what has changed."""
        agreed_at, made_at = times
        before, after = ({m.token for m in p.members} for p in (last, plan))
        recovery = Recovery(
            epoch=plan.number,
            lost=len(before - after),
            joined=len(after - before),
            step=plan.step,
            cause=_told(cause),
            agreement_s=agreed_at - self._failed_at,
            group_s=made_at - agreed_at,
            state_s=time.monotonic() - made_at,
        )
        self._state.recoveries.append(recovery)
        self._futile = 0 if recovery.lost or recovery.joined else self._futile
        if plan.rank_of(self._council.me.token) == 0:
            _log.warning(
                "the group has changed: %d lost, %d came; %d ranks go on after commit %d (%.0f ms)",
                recovery.lost,
                recovery.joined,
                len(plan.members),
                plan.step,
                1000 * recovery.total_s,
            )

    # ---- between two epochs --------------------------------------------------------------------

    def _explained(self, error: BaseException) -> bool:
        """Tell whether the loss of a peer, or a change of the group, explains an error."""
        if isinstance(error, Regroup):
            return True
        found: BaseException | None = error
        while found is not None and not isinstance(found, _EXPLAINED):
            found = found.__cause__ or found.__context__
        self._futile = 1 if self._boundary.passed > self._passed else self._futile + 1
        self._passed = self._boundary.passed
        return found is not None and self._futile <= _FUTILE

    def _next(self, cause: BaseException) -> Plan:
        """Agree with the survivors on the next epoch."""
        assert self._plan is not None
        self._state.attach(None)
        self._state.detach_parts(self._kept)
        last = self._plan
        if not isinstance(cause, PeerLost):  # or peers that wait for this rank would not know
            self._leave_group(announced=False)
        while True:
            try:
                if self._boundary.storeless or self._keeper.lost:
                    raise StoreLost("the process that held the store has ended")
                self._council.announce(last, self._state.standing())
                plan = self._council.agree(last, self._unreached, self._nudge, self._cut_off)
            except (StoreLost, StoreTimeout):  # a store behind a link that is cut says nothing
                self._boundary.storeless = True
                self._leave_group(announced=False)
                keys = self._keeper.follow(last, self._council.me, self._council.patience_s)
                self._council.move(keys, last)
                self._boundary.storeless = False
                continue
            self._leave_group(announced=True)
            return plan

    def _unreached(self, rank: int) -> bool:
        group = current_world().default
        if group is not None:
            return group.gone(rank) or group.silent(rank)
        return rank in self._gone and time.monotonic() - self._failed_at > _COME_S

    def _cut_off(self, rank: int) -> bool:
        group = current_world().default
        return rank in self._severed if group is None else group.severed(rank)

    def _nudge(self) -> None:
        """Leave the groups, if that is not done: nobody in them shall wait for this rank."""
        if current_world().default is not None:
            self._leave_group(announced=True)

    def _leave_group(self, announced: bool) -> None:
        """Close the group of the epoch that has ended; peers in it see that this rank has left."""
        if (
            not (announced or self._boundary.storeless or self._keeper.lost)
            and self._plan is not None
        ):
            try:
                self._council.announce(self._plan, self._state.standing())
            except StoreError:
                self._boundary.storeless = True
        if self._plan is not None and current_world().default is not None:
            ranks = range(len(self._plan.members))
            self._gone.update(filter(self._unreached, ranks))
            self._severed.update(filter(self._cut_off, ranks))
        _close_groups(abort=True)

    # ---- the end -------------------------------------------------------------------------------

    def _meet_at_the_end(self) -> None:
        """Meet once more, so that nobody leaves while another may still need it."""
        self._boundary.meet()
        self._ended = True
        with contextlib.suppress(StoreError):
            self._council.finish()

    def close(self) -> None:
        """Leave the job, whatever has happened."""
        self._state.attach(None)
        if not (self._boundary.storeless or self._keeper.lost):
            with contextlib.suppress(StoreError):
                self._council.leave()
        _close_groups(abort=not self._ended)
        self._keeper.close()


def _close_groups(abort: bool) -> None:
    """Close all groups of the epoch; nobody will meet under its keys again."""
    world = current_world()
    if world.rendezvous is not None:
        world.rendezvous.forget()
    if world.default is not None:
        leave(world, abort=abort)


def _without_frames(error: BaseException) -> BaseException:
    """Let go of what a failed `train` held: modules, loaders, gradients in shared memory."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error


def _told(cause: BaseException | None) -> str:
    """Say what ended a group: an error with its kind, a change of the group by its reason."""
    return str(cause) if isinstance(cause, Regroup) else f"{type(cause).__name__}: {cause}"
