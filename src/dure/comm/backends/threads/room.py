"""Where thread-ranks meet: collectives by number, messages by mailbox, and who has left.

**Collectives.** The k-th collective of every rank is *meeting* k. A rank leaves its `Call` there
and gets a ticket; whoever arrives last compares the calls and moves the data of all ranks, on its
own thread, and then wakes the others with one event. So an asynchronous call needs no worker
thread: arriving never blocks on a peer, and the meetings end in order because the last one to
arrive at meeting k cannot be at k + 1 before it has finished k.

**Messages.** A message that finds a posted receive goes straight into its tensor; any other waits
in the receiver's mailbox as a copy, so a send never blocks (and memory is the only limit).

**Failure.** A timeout, a mismatch or a rank that left fails the room for all collectives, for good:
pending and later ones raise. Messages go on as long as both ends are there; what was sent by a rank
before it left in order can still be received.

Threads: `lock` guards every field. Data are moved outside it. A wait polls twice a second
whether a rank's threads have all ended without a word, which nothing else would report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from dure.comm.backends.threads.moves import Call, check_calls, in_one_form, move
from dure.errors import Aborted, CommError, CommTimeout, Desync, InternalError, PeerLost

__all__ = ["Failure", "Meeting", "Message", "Receive", "Room"]

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an operation failed, from which each rank makes its own error."""

    kind: type[CommError | InternalError]
    what: str
    peer: int | None = None
    fields: dict[str, object] = field(default_factory=dict[str, object])

    def error(self, room: Room, rank: int, op: str, elapsed_s: float) -> CommError | InternalError:
        """Make the error of `rank`; the rank that left sees `Aborted`, its peers `PeerLost`."""
        where: dict[str, object] = {
            "group": room.name,
            "op": op,
            "rank": rank,
            "world_size": room.size,
            "elapsed_s": elapsed_s,
        }
        if self.peer == rank:
            return Aborted("the group was left while the operation was pending", **where)  # pyright: ignore[reportArgumentType]
        return self.kind(self.what, peer=self.peer, **where, **self.fields)  # pyright: ignore[reportArgumentType]


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective: the calls that have arrived, and how it ended."""

    calls: list[Call | None]
    num_here: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    failure: Failure | None = None


@dataclass(slots=True, eq=False)
class Message:
    """A tensor under way to a mailbox: a copy of what was sent, and the sender's file and line."""

    src: int
    tag: int
    tensor: torch.Tensor
    site: str = ""


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive; `src` is None for a message from anyone."""

    tensor: torch.Tensor
    src: int | None
    tag: int
    site: str = ""
    source: int = -1
    ended: threading.Event = field(default_factory=threading.Event)
    failure: Failure | None = None

    def takes(self, src: int, tag: int) -> bool:
        """Tell whether a message from `src` with `tag` is for this receive."""
        return self.tag == tag and self.src in (None, src)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Tell whether a message is what this receive has room for."""
        return self.tensor.dtype == tensor.dtype and self.tensor.numel() == tensor.numel()

    def fill(self, src: int, tensor: torch.Tensor) -> None:
        """Copy a message that fits into place, and end."""
        self.source = src
        with torch.inference_mode():  # outputs may be inference tensors; nothing is recorded
            self.tensor.detach().view(-1).copy_(tensor.detach().view(-1))
        self.ended.set()

    def refuse(self, dst: int, message: Message) -> None:
        """Fail because of a message that does not fit; the message is kept for one that does."""
        self.source = message.src
        calls = {
            message.src: _message_text("send", message.tensor, message.site),
            dst: _message_text("recv", self.tensor, self.site),
        }
        self.failure = Failure(
            kind=Desync,
            what="a message does not fit the tensor it is received into",
            fields={"calls": calls, "seen": "; ".join(calls.values())},
        )
        self.ended.set()


@dataclass(slots=True)
class _Member:
    """What the room knows about one rank: its threads, how far it got, its mail."""

    threads: tuple[threading.Thread, ...] = ()
    num_meetings: int = 0
    posted: list[Receive] = field(default_factory=list[Receive])
    mail: list[Message] = field(default_factory=list[Message])
    left: str = ""


