"""`run`: a program's training loop that outlives the loss of ranks.

    ┌────────────► agree on a view ──► make its group ──► bring the state ──► train(state) ──► end
    │             (membership.py)                           (snapshot.py)          │
    └──────────────── a peer is lost, or newcomers wait ◄──────────────────────────┘

A rank whose peer is lost learns it from its next collective, wherever that is in `train`. The
exception leaves `train`, and everything that belongs to the old group with it. Survivors then come
to the next view, restore the last common step, and call `train` again, in the same process.

An error that a peer's death explains is such a failure: `PeerLost`, `Aborted`, `CommTimeout`,
`StoreLost`, or an error that was raised because of one. Every other exception is the program's own:
it ends this rank, whose peers see `PeerLost` and continue without it. An error that all ranks raise
ends them one and all.

At the end of `train` comes one more barrier. If a rank is lost before that, its peers go through
the loop again: `train` finds that there is nothing left to do.

**Between two steps** ranks communicate in a commit's second phase (`dure.elastic.state`), one
all_reduce of a few numbers of which the largest counts. So all learn after the same step, or none
does, that newcomers wait (all leave `train` and make a new group), that some rank was asked to
end (all save together, then that rank leaves), or that they are not at the same commit, which is an
error of the program. Rank 0 looks for newcomers on behalf of all, now and then.

The store in which ranks agree is the launcher's, etcd, a file, or one that the caller gave. If
no other process serves one, rank 0 does, and the job ends when that process dies: the store never
moves.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import torch

from dure import env
from dure.comm.init import init_process_group, leave
from dure.comm.ops import ReduceOp
from dure.comm.world import World, current_world
from dure.elastic import preempt
from dure.elastic.membership import JobDone, RankMembership
from dure.elastic.state import Recovery, State
from dure.elastic.views import ElasticView
from dure.errors import (
    Aborted,
    CommTimeout,
    Desync,
    PeerLost,
    RendezvousError,
    StoreError,
    StoreLost,
    StoreTimeout,
    UsageError,
)
from dure.placement import detect
from dure.store.base import Store
from dure.store.init_method import read_init_method
from dure.store.memory import HashStore
from dure.store.prefix import PrefixStore
from dure.store.silence import silence_s
from dure.trace import line, logs

__all__ = ["Options", "run"]

T = TypeVar("T")

_LOOK_S = 0.2
"""How long rank 0 waits at least before it looks again whether newcomers wait."""

_SHARE = 20
"""Looking into a slow store takes at most one part in so many of the time."""

_FUTILE = 3
"""More views in a row that fail without a loss and without a commit are the program's fault."""

_JOIN_S = 300.0
"""How long the store is looked for at first."""

_GOODBYE = timedelta(seconds=1)


@dataclass(slots=True)
class _Earlier:
    """What a rank's earlier calls of `run` have left.

    Attributes:
        calls: How many there were: each has keys of its own.
        members: How many were in the last group of the last call.
    """

    calls: int = 0
    members: int = 0


_earlier: weakref.WeakKeyDictionary[World, _Earlier] = weakref.WeakKeyDictionary()
"""By rank."""

_EXPLAINED = (PeerLost, Aborted, CommTimeout, StoreLost)
_IN_FORMING = (*_EXPLAINED, StoreTimeout, RendezvousError)

_log = logs.logger("elastic")


class Regroup(BaseException):
    """Leaves `train` between two steps, on all ranks.

    Not an `Exception`: programs that catch those around a step must not swallow it.
    """


class Preempted(BaseException):
    """Leaves `train` when this rank was asked to end and everything is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an elastic job behaves.

    Attributes:
        min_ranks: With fewer ranks the job ends; `dure run --min-ranks` where None, or 1.
        timeout: How long an operation waits for its peers, and survivors for each other. So long a
            rank that neither works nor dies (one that is stopped) holds up the job.
        enough_s: How long too few ranks wait for more to come.
        backend: As `init_process_group`.
        store: A store that all ranks share, in place of the launcher's; then `rank` and
            `world_size` must be given.
        rank: This process's number, if it is not in the environment.
        world_size: How many ranks start.

    Example:
        ```python
        from datetime import timedelta
        from dure import elastic

        options = elastic.Options(min_ranks=2, timeout=timedelta(seconds=60))
        ```
    """

    min_ranks: int | None = None
    timeout: timedelta = timedelta(minutes=5)
    enough_s: float = 30.0
    backend: str | None = None
    store: Store | None = None
    rank: int = -1
    world_size: int = -1


