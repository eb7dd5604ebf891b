"""Verification of a foreign engine's collectives: the ranks compare their calls before data move.

Our own backends compare calls as they begin; an engine such as Gloo does not, and answers a
mismatch with wrong numbers, an abort or a hang. `VerifyingBackend` stands before any backend and
lets the ranks agree through the group's store first, where the user asks for it (`wanted`): a
tool to find a mistake with, not one to train with, as it costs a few visits to the store a call.

**Rounds.** The k-th collective of every rank is round k. A rank tells its call's fingerprint under
"verify/k/RANK", waits until all have told theirs, and compares: all read the same, so all raise the
same `Desync`, or go on to the engine. Who has seen all of round k knows that everybody is done with
round k - 1, and removes its own key of that round; so at most two keys a rank are ever there, and
the last thing a rank has told can still be read when it does not come. A rank whose time is up puts
an abort record in place of its call, so that those who come too late see it at once.

Where ranks differ, or time is up, the group is broken: later calls raise the same error.

**Asynchronous calls** must not wait for peers, so their rounds are held on the thread of an ordered
queue; later calls queue behind them.

Threads: as `Backend` demands; the engine sees one call at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch

from dure import env
from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.queue import OrderedQueue
from dure.comm.backends.request import Request
from dure.comm.call import Call, Fingerprint, call_site, compare, fingerprint
from dure.errors import Aborted, CommTimeout, Desync, PeerLost, StoreError, StoreLost, StoreTimeout

__all__ = ["CHECK_THEMSELVES", "VerifyingBackend", "wanted"]

CHECK_THEMSELVES = frozenset({"shm", "threads", "mpi", "hybrid", "hybrid_mpi"})
"""Backends that compare calls anyway."""

_SLICE_S = 0.2
"""A wait is interrupted that often, to see whether the group was left, and for signal handlers."""

_SEEN_S = 2.0
"""How long a rank that sees a mismatch stays, so that all others can see it, too."""


def wanted(options: BackendOptions) -> bool:
    """Tell whether the user asks for verification: DURE_VERIFY=1 or pg_options={"verify": True}."""
    given = options.pg_options
    named = given.get("verify") if isinstance(given, Mapping) else None
    asked = options.extra.get("verify", named)
    return env.flag("DURE_VERIFY") if asked is None else bool(asked)


class VerifyingBackend:
    """A backend whose collectives are compared before data move (see the module's text).

    Args:
        inner: What moves the data. It must not be used by anybody else.
        options: What it was made from.
    """

    def __init__(self, inner: Backend, options: BackendOptions) -> None:
        self.name, self.device_types = inner.name, inner.device_types
        self._inner = inner
        self._state = GroupState(options.name, options.rank, options.size)
        self._rounds = _Rounds(options, self._state)
        self._engine = threading.Lock()  # the engine sees one call at a time
        self._queue = OrderedQueue("dure-verify", lambda: self._state.error("a collective"))

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a round waits, and the engine's limit where it can be changed."""
        self._rounds.timeout_s = timeout.total_seconds()
        change = getattr(self._inner, "set_timeout", None)
        if change is not None:
            change(timeout)

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has left."""
        return self._rounds.has_left(rank)

    def run(self, call: Call, async_op: bool) -> Request | None:
        """See `Backend.run`."""
        site = call_site()

        def verified() -> Request | None:
            self._state.check(call.op)
            try:
                self._rounds.hold(call, site)
            except (CommTimeout, Desync, PeerLost, Aborted) as error:
                self._state.adopt(AbortRecord.of(error))
                if isinstance(error, CommTimeout):
                    self._inner.close(True)  # so that nobody goes on waiting in the engine
                raise
            with self._engine:
                return self._inner.run(call, True)

        return self._queue.run(verified, async_op)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """See `Backend.send`; messages are not compared: their two ends need not come together."""
        with self._engine:
            request = self._inner.send(tensor, dst, tag, True)
        if async_op or request is None:
            return request
        request.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        """See `Backend.recv`."""
        with self._engine:
            request = self._inner.recv(tensor, src, tag, True)
        if not async_op:
            request.wait()
        return request

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`."""
        return self._inner.allocate(nbytes, node_shared)

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        self._rounds.leave()
        self._queue.stop()
        self._inner.close(abort)


class _Told(msgspec.Struct, frozen=True):
    """What one rank tells the others of a round; a `record` if it has waited in vain."""

    fingerprint: tuple[int, ...]
    site: str
    record: AbortRecord | None = None

    def text(self) -> str:
        return Fingerprint(*self.fingerprint).text(self.site)


class _Rounds:
    """The rounds of one group, held by one rank, one at a time."""

    def __init__(self, options: BackendOptions, state: GroupState) -> None:
        self.timeout_s = options.timeout.total_seconds()
        self._state, self._rank, self._size = state, options.rank, options.size
        self._store = options.store
        self._num = 0

    def hold(self, call: Call, site: str) -> None:
        """Tell `call` and compare it with the others' of this round.

        Raises:
            Desync: They differ; the same on all ranks.
            CommTimeout: Ranks did not come in time.
            PeerLost: A rank has left or died, or the process that holds the store has ended.
            Aborted: The group was left meanwhile.
        """
        try:
            self._hold(call, site)
        except (PeerLost, StoreLost) as error:
            raise self._lost(call, error) from error

    def _lost(self, call: Call, error: PeerLost | StoreLost) -> PeerLost:
        """Make the error of a round that a rank has left or died in, of what the store says."""
        peer, pid, host = None, None, None
        what, seen = "the process that holds the group's store has ended", str(error)
        if isinstance(error, PeerLost):
            peer, pid, host = error.peer, error.pid, error.host
            # The store itself knows of dead processes, but not of operations.
            what = error.what if error.seq is not None else f"the process of rank {peer} ended"
            seen = f"pid {pid}" if pid else ""
        return PeerLost(
            what,
            pid=pid,
            host=host,
            peer=peer,
            seen=seen,
            fix="See that rank's own output; then make a new group of the ranks that are left.",
            **self._state.where(call.op, self._num),
        )

    def _hold(self, call: Call, site: str) -> None:
        self._num += 1
        began = time.monotonic()
        keys = self._keys(self._num)
        mine = _Told(tuple(fingerprint(call, self._rank, self._size)), site)
        self._store.set(keys[self._rank], msgspec.msgpack.encode(mine))
        missing = self._wait(call, keys, began + self.timeout_s)
        if missing:
            self._give_up(call, mine, missing, began)
        told = [msgspec.msgpack.decode(v, type=_Told) for v in self._store.multi_get(keys)]
        for rank, other in enumerate(told):
            if other.record is not None:
                self._too_late(call, rank, other, began)
        if self._num > 1:
            self._store.delete_key(self._keys(self._num - 1)[self._rank])
        problem = compare([Fingerprint(*t.fingerprint) for t in told])
        if problem:
            self._let_all_see()
            record = AbortRecord.desync(problem, {r: t.text() for r, t in enumerate(told)})
            raise record.error(**self._state.where(call.op, self._num))

    def _keys(self, number: int) -> list[str]:
        return [f"verify/{number}/{rank}" for rank in range(self._size)]

    def _wait(self, call: Call, keys: Sequence[str], deadline: float) -> list[int]:
        """Wait for all keys; return the ranks whose key did not come."""
        while True:
            rest = deadline - time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=max(min(rest, _SLICE_S), 0.001)))
                return []
            except StoreTimeout:
                if self._state.left.is_set():
                    raise self._state.error(call.op, self._num) from None
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                self._check_left(call, missing)
                if rest <= _SLICE_S:
                    return missing

    def leave(self) -> None:
        """Say that this rank leaves the group, and end a round that it waits in."""
        self._state.left.set()
        with suppress(StoreError):
            self._store.set(f"verify/left/{self._rank}", "")

    def has_left(self, rank: int) -> bool:
        """Tell whether `rank` has said that it leaves, or is known to have died."""
        try:
            return self._store.check([f"verify/left/{rank}"])
        except PeerLost as error:
            return error.peer == rank

    def _check_left(self, call: Call, ranks: list[int]) -> None:
        """Raise where one of `ranks` has left the group, and so will not come."""
        for rank in ranks:
            if self.has_left(rank):
                record = AbortRecord(kind="PeerLost", what=f"rank {rank} left the group", peer=rank)
                raise record.error(**self._state.where(call.op, self._num))

    def _let_all_see(self) -> None:
        """Stay until all have read this round, for the store may end with the rank that raises."""
        with suppress(StoreError):
            self._store.set(f"verify/seen/{self._rank}", "")
            seen = [f"verify/seen/{r}" for r in range(self._size)]
            self._store.wait(seen, timedelta(seconds=_SEEN_S))

    def _give_up(self, call: Call, mine: _Told, missing: list[int], began: float) -> None:
        last = {r: text for r in missing if (text := self._last_of(r))}
        seen = "; ".join(f"the last call of rank {r} was {text}" for r, text in last.items())
        record = AbortRecord(
            kind="CommTimeout",
            what=f"ranks {missing} did not call",
            missing=tuple(missing),
            whereabouts=last,
            seen=seen or "they have called nothing",
            fix="See what the missing ranks do, or raise the group's timeout.",
        )
        told = msgspec.structs.replace(mine, record=record)
        self._store.set(self._keys(self._num)[self._rank], msgspec.msgpack.encode(told))
        raise record.error(**self._state.where(call.op, self._num, began))

    def _last_of(self, rank: int) -> str:
        """Return the call before this one, which a rank that did not come has told last."""
        for number in range(self._num - 1, max(self._num - 3, 0), -1):
            key = self._keys(number)[rank]
            if self._store.check([key]):
                told = msgspec.msgpack.decode(self._store.get(key), type=_Told)
                return f"#{number} {told.text()}"
        return ""

    def _too_late(self, call: Call, rank: int, told: _Told, began: float) -> None:
        missing = () if told.record is None else told.record.missing
        record = AbortRecord(
            kind="CommTimeout",
            what=f"rank {rank} waited for {list(missing)} in vain, and gave up",
            missing=missing,
            peer=rank,
            seen=f"it called {told.text()}",
        )
        raise record.error(**self._state.where(call.op, self._num, began))