class Room:
    """The meeting place of one group's thread-ranks (see the module's text)."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.lock = threading.Lock()
        self.everyone_here = threading.Event()
        self._members = [_Member() for _ in range(size)]
        self._joined: set[int] = set()
        self._meetings: dict[int, Meeting] = {}
        self._failure: Failure | None = None

    # Coming and going ---------------------------------------------------------------------------

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
        failure = Failure(kind=PeerLost, what=f"rank {rank} {how}", peer=rank)
        self._fail(failure)
        everyone_left = sum(not m.left for m in self._members)
        for other, m in enumerate(self._members):
            alone = everyone_left <= 1 and not m.left
            for receive in list(m.posted):
                lost = receive.src == rank or (receive.src is None and (abort or alone))
                if other == rank or lost:
                    m.posted.remove(receive)
                    receive.failure = failure
                    receive.ended.set()
        member.mail.clear()

    def _fail(self, failure: Failure) -> None:
        """End all open meetings; the first failure is the one later calls will see."""
        self._failure = self._failure or failure
        for number, meeting in list(self._meetings.items()):
            if meeting.num_here < self.size:  # else its last rank is moving the data right now
                del self._meetings[number]
                meeting.failure = failure
                meeting.ended.set()

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

    # Collectives --------------------------------------------------------------------------------

    def arrive(self, rank: int, call: Call) -> Meeting:
        """Leave `call` at this rank's next meeting; the last to arrive does the work of all."""
        with self.lock:
            self._check_here(rank, call.op)
            if self._failure is not None:
                raise self._failure.error(self, rank, call.op, 0.0)
            member = self._seen(rank)
            number = member.num_meetings
            member.num_meetings += 1
            meeting = self._meetings.get(number)
            if meeting is None:
                meeting = self._meetings[number] = Meeting([None] * self.size)
            meeting.calls[rank] = call
            meeting.num_here += 1
            complete = meeting.num_here == self.size
        if complete:
            self._hold(number, meeting)
        return meeting

    def _hold(self, number: int, meeting: Meeting) -> None:
        """Compare the calls, move the data, end the meeting."""
        calls = in_one_form([c for c in meeting.calls if c is not None])
        failure: Failure | None = None
        try:
            problem = check_calls(calls)
            if problem:
                failure = _desync(problem, calls)
            else:
                move(calls)
        except Exception as e:
            failure = Failure(
                kind=InternalError,
                what="moving the data failed",
                fields={"seen": f"{type(e).__name__}: {e}"},
            )
        with self.lock:
            del self._meetings[number]
            meeting.failure = failure
            meeting.calls = []  # the tensors need not be kept alive any longer
            if failure is not None:
                self._fail(failure)
        meeting.ended.set()

    def expire_meeting(self, meeting: Meeting) -> None:
        """Fail a meeting whose time is up, unless all have come and the data are moving."""
        with self.lock:
            if meeting.ended.is_set() or meeting.num_here == self.size:
                return
            missing = tuple(r for r, c in enumerate(meeting.calls) if c is None)
            here = {r: str(c) for r, c in enumerate(meeting.calls) if c is not None}
            self._fail(
                Failure(
                    kind=CommTimeout,
                    what="not all ranks called in time",
                    fields={
                        "missing": missing,
                        "seen": f"missing {list(missing)}; here: {here}",
                        "fix": "See what the missing ranks do, or raise the group's timeout.",
                    },
                )
            )

    # Messages -----------------------------------------------------------------------------------

    def send(self, dst: int, message: Message) -> None:
        """Hand a message to a posted receive of `dst`, or leave a copy in its mailbox."""
        receive = self._match_posted(dst, message)
        if receive is None:
            copy = replace(message, tensor=message.tensor.detach().clone())
            with self.lock:
                receive = self._take_posted(dst, message)
                if receive is None:
                    self._members[dst].mail.append(copy)
                    return
        receive.fill(message.src, message.tensor)

    def _match_posted(self, dst: int, message: Message) -> Receive | None:
        rank = message.src
        with self.lock:
            self._check_here(rank, "send")
            self._seen(rank)
            if self._members[dst].left:
                how = self._members[dst].left
                lost = Failure(kind=PeerLost, what=f"rank {dst} {how}", peer=dst)
                raise lost.error(self, rank, "send", 0.0)
            return self._take_posted(dst, message)

    def _take_posted(self, dst: int, message: Message) -> Receive | None:
        """Return the first receive that takes the message; those that it does not fit fail."""
        posted = self._members[dst].posted
        for receive in [r for r in posted if r.takes(message.src, message.tag)]:
            posted.remove(receive)
            if receive.fits(message.tensor):
                return receive
            receive.refuse(dst, message)
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
                receive.refuse(rank, message)
                return
            member.mail.remove(message)
        receive.fill(message.src, message.tensor)

    def _check_senders(self, rank: int, receive: Receive) -> None:
        """Raise where nobody is left who could send what `receive` waits for."""
        sources = range(self.size) if receive.src is None else [receive.src]
        gone = [r for r in sources if self._members[r].left]
        if len(gone) == len(sources) - (rank in sources and receive.src is None) and gone:
            how = self._members[gone[0]].left
            lost = Failure(kind=PeerLost, what=f"rank {gone[0]} {how}", peer=gone[0])
            raise lost.error(self, rank, "recv", 0.0)

    def expire_receive(self, rank: int, receive: Receive) -> None:
        """Fail a receive whose time is up, unless its message is being copied."""
        with self.lock:
            posted = self._members[rank].posted
            if receive not in posted:
                return
            posted.remove(receive)
            missing = () if receive.src is None else (receive.src,)
            receive.failure = Failure(
                kind=CommTimeout,
                what="no message came in time",
                fields={
                    "missing": missing,
                    "seen": f"waited for tag {receive.tag} from "
                    + ("anyone" if receive.src is None else f"rank {receive.src}"),
                },
            )
        receive.ended.set()


def _message_text(op: str, tensor: torch.Tensor, site: str) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{op}({dtype}{list(tensor.shape)})" + (f" at {site}" if site else "")


def _desync(problem: str, calls: list[Call]) -> Failure:
    texts = {r: str(c) for r, c in enumerate(calls)}
    return Failure(
        kind=Desync,
        what="the ranks did not call the same thing",
        fields={
            "calls": texts,
            "seen": problem + ": " + "; ".join(f"rank {r} {t}" for r, t in texts.items()),
            "fix": "Make every rank call the same operations in the same order.",
        },
    )


def wait_for(
    ended: threading.Event, deadline: float, timeout_s: float | None, check: Callable[[], None]
) -> bool:
    """Wait for `ended` until `deadline` or for `timeout_s`; `check` runs while waiting.

    Returns:
        True if the event is set or `deadline` has passed; False if `timeout_s` passed first.
    """
    limit = deadline if timeout_s is None else min(deadline, time.monotonic() + timeout_s)
    while not ended.is_set():
        rest = limit - time.monotonic()
        if rest <= 0:
            return limit >= deadline
        if not ended.wait(min(rest, _POLL_S)):
            check()
    return True
