"""Rounds: the ranks of a group tell each other what they are about to call, through the store.

The k-th collective of every rank is round k. A rank says its call under "verify/k/RANK", waits
until all have said theirs, and compares: all read the same, so all raise the same `Desync`, or go
on to the engine. Who has seen all of round k knows that everybody is done with round k - 1, and
removes its own key of that round; so at most two keys a rank are ever there, and the last thing a
rank has said can still be read when it does not come.

A rank whose time is up says so in place of its call, so that those who come too late see it at
once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.threads.moves import Call, check_calls, in_one_form
from dure.comm.ops import ReduceOp
from dure.errors import Aborted, CommTimeout, Desync, PeerLost, StoreError, StoreLost, StoreTimeout

__all__ = ["Rounds"]

_SLICE_S = 0.2
"""A wait is interrupted that often, to see whether the group was left, and for signal handlers."""

_SEEN_S = 2.0
"""How long a rank that sees a mismatch stays, so that all others can see it, too."""


class _Said(msgspec.Struct, frozen=True):
    """A call, as it is said to the other ranks; `gave_up` are the ranks it has waited for."""

    op: str
    site: str
    dtype: str = ""
    inputs: list[list[int]] = []
    outputs: list[list[int]] | None = None
    root: int = -1
    reduction: str = ""
    gave_up: list[int] | None = None


def _say(call: Call) -> _Said:
    tensors = call.inputs or call.outputs
    return _Said(
        op=call.op,
        site=call.site,
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        inputs=[list(t.shape) for t in call.inputs],
        outputs=None if call.outputs is call.inputs else [list(t.shape) for t in call.outputs],
        root=call.root,
        reduction=call.reduce.name if call.reduce else "",
    )


def _understand(said: _Said) -> Call:
    """Make a call without memory of what was said, for `check_calls` and for people."""

    def tensors(shapes: list[list[int]]) -> list[torch.Tensor]:
        return [torch.empty(s, dtype=getattr(torch, said.dtype), device="meta") for s in shapes]

    inputs = tensors(said.inputs)
    return Call(
        op=said.op,
        inputs=inputs,
        outputs=inputs if said.outputs is None else tensors(said.outputs),
        root=said.root,
        reduce=getattr(ReduceOp, said.reduction) if said.reduction else None,
        site=said.site,
    )


class Rounds:
    """The rounds of one group, held by one rank, one at a time."""

    def __init__(self, options: BackendOptions) -> None:
        self.timeout_s = options.timeout.total_seconds()
        self.left = threading.Event()
        self._name, self._rank, self._size = options.name, options.rank, options.size
        self._store = options.store
        self._num = 0

    def hold(self, call: Call) -> None:
        """Say `call` and compare it with the others' of this round.

        Raises:
            Desync: They differ; the same on all ranks.
            CommTimeout: Ranks did not come in time.
            PeerLost: A rank has left or died, or the process that holds the store has ended.
            Aborted: The group was left meanwhile.
        """
        try:
            self._hold(call)
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
            group=self._name,
            op=call.op,
            seq=self._num,
            rank=self._rank,
            world_size=self._size,
            seen=seen,
            fix="See that rank's own output; then make a new group of the ranks that are left.",
        )

    def _hold(self, call: Call) -> None:
        self._num += 1
        began = time.monotonic()
        keys = self._keys(self._num)
        self._store.set(keys[self._rank], msgspec.json.encode(_say(call)))
        missing = self._wait(keys, began + self.timeout_s)
        if missing:
            raise self._give_up(call, missing, time.monotonic() - began)
        values = self._store.multi_get(keys)
        said = [msgspec.json.decode(value, type=_Said) for value in values]
        for rank, s in enumerate(said):
            if s.gave_up is not None:
                raise self._too_late(call, rank, s, time.monotonic() - began)
        if self._num > 1:
            self._store.delete_key(self._keys(self._num - 1)[self._rank])
        calls = [_understand(s) for s in said]
        problem = check_calls(in_one_form(calls))
        if problem:
            self._let_all_see()
            raise self._desync(call, problem, calls)

    def _keys(self, number: int) -> list[str]:
        return [f"verify/{number}/{rank}" for rank in range(self._size)]

    def _wait(self, keys: list[str], deadline: float) -> list[int]:
        """Wait for all keys; return the ranks whose key did not come."""
        while True:
            rest = deadline - time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=max(min(rest, _SLICE_S), 0.001)))
                return []
            except StoreTimeout:
                if self.left.is_set():
                    raise Aborted(
                        "the group was left while the operation was pending",
                        group=self._name,
                        rank=self._rank,
                        world_size=self._size,
                    ) from None
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                self._check_left(missing)
                if rest <= _SLICE_S:
                    return missing

    def leave(self) -> None:
        """Say that this rank leaves the group, and end a round that it waits in."""
        self.left.set()
        with suppress(StoreError):
            self._store.set(f"verify/left/{self._rank}", "")

    def has_left(self, rank: int) -> bool:
        """Tell whether `rank` has said that it leaves, or is known to have died."""
        try:
            return self._store.check([f"verify/left/{rank}"])
        except PeerLost as error:
            return error.peer == rank

    def _check_left(self, ranks: list[int]) -> None:
        """Raise where one of `ranks` has left the group, and so will not come."""
        for rank in ranks:
            if self.has_left(rank):
                raise PeerLost(
                    f"rank {rank} left the group",
                    peer=rank,
                    group=self._name,
                    seq=self._num,
                    rank=self._rank,
                    world_size=self._size,
                )

    def _let_all_see(self) -> None:
        """Stay until all have read this round, for the store may end with the rank that raises."""
        with suppress(StoreError):
            self._store.set(f"verify/seen/{self._rank}", "")
            seen = [f"verify/seen/{r}" for r in range(self._size)]
            self._store.wait(seen, timedelta(seconds=_SEEN_S))

    def _give_up(self, call: Call, missing: list[int], elapsed_s: float) -> CommTimeout:
        told = msgspec.structs.replace(_say(call), gave_up=missing)
        self._store.set(self._keys(self._num)[self._rank], msgspec.json.encode(told))
        last = {r: text for r in missing if (text := self._last_of(r))}
        seen = "; ".join(f"the last call of rank {r} was {text}" for r, text in last.items())
        return CommTimeout(
            f"ranks {missing} did not call",
            missing=tuple(missing),
            whereabouts=last,
            group=self._name,
            op=call.op,
            seq=self._num,
            rank=self._rank,
            world_size=self._size,
            elapsed_s=elapsed_s,
            seen=seen or "they have called nothing",
            fix="See what the missing ranks do, or raise the group's timeout.",
        )

    def _last_of(self, rank: int) -> str:
        """Return the call before this one, which a rank that did not come has said last."""
        for number in range(self._num - 1, max(self._num - 3, 0), -1):
            key = self._keys(number)[rank]
            if self._store.check([key]):
                said = msgspec.json.decode(self._store.get(key), type=_Said)
                return f"#{number} {_understand(said)}"
        return ""

    def _too_late(self, call: Call, rank: int, said: _Said, elapsed_s: float) -> CommTimeout:
        return CommTimeout(
            f"rank {rank} waited for {said.gave_up} in vain, and gave up",
            missing=tuple(said.gave_up or ()),
            peer=rank,
            group=self._name,
            op=call.op,
            seq=self._num,
            rank=self._rank,
            world_size=self._size,
            elapsed_s=elapsed_s,
            seen=f"it called {_understand(said)}",
        )

    def _desync(self, call: Call, problem: str, calls: Sequence[Call]) -> Desync:
        texts = {r: str(c) for r, c in enumerate(calls)}
        return Desync(
            "the ranks did not call the same thing",
            calls=texts,
            group=self._name,
            op=call.op,
            seq=self._num,
            rank=self._rank,
            world_size=self._size,
            seen=f"{problem}: " + "; ".join(f"rank {r} {text}" for r, text in texts.items()),
            fix="No data were changed. Make all ranks call the same operations in the same order.",
        )
