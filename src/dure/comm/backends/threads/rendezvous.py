"""Where thread-ranks find each other: collectives by number, messages by mailbox, and who left.

**Collectives.** A rank leaves its k-th `Call` at *collective* k and gets a request; whoever arrives
last compares the calls and moves the data of all ranks, on its own thread, and then ends the
requests of all. So an asynchronous call needs no worker thread: arriving never blocks on a peer,
and collectives end in order because the last one to arrive at number k cannot be at k + 1 before it
has finished k.

**Messages.** A message that finds a posted receive goes straight into its tensor; any other waits
in the receiver's mailbox as a copy, so a send never blocks (and memory is the only limit). Where a
test wants sends to wait (`BackendOptions.eager_bytes`), the message itself waits there, with the
request of its sender, which ends when the message is received.

**Failure.** A timeout, a mismatch or a rank that left breaks the group for all collectives, for
good: pending and later ones raise what one abort record says. Messages go on as long as both ends
are there; what was sent by a rank before it left in order can still be received.

Threads: `lock` guards every field. Data are moved outside it. A wait polls twice a second
whether a rank's threads have all ended without a word, which nothing else would report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.request import Request
from dure.comm.backends.threads.moves import move
from dure.comm.backends.threads.waiting import Wait, Waiting
from dure.comm.call import Call, Fingerprint, compare, fingerprint
from dure.errors import Aborted, DureError

__all__ = ["Collective", "Message", "Receive", "Rendezvous", "TimedRequest", "message_text"]

_POLL_S = 0.5


class TimedRequest(Request):
    """A pending operation that has a deadline, and looks for dead ranks while it waits.

    Args:
        timeout_s: How long it may take.
        expire: Ends it when its time is up, unless its data are moving.
        look: Called now and then while somebody waits.
    """

    __slots__ = ("_deadline", "_expire", "_look", "_waits", "began")

    def __init__(
        self, timeout_s: float, expire: Callable[[], None], look: Callable[[], None]
    ) -> None:
        super().__init__()
        self.began = time.monotonic()
        self._deadline = self.began + timeout_s
        self._expire, self._look = expire, look
        self._waits: tuple[Waiting, int, Wait] | None = None

    def watch(self, table: Waiting, rank: int, wait: Wait) -> None:
        """Note in `table` when `rank` waits for this, without a limit of its own."""
        self._waits = table, rank, wait

    def _poll(self) -> None:
        if time.monotonic() >= self._deadline:
            self._expire()

    def _await(self, limit: float | None) -> bool:
        if self._waits is None or limit is not None:
            return self._sleep(limit)
        table, rank, wait = self._waits
        table.begin(rank, wait)
        try:
            return self._sleep(limit)
        finally:
            table.end(rank)

    def _sleep(self, limit: float | None) -> bool:
        until = self._deadline if limit is None else min(limit, self._deadline)
        while not super()._await(min(until, time.monotonic() + _POLL_S)):
            if time.monotonic() >= until:
                if until < self._deadline:
                    return False
                self._expire()
                return super()._await(None)  # it has ended, or its data are being moved
            self._look()
        return True


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one rank called, and what is needed to compare it and to tell it how it ended."""

    call: Call
    fingerprint: Fingerprint
    site: str
    request: Request

    def text(self) -> str:
        """Say the call in words."""
        return self.fingerprint.text(self.site)


@dataclass(slots=True, eq=False)
class Collective:
    """One collective: who has arrived."""

    arrivals: list[Arrival | None]
    num_here: int = 0


