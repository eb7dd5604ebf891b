"""A communicator of the simulated NCCL: a stream, and a log of launches that its ranks share.

Each launch is two pieces of work in the communicator's stream. The first reads the tensors that
the rank sends and appends the launch to the rank's log, in the group's store. The second runs when
the counterparts have arrived (launches.py), and writes the results. A thread for each other rank
reads that rank's log. The first entry of a log says that the rank has made the communicator: the
host waits for those of all ranks, as NCCL does at the first operation. (Dure's groups have met in
the store before: engine/meeting.py.)

Cost:
    Each rank reads all that any rank sends, through the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch

from dure.errors import Aborted, CommError, CommTimeout, Desync, DureError, PeerLost, StoreTimeout
from dure.testing.accelerator import streams
from dure.testing.accelerator.launches import Launch, Launches, Part
from dure.testing.accelerator.streams import Stream

__all__ = ["Communicator", "PendingOperation"]

_PIECE = timedelta(seconds=1)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Launch).decode


class _SharedLog(Protocol):
    """The part of a store that is used."""

    set: Callable[[str, bytes], object]
    get: Callable[[str], bytes]
    wait: Callable[[list[str], timedelta], object]
    add: Callable[[str, int], int]
    deleteKey: Callable[[str], object]


class PendingOperation(msgspec.Struct):
    """One part of a launch, before it starts.

    Attributes:
        kind, peer, text, form: See `Part`.
        reads: Tensors on the CPU with the values that are sent.
        finish: Writes the results; called with the values that ranks have sent, by rank.
    """

    kind: str
    peer: int
    text: str
    form: str
    reads: Sequence[torch.Tensor]
    finish: Callable[[dict[int, bytes]], object]


class Communicator:
    """One rank's part of a communicator.

    Args:
        store: Of the group.
        key: Its name in the store.
        ranks: Its ranks, as ranks of the group.
        rank: This rank, of the group.
        timeout: How long the counterparts of a launch may take.
        group: Name of the group, for errors.
        size: Ranks of the group.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        ranks: Sequence[int],
        rank: int,
        timeout: timedelta,
        group: str,
        size: int,
    ) -> None:
        self.stream = Stream()
        self.timeout = timeout
        self.error: CommError | None = None
        self._is_raised = False
        self._store: _SharedLog = store
        self._key, self._ranks, self._rank = key, [*ranks], self_rank(ranks, rank)
        self._group, self._size = group, size
        self._launches = Launches(len(ranks))
        self._numbers: dict[tuple[str, int], int] = {}
        self._places: dict[tuple[str, int, int], int] = {}
        self._num_logged = 0
        self._is_closed = False
        self._made = {self._rank}
        for peer in range(len(ranks)):
            if peer != self._rank:
                read = threading.Thread(
                    target=self._read_log, args=(peer,), name="dure-sim-log", daemon=True
                )
                read.start()

    # ---------------------------------------------------------------- launching

    def create(self, op: str) -> None:
        """Wait for all ranks to make the communicator, for their first operation."""
        self._append(Launch([]))
        streams.serve_demands_of(self)
        streams.wait_for(_Creation(self, op))
        self.check()

    def check(self) -> None:
        """Raise the communicator's error, if it has one."""
        if self.error is not None:
            raise self.error

    def launch(self, operations: Sequence[PendingOperation]) -> Any:
        """Queue operations as one launch, after what the current stream has.

        Returns:
            An event: it has ended.
        """
        self.check()
        self.stream.wait_stream(streams.current_stream())
        parts: list[Part] = []
        for op in operations:
            peer = self._ranks.index(op.peer) if op.peer >= 0 else -1
            number = self._next_number(op.kind, peer)
            parts.append(Part(op.kind, peer, number, op.text, op.form))
        started = _StartedLaunch(self, operations, Launch(parts))
        with streams.news:
            self.stream.add(started.start)
            place = self.stream.num_queued
            self._places.update((part.key, place) for part in parts)
            self.stream.add(started.finish, remote=started)
            event = self.stream.record_event()
            streams.news.notify_all()
        return event

    def _next_number(self, kind: str, peer: int) -> int:
        number = self._numbers.get((kind, peer), 0)
        self._numbers[kind, peer] = number + 1
        return number

    def demanded_place(self) -> int:
        """Return the place up to which other ranks need the stream's work."""
        needs = self._launches.needs(self._rank)
        return max((self._places.get(key, 0) for key in needs), default=0)

    # ---------------------------------------------------------------- the log

    def start(self, launch: Launch) -> None:
        """Add a launch to this rank's log."""
        for part in launch.parts:
            self._places.pop(part.key, None)
        if self.error is None:
            self._launches.add(self._rank, launch)
            self._append(launch)

    def _append(self, launch: Launch) -> None:
        self._store.set(f"{self._key}/{self._rank}/{self._num_logged}", _encode(launch))
        self._num_logged += 1

    def _read_log(self, peer: int) -> None:
        number = 0
        while not self._is_closed:
            key = f"{self._key}/{peer}/{number}"
            try:
                self._store.wait([key], _PIECE)
                launch = _decode(self._store.get(key))
                if self._store.add(f"{key}/read", 1) == len(self._ranks) - 1:
                    self._store.deleteKey(key)
                    self._store.deleteKey(f"{key}/read")
            except StoreTimeout:
                continue
            except PeerLost:  # NCCL does not notice that; the launches wait, as over NCCL
                return
            except DureError as error:
                self._lose(peer, str(error))
                return
            with streams.news:
                if number:
                    self._launches.add(peer, launch)
                else:
                    self._made.add(peer)
                streams.news.notify_all()
            number += 1
            if number > 1 and not launch.parts:
                return

    def _lose(self, peer: int, seen: str) -> None:
        with streams.news:
            if not self._is_closed:
                self.fail(self._lost(peer, "", seen))

    # ---------------------------------------------------------------- errors and the end

    def fail(self, error: CommError) -> None:
        """End all launches with an error; the first one counts."""
        with streams.news:
            if self.error is None:
                self.error = error
            streams.news.notify_all()

    def close(self) -> None:
        """Wait for all that was launched, and leave."""
        try:
            if self.error is None:
                self.stream.synchronize()
        finally:
            self._leave()

    def raise_once(self) -> None:
        """Raise the communicator's error where the host waits for a launch, once.

        Later launches end without results, so that streams can continue.
        """
        if self.error is not None and not self._is_raised:
            self._is_raised = True
            raise self.error

    def abort(self) -> None:
        """Leave; operations that have not ended fail."""
        self._is_raised = True
        self.fail(Aborted("the group was aborted while the operation was pending", **self.where()))
        self._leave()

    def _leave(self) -> None:
        with streams.news:
            if not self._is_closed:
                self._is_closed = True
                with suppress(DureError):  # if the store has ended, the others know
                    self._append(Launch([]))

    def where(self, op: str = "") -> dict[str, Any]:
        """Return the fields of errors of this communicator."""
        return {
            "group": self._group,
            "op": op or None,
            "rank": self._ranks[self._rank],
            "world_size": self._size,
        }

    def not_made(self) -> list[int]:
        """Return the ranks that have not made the communicator."""
        return [rank for rank in range(len(self._ranks)) if rank not in self._made]

    def missing(self, launch: Launch) -> list[int]:
        """Return the ranks that have not started counterparts of this rank's launch."""
        return self._launches.missing(self._rank, launch)

    def values(self, part: Part) -> dict[int, bytes]:
        """Return what other ranks have sent for a part of this rank, by rank."""
        found = self._launches.found(self._rank, part)
        return {self._ranks[rank]: other.values for rank, other in found.items()}

    def forget(self, launch: Launch) -> None:
        """Drop what was received for a launch of this rank."""
        self._launches.forget(self._rank, launch)

    def find_error(self, launch: Launch, since: float) -> CommError | None:
        """Return why the counterparts of this rank's launch do not fit, or will not arrive."""
        if different := self._launches.mismatched(self._rank, launch):
            return self._desync(
                "ranks launched different operations", str(launch), self._named(different)
            )
        missing = self.missing(launch)
        # Before the next: a rank that has found the circle may have left.
        if circle := self._launches.deadlocked(self._rank):
            named = self._named(circle)
            return self._desync("deadlock: ranks wait for each other", str(launch), named)
        for rank in missing:
            if rank in self._launches.gone:
                return self._lost(rank, str(launch), "it has left the group")
        if missing and time.monotonic() - since > self.timeout.total_seconds():
            return self.late(missing, str(launch), "they have not launched their part")
        return None

    def late(self, missing: Sequence[int], op: str, seen: str) -> CommTimeout:
        """Return the error for ranks that did not launch in time."""
        ranks = tuple(self._ranks[rank] for rank in missing)
        return CommTimeout(
            "not all ranks launched in time",
            missing=ranks,
            seen=f"missing {[*ranks]}: {seen}",
            fix="See what the missing ranks do, or raise the group's timeout.",
            **self.where(op),
        )

    def _named(self, calls: dict[int, str]) -> dict[int, str]:
        """Return calls by rank of the group."""
        return {self._ranks[rank]: text for rank, text in calls.items()}

    def _desync(self, what: str, op: str, calls: dict[int, str]) -> Desync:
        named = dict(sorted(calls.items()))
        return Desync(
            what,
            calls=named,
            seen="; ".join(f"rank {rank}: {text}" for rank, text in named.items()),
            fix="Launch the operations of a group in the same order on all its ranks, and messages "
            "in both directions with batch_isend_irecv. NCCL would hang, or corrupt memory.",
            **self.where(op),
        )

    def _lost(self, rank: int, op: str, seen: str) -> PeerLost:
        peer = self._ranks[rank]
        what = f"rank {peer} left the group or was lost"
        return PeerLost(what, peer=peer, seen=seen, **self.where(op))


