"""A foreign engine's work: how it is started, waited for, and ended with its group.

**Requests.** An engine's own `wait` cannot be interrupted, and stopping the engine does not always
end it. So a collective is waited for in slices, and after each slice the request checks
whether the group was left. Point-to-point work is different: a wait that times out makes Gloo close
all connections of the group, and work does not report its end unless it is waited for. So a message
is waited for in one piece: on a helper thread if the caller only polls.

**Errors.** An engine either refuses to start work, or the started work fails. The only information
is the error's text ("connection closed", "timed out"), which does not name the rank that caused it.
So a rank that leaves, or whose time ran out, adds a line to one key of the group's store, the *exit
record*; a rank that finds an error reads the record for a moment before it makes its own error. No
rank reads or writes it otherwise. The store may have died with the rank that serves it, so it is
read on a thread, for which the rank waits at most `_ASK_S`. Over NCCL the watchdog finds errors
(watchdog.py): it breaks the group by an abort record, which every later call and wait raises.

**Leaving.** With no work pending the engine is closed in order, otherwise it is broken off. NCCL's
work runs in a stream, and leaving waits for it, as torch's `destroy_process_group` does.
Collectives are kept until they have ended, because the engine uses their memory; messages only as
long as the user keeps their requests.

Gloo does not end a transfer that breaking off interrupts: it ends when its own time is up, and the
engine's destructor waits for it while it holds Python's lock. So an engine that was broken off with
work pending is kept until that work has ended (`_kept`), or to the end of the process.

Threads:
    Every method of a request, from any thread, at any time.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.request import Request, current_stream
from dure.errors import DeviceError, DureError, UsageError
from dure.store.base import Store

__all__ = [
    "BatchedWork",
    "CollectiveRequest",
    "EngineState",
    "EngineWork",
    "ExitRecords",
    "MessageRequest",
    "keep_engine",
]

_NOISE = re.compile(r"^\[\S+\.cc:\d+\]|This is typically caused by.*|\n", re.DOTALL)
_SLICE = timedelta(milliseconds=200)
_SLICE_OVER = "Operation timed out"  # what torch says when a slice is over, and nothing else
_TIMED_OUT = ("timed out", "timeout", "application timeout")
_LOST = ("connection closed", "connection reset", "broken pipe", "refused", "connect ", "socket")
_ASK_S = 0.3
_POLL_S = 0.02
_ASK_STREAM_S = 0.0005
_KEY = "engine/exits"


class EngineWork(Protocol):
    """The part of torch's `Work` that is used."""

    def is_completed(self) -> bool:
        """Return whether it ended, successfully or not."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until it ended, or raise."""
        ...

    def _source_rank(self) -> int:
        """Return the sender of a finished receive."""
        ...


class BatchedWork:
    """The work of operations that are started as a batch; `work` is set when the batch ends."""

    def __init__(self) -> None:
        self.work: EngineWork | None = None

    def is_completed(self) -> bool:
        """Return whether all of them have ended."""
        return self.work is not None and self.work.is_completed()

    def wait(self) -> bool:
        """Let the current stream wait for all of them.

        Raises:
            UsageError: The batch has not ended.
        """
        if self.work is None:
            raise UsageError(
                "an operation of a batch was waited for before the batch has started",
                fix="Wait after the coalescing manager's block.",
            )
        return self.work.wait()


