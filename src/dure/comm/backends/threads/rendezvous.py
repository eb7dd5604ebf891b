"""The state that the thread-ranks of a group share: collectives by number, mailboxes, members.

**Collectives.** A rank adds its k-th `Call` to *collective* k, as an `Arrival`, which is its
request. The last rank to arrive compares the calls and moves the data of all ranks, on its own
thread, and then ends all requests. So an asynchronous call needs no worker thread: arriving does
not wait for peers, and collectives end in order because the last rank to arrive at number k cannot
be at k + 1 before it has finished k.

**Messages.** A send and a receive are two `MessageEnd`s. The first of them waits in the receiver's
mailbox; the other finds it there, and its thread copies the data. A send that need not wait for its
receive adds a copy to the mailbox (memory is the only limit) and is complete; if a test makes sends
wait (`BackendOptions.eager_bytes`) it adds the tensor itself.

**Failure.** A timeout, a mismatch or a rank that left breaks the group for all collectives,
permanently: pending and later ones raise the error of one abort record. Messages between ranks that
have not left continue; messages that a rank sent before it left in order can still be received.

Threads:
    `lock` guards every field. Data are moved outside it. A thread that ends without leaving the
    group is a missing rank: its peers time out.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import cast

import torch

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.header import Header, difference
from dure.comm.backends.matching import Matching
from dure.comm.backends.request import Request
from dure.comm.backends.threads.moves import move
from dure.comm.call import Call, fingerprint
from dure.errors import Aborted, DureError

__all__ = ["Arrival", "MessageEnd", "Pending", "ThreadGroup"]


class Pending(Request):
    """One rank's part of a pending operation; it has a deadline.

    Args:
        rendezvous: Of the group.
        rank: Of the caller.
        op: The operation.
        site: Line of the program that called it.
        keep: The tensors, or an object that holds them.
    """

    __slots__ = ("began", "deadline", "op", "rank", "rendezvous", "site")

    def __init__(
        self, rendezvous: ThreadGroup, rank: int, op: str, site: str, keep: object
    ) -> None:
        super().__init__(keep)
        self.rendezvous, self.rank, self.op, self.site = rendezvous, rank, op, site
        self.began, self.deadline = time.monotonic(), math.inf

    def expire(self) -> None:
        """End it with a timeout, unless its data are moving."""
        raise NotImplementedError

    def fail(self, record: AbortRecord) -> None:
        """End it with this rank's error of `record`."""
        self.end(self.rendezvous.error(record, self.rank, self.op, self.began))

    def _poll(self) -> None:
        if time.monotonic() >= self.deadline:
            self.expire()

    def _await(self, limit: float | None) -> bool:
        until = self.deadline if limit is None else min(limit, self.deadline)
        if super()._await(until):
            return True
        if until < self.deadline:
            return False
        self.expire()
        return super()._await(None)  # it has ended, or its data are being moved


class Arrival(Pending):
    """One rank's call of a collective."""

    __slots__ = ("header", "number")

    def __init__(self, rendezvous: ThreadGroup, rank: int, call: Call, site: str = "") -> None:
        super().__init__(rendezvous, rank, call.op, site, call)
        self.header = Header(fingerprint(call, rank, rendezvous.size), site)
        self.number = -1

    @property
    def call(self) -> Call:
        """The call, as long as it is pending."""
        return cast(Call, self._keep)

    def text(self) -> str:
        """Return the call as text."""
        return self.header.text()

    def expire(self) -> None:
        self.rendezvous.expire_collective(self)