@dataclass(slots=True, eq=False)
class Message:
    """A tensor under way to a mailbox: a copy of what was sent, and the sender's file and line.

    With the `request` of a sender that waits it is what was sent itself.
    """

    src: int
    tag: int
    tensor: torch.Tensor
    site: str = ""
    request: TimedRequest | None = None


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive; `src` is None for a message from anyone."""

    tensor: torch.Tensor
    src: int | None
    tag: int
    site: str = ""
    request: Request = field(default_factory=Request)

    def takes(self, src: int, tag: int) -> bool:
        """Tell whether a message from `src` with `tag` is for this receive."""
        return self.tag == tag and self.src in (None, src)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Tell whether a message is what this receive has room for."""
        return self.tensor.dtype == tensor.dtype and self.tensor.numel() == tensor.numel()

    def fill(self, src: int, tensor: torch.Tensor) -> None:
        """Copy a message that fits into place, and end."""
        with torch.inference_mode():  # outputs may be inference tensors; nothing is recorded
            self.tensor.detach().view(-1).copy_(tensor.detach().view(-1))
        self.request.end(source=src)


@dataclass(slots=True)
class _Member:
    """What is known about one rank: its threads, how far it got, its mail."""

    threads: tuple[threading.Thread, ...] = ()
    num_collectives: int = 0
    posted: list[Receive] = field(default_factory=list[Receive])
    mail: list[Message] = field(default_factory=list[Message])
    left: str = ""