class EngineState(GroupState):
    """The state that the requests of one engine share.

    Args:
        options: Of the group.
        exits: The exit records; None if ranks do not write them.
        break_off: Closes the group's connections. Called once, after the first failure: ranks that
            wait for this one would otherwise wait until their time is up.
    """

    def __init__(
        self,
        options: BackendOptions,
        exits: ExitRecords | None = None,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(options.name, options.rank, options.size)
        self._exits, self._break_off = exits, break_off
        self._failed = False

    @property
    def has_failed(self) -> bool:
        """Whether an operation has failed, and the connections were closed."""
        return self._failed

    def translate(
        self, error: Exception, op: str, began: float, peer: int | None = None
    ) -> DureError:
        """Make the engine's error ours.

        Args:
            error: The engine's exception; only its text describes it.
            op: The operation.
            began: When it began (`time.monotonic`).
            peer: The rank it was with, for point-to-point.
        """
        self.fail()
        return self.diagnose(error, op, began, peer)

    def diagnose(
        self, error: Exception, op: str, began: float, peer: int | None = None
    ) -> DureError:
        """Return as `translate` does, and leave the connections open."""
        if self.left.is_set() or self._record is not None:
            return self.error(op, began=began)
        seen = _NOISE.sub("", str(error)).strip()
        low = seen.lower()
        timed_out = any(t in low for t in _TIMED_OUT)
        if "duplicate gpu" in low:
            return DeviceError(
                "two ranks of the group use one GPU, which NCCL refuses",
                **self.where(op, began=began),
                seen=seen.partition("Last error:")[2] or seen,
                fix="Start one rank for each GPU, and call torch.cuda.set_device(LOCAL_RANK). Or "
                "share it: name a backend that takes CUDA tensors by way of the host, such as "
                "'cpu:shm,cuda:shm'.",
            )
        if not timed_out and not any(t in low for t in _LOST):
            record = AbortRecord(kind="InternalError", what="the engine failed", seen=seen)
            return record.error(**self.where(op, began=began))
        exits = self._exits
        gone, gave_up = ((), ()) if exits is None else exits.ask(timed_out)
        if gone or not (timed_out or gave_up):
            who = gone[0] if gone else peer
            what = "a peer was lost" if who is None else f"rank {who} left the group or was lost"
            record = AbortRecord(kind="PeerLost", what=what, peer=who, seen=seen)
            return record.error(**self.where(op, began=began))
        here = {self.rank, *gave_up}
        missing = tuple(r for r in range(self.size) if r not in here) if peer is None else (peer,)
        record = AbortRecord(
            kind="CommTimeout",
            what="not all ranks called in time",
            missing=missing,
            peer=peer,
            seen=f"missing {list(missing)}; the engine says: {seen}",
            fix="See what the missing ranks do, or raise the group's timeout.",
        )
        return record.error(**self.where(op, began=began))

    def fail(self) -> None:
        """Close the connections, unless they were."""
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._break_off()


class CollectiveRequest(Request):
    """A pending collective; `copy_back`, if given, runs once when the engine is done.

    Args:
        state: Of the engine.
        op: The operation, for errors.
        work: The engine's work.
        copy_back: Copies the result to the user's tensors.
        stream_device: See `Request.stream_device`.
        peer: The other rank of a message.
        is_watched: Whether `engine_done` is asked after a wait (see engine/watchdog.py).

    Attributes:
        op, peer: As given.
        began: When it began (`time.monotonic`).
    """

    __slots__ = (
        "_copy_back", "_is_watched", "_passed", "_settling", "_state",
        "began", "op", "peer", "stream_device", "work",
    )  # fmt: skip

    def __init__(
        self,
        state: EngineState,
        op: str,
        work: EngineWork,
        copy_back: Callable[[], object] | None,
        stream_device: torch.device | None,
        peer: int | None = None,
        is_watched: bool = False,
    ) -> None:
        super().__init__()
        self._state, self.op, self._copy_back = state, op, copy_back
        # None at the end: torch's own object would keep the connections open.
        self.work: EngineWork | None = work
        self.stream_device, self.peer = stream_device, peer
        self._is_watched = is_watched
        self._passed: Any = None  # an event, recorded in a stream that waits for the work
        self.began = time.monotonic()
        self._settling = threading.Lock()

    @property
    def engine_done(self) -> bool:
        """Whether the engine is done with it."""
        work, passed = self.work, self._passed
        if work is not None:
            return work.is_completed()
        return passed is None or passed.query()

    def done(self) -> bool:
        """See `Request.done`; results that are copied back are in place after a wait."""
        if self.ended or self._left_behind():
            return True
        return self.engine_done or self._is_given_up()

    def _is_given_up(self) -> bool:
        """Return whether it will never end: the group was left, or is broken."""
        return self._state.left.is_set() or self._state.record is not None

    def _await(self, limit: float | None) -> bool:
        while not self.ended:
            over, error = self._wait_slice(limit)
            if over:
                self._settle(error)
            elif limit is not None and time.monotonic() >= limit:
                return False
        return True

    def _settle(self, error: DureError | None) -> None:
        with self._settling:
            if self.ended:
                return
            copy_back, self._copy_back = self._copy_back, None
            try:
                if error is None and copy_back is not None:
                    with torch.inference_mode():  # the user's tensors may be inference tensors
                        copy_back()
                    if self.stream_device is not None and self._state.record is not None:
                        # The host has waited for a barrier, which an abort has ended.
                        error = self._state.error(self.op, began=self.began)
            except DureError as e:  # found while the host waited
                error = e
            except Exception as e:  # out of memory, say: the result is not in place
                what, seen = "the result could not be copied back", f"{type(e).__name__}: {e}"
                where = self._state.where(self.op, began=self.began)
                error = AbortRecord(kind="InternalError", what=what, seen=seen).error(**where)
            if self._is_watched and self.stream_device is not None and error is None:
                self._passed = current_stream(self.stream_device).record_event()
            received = self.op == "recv" and error is None
            self.end(error, self.peer if received and self.peer is not None else -1)
            self.work = None

    def _wait_slice(self, limit: float | None) -> tuple[bool, DureError | None]:
        """Wait a little; return whether the work ended, and how.

        For work in a stream, the current stream waits and the host continues. A limit is in host
        time, so it is enforced by polling.
        """
        work, piece = self.work, _SLICE
        if work is not None and self.stream_device is not None and limit is not None:
            while not (work.is_completed() or self._is_given_up()):
                if time.monotonic() >= limit:
                    return False, None
                time.sleep(_ASK_STREAM_S)
        if self._state.record is not None and not self.engine_done:
            return True, self._state.error(self.op, began=self.began)
        if limit is not None:
            piece = min(piece, timedelta(seconds=max(0.001, limit - time.monotonic())))
        try:
            if work is not None and self.stream_device is not None:
                work.wait()
            elif work is not None:
                work.wait(piece)
            return True, None
        except UsageError as e:
            return True, e
        except RuntimeError as e:
            if str(e).startswith(_SLICE_OVER) and not self._state.left.is_set():
                return False, None
            with self._settling:
                if self.ended:
                    return True, None
                return True, self._state.translate(e, self.op, self.began, self.peer)


class MessageRequest(Request):
    """A pending send or receive.

    Args:
        state: Of the engine.
        op: "send" or "recv".
        work: The engine's work.
        peer: The other rank; None for any rank.
        op_timeout: How long it may take; None: as long as the engine allows.
    """

    __slots__ = ("_began", "_op", "_op_timeout", "_peer", "_state", "_waiting", "_work")

    def __init__(
        self,
        state: EngineState,
        op: str,
        work: EngineWork,
        peer: int | None,
        op_timeout: timedelta | None = None,
    ) -> None:
        super().__init__()
        self._state, self._op, self._peer, self._op_timeout = state, op, peer, op_timeout
        self._work: EngineWork | None = work
        self._began = time.monotonic()
        self._waiting = False

    def _wait_engine(self) -> None:
        work, error, source = self._work, None, -1
        assert work is not None
        try:
            if self._op_timeout is None:
                work.wait()
            else:
                work.wait(self._op_timeout)
            if self._op == "recv":
                source = work._source_rank()  # pyright: ignore[reportPrivateUsage]
        except RuntimeError as e:
            error = self._state.translate(e, self._op, self._began, self._peer)
        finally:  # end the request after any exception
            self._work = None
            self.end(error, source)

    def _claim(self) -> bool:
        """Return True to the first caller, which then waits for the engine's work."""
        with self._lock:
            first, self._waiting = not self._waiting, True
        return first

    def _poll(self) -> None:
        if self._claim():
            threading.Thread(target=self._wait_engine, name=f"dure-{self._op}", daemon=True).start()

    def _await(self, limit: float | None) -> bool:
        if limit is not None:
            self._poll()
        elif self._claim():
            self._wait_engine()
        return super()._await(limit)


_kept: list[tuple[object, list[EngineWork]]] = []
"""Engines that were broken off, and their pending work (see "Leaving")."""
_keeping = threading.Lock()


def keep_engine(engine: object, works: list[EngineWork]) -> None:
    """Keep `engine`, also when this interpreter ends, until `works` have ended."""
    with _keeping:
        if works:
            _kept.append((engine, works))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


def drop_engines() -> None:
    """Drop the engines whose pending work has ended."""
    with _keeping:
        for entry in [e for e in _kept if all(work.is_completed() for work in e[1])]:
            _kept.remove(entry)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry[0]))