def run(train: Callable[[State], T], state: State, options: Options | None = None) -> T | None:
    """Call `train(state)` in a group that is replaced when ranks are lost or come.

    Args:
        train: Makes what belongs to one group (`DistributedDataParallel`, loaders), trains from
            where `state` says, and calls `state.commit()` after each step. It is called again, in
            the same process, each time the group has changed; `state` is then as at the last
            commit.
        state: The state that must not be lost.
        options: How the job behaves.

    Returns:
        What `train` returned; None for a process that came when the others were done.

    Raises:
        Exception: What `train` raised, unless the loss of a peer explains it.
        RendezvousError: Fewer than `min_ranks` are left, and no more came.
        StoreLost: The job's store is gone, so the ranks that are left cannot agree any more.
        SystemExit: The job was asked to end (143); see `on_preempt`.

    Collective:
        All ranks of the job call, once at a time, outside any group.

    Cost:
        A lost rank costs tens of milliseconds, what `train` does before its first step, and the
        step that was in the making.

    Example:
        ```python
        def train(state):
            while state.step < 3:
                state.step += 1  # here: the collectives of a step
                state.commit()  # a lost rank costs at most the step after this
            return state.step

        def work():
            return elastic.run(train, elastic.State(step=0))

        if dist.get_rank() == 0:
            assert dist.spawn(work, nproc=2) == [3, 3]
        ```
    """
    options = options or Options()
    if current_world().default is not None:
        raise UsageError(
            "elastic.run makes the process group itself",
            op="run",
            fix="Do not call init_process_group before it; use the group within train().",
        )
    line.send_elastic()
    with preempt.watching():  # unless this is a thread-rank, which cannot
        session = _ElasticRun(train, state, options)
        try:
            return session.run()
        except Preempted:
            raise SystemExit(preempt.EXIT_CODE) from None
        finally:
            session.close()


@dataclass(frozen=True, slots=True)
class _Job:
    """The job's store, which the caller closes if it was given, and this process's rank in it."""

    base: Store
    given: bool
    name: str
    rank: int
    world_size: int


def _find_job(options: Options) -> _Job:
    """Open the store that the caller, the launcher or the environment names."""
    rank, world_size = options.rank, options.world_size
    if options.store is not None:
        return _Job(options.store, True, "given", rank, world_size)
    is_numbered = env.text("RANK") is not None or env.text("WORLD_SIZE") is not None
    if rank < 0 and not is_numbered and detect(env.everything()).member is None:
        return _Job(HashStore(), True, "alone", 0, 1)
    method = read_init_method(None, rank, world_size)
    name = method.endpoint.name
    if env.flag("DURE_ELASTIC"):  # one job, whichever process was started how often
        name = env.text("TORCHELASTIC_RUN_ID") or "elastic"
    store = method.endpoint.open(method.rank, method.world_size, _JOIN_S)
    # What is waited for there has limits of its own: this is for one answer.
    store.set_timeout(timedelta(seconds=silence_s()))
    return _Job(store, False, name, method.rank, method.world_size)


