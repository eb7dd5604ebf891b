"""Waiting for a foreign engine's work: tickets that can be left, and errors that are ours.

An engine's own `wait` cannot be called off, and an engine that is asked to stop does not always.
So a collective's ticket waits in slices and looks up between them whether the group was left.
Point-to-point work is different: where its wait times out, Gloo takes the whole group down; and it
does not tell, without being waited for, whether it is done. So its ticket waits in one piece, on a
thread of its own when somebody only wants to ask.

Threads: every method of a ticket, from any thread, at any time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from dure.comm.backends.engine.calls import EngineWork
from dure.errors import Aborted, CommError, CommTimeout, InternalError, PeerLost

__all__ = ["CollectiveTicket", "EngineState", "MessageTicket"]

_NOISE = re.compile(r"^\[\S+\.cc:\d+\]|This is typically caused by.*|\n", re.DOTALL)
_SLICE = timedelta(milliseconds=200)
_SLICE_OVER = "Operation timed out"  # what torch says when a slice is over, and nothing else
_TIMED_OUT = ("timed out", "timeout", "application timeout")
_LOST = ("connection closed", "connection reset", "broken pipe", "refused", "connect ", "socket")


class EngineState:
    """What the tickets of one engine share: where they are, and whether the group was left.

    Args:
        name: The group's name.
        rank: This rank.
        size: Ranks of the group.
        ask_peers: Called after a failure, with whether time ran out here; tells which ranks left
            and which gave up waiting, as far as that can be found out in a moment.
        break_off: Closes the group's connections. Called once, after the first failure: ranks that
            wait for this one would otherwise wait until their time is up.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        ask_peers: Callable[[bool], tuple[tuple[int, ...], tuple[int, ...]]],
        break_off: Callable[[], None],
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.left = threading.Event()
        self._ask_peers, self._break_off = ask_peers, break_off
        self._lock = threading.Lock()
        self._failed = False

    def translate(
        self, error: Exception, op: str, began: float, peer: int | None = None
    ) -> CommError | InternalError:
        """Make the engine's error ours.

        Args:
            error: What the engine raised; only its text tells what it is.
            op: The operation.
            began: When it began (`time.monotonic`).
            peer: The rank it was with, for point-to-point.
        """
        self._fail()
        text = _NOISE.sub("", str(error)).strip()
        where: dict[str, object] = {
            "group": self.name,
            "op": op,
            "rank": self.rank,
            "world_size": self.size,
            "elapsed_s": time.monotonic() - began,
        }
        if self.left.is_set():
            return Aborted("the group was left while the operation was pending", **where)  # pyright: ignore[reportArgumentType]
        low = text.lower()
        timed_out = any(t in low for t in _TIMED_OUT)
        if not timed_out and not any(t in low for t in _LOST):
            return InternalError("the engine failed", seen=text, **where)  # pyright: ignore[reportArgumentType]
        gone, gave_up = self._ask_peers(timed_out)
        if gone or not (timed_out or gave_up):
            who = gone[0] if gone else peer
            what = "a peer was lost" if who is None else f"rank {who} left the group or was lost"
            return PeerLost(what, peer=who, seen=text, **where)  # pyright: ignore[reportArgumentType]
        here = {self.rank, *gave_up}
        missing = tuple(r for r in range(self.size) if r not in here) if peer is None else (peer,)
        return CommTimeout(
            "not all ranks called in time",
            missing=missing,
            peer=peer,
            seen=f"missing {list(missing)}; the engine says: {text}",
            fix="See what the missing ranks do, or raise the group's timeout.",
            **where,  # pyright: ignore[reportArgumentType]
        )

    def _fail(self) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._break_off()


class _Over:
    """Stands for work that has ended: torch's own object would keep the connections open."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = _SLICE) -> bool:
        del timeout
        return True

    def _source_rank(self) -> int:
        return -1


_OVER = _Over()


class CollectiveTicket:
    """A pending collective; `land`, if given, runs once when the engine is done.

    Args:
        state: What the engine's tickets share.
        op: The operation, for errors.
        work: The engine's work.
        land: Brings the result to the user's tensors.
        in_stream: The engine orders its work by CUDA streams, so waiting does not block the host.
    """

    source = -1

    def __init__(
        self,
        state: EngineState,
        op: str,
        work: EngineWork,
        land: Callable[[], object] | None,
        in_stream: bool,
    ) -> None:
        self._state, self._op, self._land = state, op, land
        self._work: EngineWork = work
        self._in_stream = in_stream
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._error: CommError | InternalError | None = None

    @property
    def ended(self) -> bool:
        """Whether the engine is done with it."""
        return self._work.is_completed()

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._work.is_completed() or self._state.left.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            over = self._wait_slice(limit)
            if over is not None:
                break
        if not over:
            return False
        with self._lock:
            self._work = _OVER
            if self._error is not None:
                raise self._error
            land, self._land = self._land, None
            if land is not None:
                with torch.inference_mode():  # the user's tensors may be inference tensors
                    land()
        return True

    def _wait_slice(self, limit: float | None) -> bool | None:
        """Wait a little: True if the work ended, False if `limit` passed, None if neither."""
        piece = _SLICE
        if limit is not None:
            piece = min(piece, timedelta(seconds=max(0.001, limit - time.monotonic())))
        try:
            if self._in_stream:
                self._work.wait()
            else:
                self._work.wait(piece)
            return True
        except RuntimeError as e:
            still_pending = str(e).startswith(_SLICE_OVER) and not self._state.left.is_set()
            if not still_pending:
                with self._lock:
                    if self._error is None:
                        self._error = self._state.translate(e, self._op, self._began)
                return True
        return False if limit is not None and time.monotonic() >= limit else None


class MessageTicket:
    """A pending send or receive.

    Args:
        state: What the engine's tickets share.
        op: "send" or "recv".
        work: The engine's work.
        peer: The other rank; None for anyone.
        patience: How long it may take; None: as long as the engine allows.
    """

    def __init__(
        self,
        state: EngineState,
        op: str,
        work: EngineWork,
        peer: int | None,
        patience: timedelta | None = None,
    ) -> None:
        self._state, self._op, self._peer = state, op, peer
        self._patience = patience
        self._work: EngineWork = work
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._waiting = False
        self._over = threading.Event()
        self._error: CommError | InternalError | None = None
        self._source = -1

    @property
    def source(self) -> int:
        """See `Ticket.source`."""
        return self._source

    @property
    def ended(self) -> bool:
        """Whether somebody has waited to its end."""
        return self._over.is_set()

    def _wait_engine(self) -> None:
        try:
            if self._patience is None:
                self._work.wait()
            else:
                self._work.wait(self._patience)
            if self._op == "recv":
                self._source = self._work._source_rank()  # pyright: ignore[reportPrivateUsage]
        except RuntimeError as e:
            self._error = self._state.translate(e, self._op, self._began, self._peer)
        finally:
            self._work = _OVER
            self._over.set()

    def _claim(self) -> bool:
        """Tell the first who asks, and nobody else, to do the waiting."""
        with self._lock:
            first, self._waiting = not self._waiting, True
        return first

    def _wait_beside(self) -> None:
        if self._claim():
            threading.Thread(target=self._wait_engine, name=f"dure-{self._op}", daemon=True).start()

    def done(self) -> bool:
        """See `Ticket.done`."""
        self._wait_beside()
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        if timeout_s is not None:
            self._wait_beside()
        elif self._claim():
            self._wait_engine()
        if not self._over.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True