def self_rank(ranks: Sequence[int], rank: int) -> int:
    """Return the place of `rank` among `ranks`."""
    return [*ranks].index(rank)


class _Creation:
    """All ranks make a communicator; see `streams.Remote`."""

    def __init__(self, communicator: Communicator, op: str) -> None:
        self._communicator, self._op, self._since = communicator, op, time.monotonic()

    def has_arrived(self) -> bool:
        return self._communicator.error is not None or not self._communicator.not_made()

    def look(self) -> None:
        made = self._communicator
        missing = made.not_made()
        if missing and time.monotonic() - self._since > made.timeout.total_seconds():
            seen = "they have not called their first operation of this communicator"
            made.fail(made.late(missing, self._op, seen))


class _StartedLaunch:
    """One launch of this rank; see `streams.Remote`."""

    def __init__(
        self, communicator: Communicator, operations: Sequence[PendingOperation], launch: Launch
    ) -> None:
        self._communicator, self._operations, self._launch = communicator, operations, launch
        self._sent: list[bytes] = []
        self._since = 0.0

    def start(self) -> None:
        """Send the values."""
        self._sent = [b"".join(map(_bytes_of, op.reads)) for op in self._operations]
        parts = [
            msgspec.structs.replace(part, values=sent)
            for part, sent in zip(self._launch.parts, self._sent, strict=True)
        ]
        self._launch = Launch(parts)
        self._communicator.start(self._launch)

    def has_arrived(self) -> bool:
        made = self._communicator
        return made.error is not None or not made.missing(self._launch)

    def look(self) -> None:
        made = self._communicator
        self._since = self._since or time.monotonic()
        if error := made.find_error(self._launch, self._since):
            made.fail(error)

    def finish(self) -> None:
        """Write the results."""
        made = self._communicator
        if made.error is None and (error := made.find_error(self._launch, time.monotonic())):
            made.fail(error)
        if made.error is not None:
            made.raise_once()
            return
        own = made.where()["rank"]
        for operation, part in zip(self._operations, self._launch.parts, strict=True):
            operation.finish({own: part.values} | made.values(part))
        made.forget(self._launch)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