class _ElasticRun(Generic[T]):
    def __init__(self, train: Callable[[State], T], state: State, options: Options) -> None:
        self._train, self._state, self._options = train, state, options
        self._earlier = _earlier.setdefault(current_world(), _Earlier())
        call, self._earlier.calls = self._earlier.calls, self._earlier.calls + 1
        self._job = _find_job(options)
        self._membership = RankMembership(
            PrefixStore(f"dure/elastic/{self._job.name}/{call}", self._job.base),
            self._job.rank,
            self._earlier.members or self._job.world_size,
            min_ranks=options.min_ranks or env.integer("DURE_ELASTIC_MIN", 1) or 1,
            timeout_s=options.timeout.total_seconds(),
            enough_s=options.enough_s,
            give_up=preempt.asked,
        )
        self._view: ElasticView | None = None
        self._stood: ElasticView | None = None  # the last one whose group was made
        self._kept = state.part_names  # made before `train`, and so valid in any group
        self._futile = 0  # views since a loss, a newcomer or a complete commit
        self._next_look = time.monotonic() + _LOOK_S
        self._failed_at = 0.0
        self._gone: set[int] = set()  # ranks of the last group that were lost before it was left
        self._ended = False

    def run(self) -> T | None:
        """Go from view to view until `train` has come to its end on all ranks."""
        cause: BaseException | None = None  # of the first failure since a group was made
        failure: BaseException | None = None
        while True:
            try:
                with line.waiting_for_group():
                    view = self._next_view(failure)
            except JobDone:
                if preempt.asked():
                    raise Preempted from None
                self._ended = True
                return None
            try:
                self._begin(view, cause)
                cause = None
                result = self._train(self._state)
                self._exchange(False, False, self._state.commits)
                self._ended = True
                with contextlib.suppress(StoreError):
                    self._membership.finish()
                return result
            except (Regroup, Exception) as error:
                if not self._explained(error):
                    raise
                failure = _without_frames(error)
            if cause is None:
                cause, self._failed_at = failure, time.monotonic()

    def _next_view(self, failure: BaseException | None) -> ElasticView:
        """Agree with the others on the first view, or on the one after a failure."""
        try:
            if self._view is None:
                return self._membership.enter()
            self._state.attach(None)
            self._state.detach_parts(self._kept)
            self._membership.announce(self._view, self._state.standing())
            if not isinstance(failure, PeerLost):  # or peers that wait for this rank would not know
                self._leave_group()
            view = self._membership.agree(self._view, self._unreached, self._leave_group)
            self._leave_group()
            return view
        except (StoreLost, StoreTimeout) as error:
            raise StoreLost(
                "the store of the elastic job is lost, and with it the way to a new group",
                rank=self._job.rank,
                seen=str(error),
                fix="Start the job again from its last checkpoint. The launcher at the "
                "endpoint serves the store, or rank 0 where there is no launcher: `dure run` "
                "on one host outlives any rank, --rdzv-backend etcd any host.",
            ) from error

    # ---- a view --------------------------------------------------------------------------------

    def _begin(self, view: ElasticView, cause: BaseException | None) -> None:
        """Make the group of a view, and put the state in place."""
        state, last = self._state, self._stood
        agreed_at = time.monotonic()
        self._view = view
        self._gone.clear()
        me = view.rank_of(self._membership.me.token)
        if view.source < 0:
            state.begin()
        elif me not in view.behind:
            state.settle(view.step)
        try:
            init_process_group(
                self._options.backend,
                store=self._membership.keys_of(view),
                rank=me,
                world_size=len(view.members),
                timeout=self._options.timeout,
            )
            made_at = time.monotonic()
            self._bring_state(view, me)
        except _IN_FORMING as error:
            raise Aborted("the group could not be made", seen=str(error)) from error
        state.attach(self._commit)
        if view.source >= 0:
            state.restore()
        if last is not None:
            self._report(last, view, cause, (agreed_at, made_at))
        self._stood = view

    def _bring_state(self, view: ElasticView, me: int) -> None:
        """Send the state from the rank that has it to those that have not."""
        group = current_world().need_default()
        if me == view.source:
            for peer in view.behind:
                self._state.committed.send(group, peer)
        elif me in view.behind:
            self._state.staged.receive(group, view.source)
            self._state.promote()

    def _report(
        self,
        last: ElasticView,
        view: ElasticView,
        cause: BaseException | None,
        times: tuple[float, float],
    ) -> None:
        agreed_at, made_at = times
        before, after = ({m.token for m in v.members} for v in (last, view))
        recovery = Recovery(
            epoch=view.number,
            lost=len(before - after),
            joined=len(after - before),
            step=view.step,
            cause=_describe(cause),
            agreement_s=agreed_at - self._failed_at,
            group_s=made_at - agreed_at,
            state_s=time.monotonic() - made_at,
        )
        self._state.recoveries.append(recovery)
        self._futile = 0 if recovery.lost or recovery.joined else self._futile
        if view.rank_of(self._membership.me.token) == 0:
            _log.warning(
                "the group has changed: %d lost, %d came, %d now; on after commit %d (%.0f ms)",
                recovery.lost,
                recovery.joined,
                len(view.members),
                view.step,
                1000 * recovery.total_s,
            )

    # ---- between two views ---------------------------------------------------------------------

    def _explained(self, error: BaseException) -> bool:
        """Return whether the loss of a peer, or a change of the group, explains an error."""
        if isinstance(error, Regroup):
            return True
        found: BaseException | None = error
        while found is not None and not isinstance(found, _EXPLAINED):
            found = found.__cause__ or found.__context__
        self._futile += 1
        return found is not None and self._futile <= _FUTILE

    def _unreached(self, rank: int) -> bool:
        group = current_world().default
        return rank in self._gone if group is None else group.gone(rank) or group.silent(rank)

    def _leave_group(self) -> None:
        """Close the group of the view that has ended; peers in it see that this rank has left.

        They know by then that it lives, for it has announced what it has.
        """
        if self._view is not None and current_world().default is not None:
            self._gone.update(filter(self._unreached, range(len(self._view.members))))
        _close_groups(abort=True)

    # ---- between two steps ---------------------------------------------------------------------

    def _commit(self, step: int) -> None:
        """Carry out the second phase of a commit, and heed what the ranks have reported in it."""
        newcomers, asked = self._exchange(self._newcomers_wait(), preempt.asked(), step)
        self._state.promote()
        self._futile = 0
        if asked:  # all save together, then those that were asked leave
            preempt.run_callbacks()
            raise Preempted if preempt.asked() else Regroup("a rank was asked to end")
        if newcomers:
            raise Regroup("newcomers wait")

    def _exchange(self, newcomers: bool, asked: bool, step: int) -> tuple[bool, bool]:
        """Return whether newcomers wait, and whether some rank was asked to end."""
        group = current_world().need_default()
        numbers = [int(newcomers), int(asked), step, -step]
        flags = torch.tensor(numbers, device=group.message_device)
        group.all_reduce(flags, ReduceOp.MAX)
        newcomers, asked, most, least = flags.tolist()
        if most != -least:
            raise Desync(
                "the ranks are not at the same commit",
                rank=group.rank(),
                world_size=group.size(),
                seen=f"after {step} commits here, after {-least} to {most} on all ranks",
                fix="Call state.commit() as often on every rank; loops of unequal length need "
                "drop_last=True, or equal shares.",
            )
        return bool(newcomers), bool(asked)

    def _newcomers_wait(self) -> bool:
        """On rank 0, now and then: look who waits to be let in.

        A store that does not answer ends nothing here: the group that is needs none.
        """
        view, began = self._view, time.monotonic()
        assert view is not None
        if view.members[0].token != self._membership.me.token or began < self._next_look:
            return False
        try:
            return bool(self._membership.newcomers(view))
        except StoreError as error:
            _log.warning("newcomers cannot be let in: %s", error)
            return False
        finally:
            now = time.monotonic()
            self._next_look = now + max(_LOOK_S, _SHARE * (now - began))

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        self._state.attach(None)
        if self._view is not None:
            self._earlier.members = len(self._view.members)
        base = self._job.base
        if not self._job.given:
            base.set_timeout(_GOODBYE)
        with contextlib.suppress(StoreError):
            self._membership.leave(self._membership.me)
        _close_groups(abort=not self._ended)
        if not self._job.given:
            with contextlib.suppress(StoreError):
                base.close()


def _close_groups(abort: bool) -> None:
    """Close all groups of the view; its keys are never used again."""
    world = current_world()
    if world.rendezvous is not None:
        world.rendezvous.forget()
    if world.default is not None:
        leave(world, abort=abort)


def _without_frames(error: BaseException) -> BaseException:
    """Let go of what a failed `train` held: modules, loaders, gradients in shared memory."""
    found: BaseException | None = error
    while found is not None and found.__traceback__ is not None:
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error


def _describe(cause: BaseException | None) -> str:
    return str(cause) if isinstance(cause, Regroup) else f"{type(cause).__name__}: {cause}"