class ExitRecords:
    """The exit records of one group, seen from one rank. Threads: every method, from any thread.

    Args:
        store: Of the group.
        rank: This rank.
        size: Ranks of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lines: list[str] = []

    def publish(self, event: str) -> None:
        """Write that this rank has left, or gave up."""
        self._ask(lambda: self._store.append(_KEY, f"{event} {self._rank}\n"))

    def have_left(self) -> frozenset[int]:
        """Return the ranks that have left, by one look at the store."""
        self._ask(self._read)
        return frozenset(self._ranks("left"))

    def ask(self, timed_out: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return which ranks left and which gave up waiting, in the order of their records.

        Args:
            timed_out: Whether time ran out on this rank too: then it writes its own record, and
                waits for those of all other ranks.
        """
        if timed_out:
            self.publish("gave-up")
        enough = self._size - 1 if timed_out else 1
        self._ask(lambda: self._read_until(enough))
        return self._ranks("left"), self._ranks("gave-up")

    def _ranks(self, event: str) -> tuple[int, ...]:
        """Return the other ranks with a record of this event, as far as they were read."""
        words = [line.split() for line in self._lines]
        return tuple(int(r) for what, r in words if what == event and int(r) != self._rank)

    def _read(self) -> None:
        if self._store.check([_KEY]):
            self._lines = self._store.get(_KEY).decode().splitlines()

    def _read_until(self, enough: int) -> None:
        """Read until there are records of `enough` other ranks, or time is up."""
        until = time.monotonic() + _ASK_S
        while time.monotonic() < until:
            self._read()
            others = {line.split()[1] for line in self._lines} - {str(self._rank)}
            if len(others) >= enough:
                return
            time.sleep(_POLL_S)

    def _ask(self, action: Callable[[], None]) -> None:
        """Run `action` and wait at most `_ASK_S` for it; errors of the store are ignored."""

        def attempt() -> None:
            with suppress(DureError):
                action()

        thread = threading.Thread(target=attempt, name="dure-exits", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can start: this process ends, from Python 3.12 on
            patience = self._store.timeout
            self._store.set_timeout(timedelta(seconds=_ASK_S))
            attempt()
            self._store.set_timeout(patience)
        else:
            thread.join(_ASK_S)