class Rendezvous:
    """What one group's thread-ranks share (see the module's text)."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.lock = threading.Lock()
        self.everyone_here = threading.Event()
        self._members = [_Member() for _ in range(size)]
        self._joined: set[int] = set()
        self._collectives: dict[int, Collective] = {}
        self._record: AbortRecord | None = None

    def _error(self, record: AbortRecord, rank: int, op: str, began: float | None) -> DureError:
        """Make the error of `rank`; the rank that left sees `Aborted`, its peers `PeerLost`."""
        elapsed_s = 0.0 if began is None else time.monotonic() - began
        return record.error(
            group=self.name, op=op, rank=rank, world_size=self.size, elapsed_s=elapsed_s
        )

    # ---- coming and going ------------------------------------------------------------------------

    def join(self, rank: int) -> None:
        """Come in as `rank`."""
        with self.lock:
            self._members[rank].threads = (threading.current_thread(),)
            self._joined.add(rank)
            if len(self._joined) == self.size:
                self.everyone_here.set()

    def not_joined(self) -> tuple[int, ...]:
        """Return the ranks that have not come yet."""
        with self.lock:
            return tuple(r for r in range(self.size) if r not in self._joined)

    def leave(self, rank: int, abort: bool, how: str = "left the group") -> None:
        """Go; pending operations of `rank` end with `Aborted`, what needs it with `PeerLost`."""
        with self.lock:
            self._leave(rank, abort, how)

    def has_left(self, rank: int) -> bool:
        """Tell whether `rank` has gone, or its threads have ended."""
        self.lose_ended_threads()
        with self.lock:
            return bool(self._members[rank].left)

    def _leave(self, rank: int, abort: bool, how: str) -> None:
        member = self._members[rank]
        if member.left:
            return
        member.left = how
        record = AbortRecord(kind="PeerLost", what=f"rank {rank} {how}", peer=rank)
        self._abort(record)
        num_here = sum(not m.left for m in self._members)
        for other, m in enumerate(self._members):
            alone = num_here <= 1 and not m.left
            for receive in list(m.posted):
                lost = receive.src == rank or (receive.src is None and (abort or alone))
                if other == rank or lost:
                    m.posted.remove(receive)
                    self._end_receive(other, receive, record)
            for message in list(m.mail):
                if message.request is not None and rank in (other, message.src):
                    m.mail.remove(message)
                    self._end_send(message, record)
        member.mail.clear()

    def _end_receive(self, rank: int, receive: Receive, record: AbortRecord) -> None:
        began = receive.request.began if isinstance(receive.request, TimedRequest) else None
        receive.request.end(self._error(record, rank, "recv", began))

    def _end_send(self, message: Message, record: AbortRecord) -> None:
        request = message.request
        assert request is not None
        request.end(self._error(record, message.src, "send", request.began))

    def _abort(self, record: AbortRecord) -> None:
        """End all open collectives; the first record is the one later calls will see."""
        self._record = self._record or record
        for number, collective in list(self._collectives.items()):
            if collective.num_here < self.size:  # else its last rank is moving the data right now
                del self._collectives[number]
                self._end_all(collective, record)

    def _end_all(self, collective: Collective, record: AbortRecord | None) -> None:
        for rank, arrival in enumerate(collective.arrivals):
            if arrival is not None:
                request, op = arrival.request, arrival.call.op
                began = request.began if isinstance(request, TimedRequest) else None
                request.end(None if record is None else self._error(record, rank, op, began))

    def lose_ended_threads(self) -> None:
        """Let ranks go whose threads have all ended without leaving."""
        with self.lock:
            for rank in self._joined:
                member = self._members[rank]
                if not member.left and not any(t.is_alive() for t in member.threads):
                    self._leave(rank, True, "ended without leaving the group")

    def _seen(self, rank: int) -> _Member:
        """Note that the calling thread acts for `rank`."""
        member = self._members[rank]
        thread = threading.current_thread()
        if member.threads[-1] is not thread:
            member.threads = (member.threads[0], thread)
        return member

    def _check_here(self, rank: int, op: str) -> None:
        if self._members[rank].left:
            raise Aborted("this rank has left the group", group=self.name, op=op, rank=rank)

    # ---- collectives -----------------------------------------------------------------------------

    def arrive(self, rank: int, call: Call, request: Request, site: str = "") -> Collective:
        """Leave `call` at this rank's next collective; the last to arrive does the work of all."""
        arrival = Arrival(call, fingerprint(call, rank, self.size), site, request)
        with self.lock:
            self._check_here(rank, call.op)
            if self._record is not None:
                raise self._error(self._record, rank, call.op, None)
            member = self._seen(rank)
            number = member.num_collectives
            member.num_collectives += 1
            collective = self._collectives.get(number)
            if collective is None:
                collective = self._collectives[number] = Collective([None] * self.size)
            collective.arrivals[rank] = arrival
            collective.num_here += 1
            complete = collective.num_here == self.size
        if complete:
            self._complete(number, collective)
        return collective

    def _complete(self, number: int, collective: Collective) -> None:
        """Compare the calls, move the data, end the requests."""
        arrivals = [a for a in collective.arrivals if a is not None]
        record: AbortRecord | None = None
        try:
            problem = compare([a.fingerprint for a in arrivals])
            if problem:
                texts = {r: a.text() for r, a in enumerate(arrivals)}
                record = AbortRecord.desync(problem, texts)
            else:
                move([a.call for a in arrivals])
        except Exception as e:
            what, seen = "moving the data failed", f"{type(e).__name__}: {e}"
            record = AbortRecord(kind="InternalError", what=what, seen=seen)
        with self.lock:
            del self._collectives[number]
            if record is not None:
                self._abort(record)
        self._end_all(collective, record)
        collective.arrivals = []  # the tensors need not be kept alive any longer

    def expire(self, collective: Collective, why: AbortRecord | None = None) -> None:
        """Abort a collective whose time is up, unless all have come and the data are moving."""
        with self.lock:
            arrivals = collective.arrivals
            if collective not in self._collectives.values() or collective.num_here == self.size:
                return
            missing = tuple(r for r, a in enumerate(arrivals) if a is None)
            here = {r: a.text() for r, a in enumerate(arrivals) if a is not None}
            self._abort(
                why
                or AbortRecord(
                    kind="CommTimeout",
                    what="not all ranks called in time",
                    missing=missing,
                    seen=f"missing {list(missing)}; here: {here}",
                    fix="See what the missing ranks do, or raise the group's timeout.",
                )
            )

    # ---- messages --------------------------------------------------------------------------------

    def send(self, dst: int, message: Message) -> None:
        """Hand a message to a posted receive of `dst`, or leave a copy in its mailbox."""
        receive = self._match_posted(dst, message)
        if receive is None:
            kept = message
            if message.request is None:
                kept = replace(message, tensor=message.tensor.detach().clone())
            with self.lock:
                receive = self._take_posted(dst, message)
                if receive is None:
                    self._members[dst].mail.append(kept)
                    return
        self._deliver(message, receive)

    def _deliver(self, message: Message, receive: Receive) -> None:
        receive.fill(message.src, message.tensor)
        if message.request is not None:
            message.request.end()

    def expire_send(self, dst: int, message: Message, why: AbortRecord | None = None) -> None:
        """Fail a send whose time is up, unless its message is being copied."""
        with self.lock:
            mail = self._members[dst].mail
            if message not in mail:
                return
            mail.remove(message)
        record = why or AbortRecord(
            kind="CommTimeout",
            what="a message was not received in time",
            missing=(dst,),
            seen=f"sent with tag {message.tag} to rank {dst}, which did not receive it",
        )
        self._end_send(message, record)

    def _match_posted(self, dst: int, message: Message) -> Receive | None:
        rank = message.src
        with self.lock:
            self._check_here(rank, "send")
            self._seen(rank)
            if self._members[dst].left:
                how = self._members[dst].left
                lost = AbortRecord(kind="PeerLost", what=f"rank {dst} {how}", peer=dst)
                raise self._error(lost, rank, "send", None)
            return self._take_posted(dst, message)

    def _take_posted(self, dst: int, message: Message) -> Receive | None:
        """Return the first receive that takes the message; those that it does not fit fail."""
        posted = self._members[dst].posted
        for receive in [r for r in posted if r.takes(message.src, message.tag)]:
            posted.remove(receive)
            if receive.fits(message.tensor):
                return receive
            self._refuse(dst, receive, message)
        return None

    def post(self, rank: int, receive: Receive) -> None:
        """Serve `receive` from the mailbox, or let it wait for its message."""
        with self.lock:
            self._check_here(rank, "recv")
            member = self._seen(rank)
            message = next((m for m in member.mail if receive.takes(m.src, m.tag)), None)
            if message is None:
                self._check_senders(rank, receive)
                member.posted.append(receive)
                return
            if not receive.fits(message.tensor):
                self._refuse(rank, receive, message)
                return
            member.mail.remove(message)
        self._deliver(message, receive)

    def _check_senders(self, rank: int, receive: Receive) -> None:
        """Raise where nobody is left who could send what `receive` waits for."""
        sources = range(self.size) if receive.src is None else [receive.src]
        gone = [r for r in sources if self._members[r].left]
        if len(gone) == len(sources) - (rank in sources and receive.src is None) and gone:
            how = self._members[gone[0]].left
            lost = AbortRecord(kind="PeerLost", what=f"rank {gone[0]} {how}", peer=gone[0])
            raise self._error(lost, rank, "recv", None)

    def expire_receive(self, rank: int, receive: Receive, why: AbortRecord | None = None) -> None:
        """Fail a receive whose time is up, unless its message is being copied."""
        with self.lock:
            posted = self._members[rank].posted
            if receive not in posted:
                return
            posted.remove(receive)
            source = "anyone" if receive.src is None else f"rank {receive.src}"
            record = why or AbortRecord(
                kind="CommTimeout",
                what="no message came in time",
                missing=() if receive.src is None else (receive.src,),
                seen=f"waited for tag {receive.tag} from {source}",
            )
        self._end_receive(rank, receive, record)

    def _refuse(self, dst: int, receive: Receive, message: Message) -> None:
        """Fail a receive by a message that does not fit; it is kept for one that does."""
        calls = {
            message.src: message_text("send", message.tensor, message.site),
            dst: message_text("recv", receive.tensor, receive.site),
        }
        what, seen = "a message does not fit the tensor it is received into", calls.values()
        record = AbortRecord(kind="Desync", what=what, calls=calls, seen="; ".join(seen))
        receive.request.source = message.src
        self._end_receive(dst, receive, record)


def message_text(op: str, tensor: torch.Tensor, site: str, peer: str = "") -> str:
    """Say one end of a message in words; `peer` is the other end."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    where = f" {peer}" if peer else ""
    return f"{op}({dtype}{list(tensor.shape)}){where}" + (f" at {site}" if site else "")