class MessageEnd(Pending):
    """One end of a message: a send, or a receive.

    Args:
        rendezvous: Of the group.
        rank: Of the caller.
        op: "send" or "recv".
        tensor: The tensor to send, or to receive into.
        peer: The rank at the other end; None for a receive from any rank.
        tag: Of the message.
        site: Line of the program that called it.
        eager: A send that does not wait for its receive.
    """

    __slots__ = ("dtype", "eager", "peer", "shape", "tag")

    def __init__(
        self,
        rendezvous: ThreadGroup,
        rank: int,
        op: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        site: str = "",
        eager: bool = False,
    ) -> None:
        super().__init__(rendezvous, rank, op, site, tensor)
        self.peer, self.tag, self.eager = peer, tag, eager
        self.dtype, self.shape = tensor.dtype, tensor.shape

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, as long as it is pending."""
        return self._keep

    @property
    def receiver(self) -> int:
        """The rank in whose mailbox it waits."""
        return self.rank if self.op == "recv" else cast(int, self.peer)

    def copy(self) -> None:
        """Send a copy of the tensor's current values."""
        self._keep = self.tensor.detach().clone()

    def meets(self, send: MessageEnd) -> bool:
        """Return whether this receive has the sender and tag of `send`."""
        return self.tag == send.tag and self.peer in (None, send.rank)

    def fits(self, send: MessageEnd) -> bool:
        """Return whether this receive has room for exactly the message of `send`."""
        return self.dtype == send.dtype and self.shape.numel() == send.shape.numel()

    def text(self) -> str:
        """Return the operation as text."""
        what = f"{self.op}({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"
        return what + (f" at {self.site}" if self.site else "")

    def expire(self) -> None:
        self.rendezvous.expire_message(self)


@dataclass(slots=True)
class _Member:
    """One rank of the group: its mailbox, its number of collectives, whether it left."""

    mailbox: Matching[MessageEnd, MessageEnd]
    num_collectives: int = 0
    left: bool = False


class ThreadGroup:
    """The state that the thread-ranks of a group share (see the module's text)."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.lock = threading.Lock()
        self._members = [
            _Member(Matching(MessageEnd.meets, MessageEnd.fits, self._refuse)) for _ in range(size)
        ]
        self._num_joined = 0
        self._collectives: dict[int, dict[int, Arrival]] = {}
        self._record: AbortRecord | None = None

    def error(
        self, record: AbortRecord, rank: int, op: str, began: float | None = None
    ) -> DureError:
        """Make the error of `rank`; the rank that left sees `Aborted`, its peers `PeerLost`."""
        elapsed_s = 0.0 if began is None else time.monotonic() - began
        return record.error(
            group=self.name, op=op, rank=rank, world_size=self.size, elapsed_s=elapsed_s
        )

    # ---- coming and going ------------------------------------------------------------------------

    def join(self) -> bool:
        """Join; return whether all ranks have joined."""
        with self.lock:
            self._num_joined += 1
            return self._num_joined == self.size

    def leave(self, rank: int, abort: bool) -> None:
        """Leave: pending operations of `rank` end with `Aborted`, those of peers by `PeerLost`."""
        with self.lock:
            member = self._members[rank]
            if member.left:
                return
            member.left, record = True, AbortRecord.gone(rank)
            self._abort(record)
            alone = sum(not m.left for m in self._members) <= 1
            for other, m in enumerate(self._members):
                no_sender = abort or (alone and not m.left)
                for ends in (m.mailbox.receives, m.mailbox.messages):
                    for end in list(ends):
                        lost = end.peer == rank or (end.peer is None and no_sender)
                        if not end.eager and (lost or rank in (other, end.rank)):
                            ends.remove(end)
                            end.fail(record)
            member.mailbox.receives.clear()
            member.mailbox.messages.clear()

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has left."""
        with self.lock:
            return self._members[rank].left

    def _abort(self, record: AbortRecord) -> None:
        """End all open collectives; later calls raise the error of the first record."""
        self._record = self._record or record
        for number, arrivals in list(self._collectives.items()):
            if len(arrivals) < self.size:  # else its last rank is moving the data right now
                del self._collectives[number]
                for arrival in arrivals.values():
                    arrival.fail(record)

    def _enter(self, rank: int, op: str) -> _Member:
        """Return the member `rank`; raise if it has left."""
        member = self._members[rank]
        if member.left:
            raise Aborted("this rank has left the group", group=self.name, op=op, rank=rank)
        return member

    # ---- collectives -----------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        """Arrive at this rank's next collective; the last rank to arrive runs it."""
        with self.lock:
            member = self._enter(arrival.rank, arrival.op)
            if self._record is not None:
                raise self.error(self._record, arrival.rank, arrival.op)
            arrival.number = member.num_collectives
            member.num_collectives += 1
            arrivals = self._collectives.setdefault(arrival.number, {})
            arrivals[arrival.rank] = arrival
            complete = len(arrivals) == self.size
        if complete:
            self._complete(arrival.number, [arrivals[r] for r in range(self.size)])

    def _complete(self, number: int, arrivals: list[Arrival]) -> None:
        """Compare the calls, move the data, end the requests."""
        record: AbortRecord | None = None
        try:
            record = difference([a.header for a in arrivals])
            if record is None:
                move([a.call for a in arrivals])
        except Exception as e:
            what, seen = "moving the data failed", f"{type(e).__name__}: {e}"
            record = AbortRecord(kind="InternalError", what=what, seen=seen)
        with self.lock:
            del self._collectives[number]
            if record is not None:
                self._abort(record)
        for arrival in arrivals:
            if record is None:
                arrival.end()
            else:
                arrival.fail(record)

    def expire_collective(self, arrival: Arrival) -> None:
        """Abort a collective whose time is up, unless all have come and the data are moving."""
        with self.lock:
            arrivals = self._collectives.get(arrival.number, {})
            if arrival not in arrivals.values() or len(arrivals) == self.size:
                return
            missing = tuple(r for r in range(self.size) if r not in arrivals)
            here = {r: arrivals[r].text() for r in sorted(arrivals)}
            self._abort(
                AbortRecord(
                    kind="CommTimeout",
                    what="not all ranks called in time",
                    missing=missing,
                    seen=f"missing {list(missing)}; here: {here}",
                    fix="Check what the missing ranks do, or raise the group's timeout.",
                )
            )

    # ---- messages --------------------------------------------------------------------------------

    def post(self, end: MessageEnd) -> None:
        """Match an end with the other one in the mailbox, or add it there."""
        with self.lock:
            self._enter(end.rank, end.op)
            mailbox = self._members[end.receiver].mailbox
            if end.op == "send":
                if self._members[end.receiver].left:
                    raise self.error(AbortRecord.gone(end.receiver), end.rank, "send")
                receive, send = mailbox.arrive(end), end
                if receive is None and end.eager:
                    end.copy()
            else:
                if mailbox.message_for(end) is None:
                    self._check_senders(end)
                receive, send = end, mailbox.post(end)
        if receive is None or send is None:
            return
        with torch.inference_mode():  # outputs may be inference tensors; nothing is recorded
            receive.tensor.detach().view(-1).copy_(send.tensor.detach().view(-1))
        receive.end(source=send.rank)
        send.end()

    def _refuse(self, receive: MessageEnd, send: MessageEnd) -> None:
        """Fail a receive by a message that does not fit; it is kept for one that does."""
        calls = {end.rank: end.text() for end in (send, receive)}
        what, seen = "a message does not match its receive", calls.values()
        receive.source = send.rank
        receive.fail(AbortRecord(kind="Desync", what=what, calls=calls, seen="; ".join(seen)))

    def _check_senders(self, receive: MessageEnd) -> None:
        """Raise if all ranks that could send the message of `receive` have left."""
        others = [r for r in range(self.size) if r != receive.rank]
        sources = others if receive.peer is None else [receive.peer]
        if sources and all(self._members[r].left for r in sources):
            raise self.error(AbortRecord.gone(sources[0]), receive.rank, "recv")

    def expire_message(self, end: MessageEnd) -> None:
        """Fail an end whose time is up, unless its data are being copied."""
        with self.lock:
            mailbox = self._members[end.receiver].mailbox
            ends = mailbox.receives if end.op == "recv" else mailbox.messages
            if end not in ends:
                return
            ends.remove(end)
        peer = "anyone" if end.peer is None else f"rank {end.peer}"
        what, seen = "no message arrived in time", f"waited for tag {end.tag} from {peer}"
        if end.op == "send":
            what = "a message was not received in time"
            seen = f"sent with tag {end.tag} to {peer}, which did not receive it"
        missing = () if end.peer is None else (end.peer,)
        end.fail(AbortRecord(kind="CommTimeout", what=what, missing=missing, seen=seen))
