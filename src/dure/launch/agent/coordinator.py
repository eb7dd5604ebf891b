"""The coordinator: holds the state of a job on several hosts, and answers its agents.

It runs in the launcher at the endpoint, in the thread of the control server (`StoreServer`), and
does no input or output itself: requests in, answers out. Agents send events, and the coordinator
applies them in the order in which they arrive. An agent's `WatchRequest` is answered when its own
action changes, so an event costs messages to only those agents whose action it changes.

**Leases.** A member's lease ends `lease + margin` after its last renewal was *received*. Its own
deadline is when that renewal was *sent*, plus the lease, so its ranks are dead before it is given
up here. The server's clock stands still while this launcher is paused (`ListeningClock`).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import msgspec

from dure.errors import StoreError
from dure.launch.agent.events import Action, Event, Expired, Lost
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Gone,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Message,
    NoJob,
    View,
    WatchRequest,
    pack,
    read_message,
    why_other_flags,
)
from dure.launch.agent.state import JobPhase, JobState
from dure.store.board import Answer as ClientAnswer
from dure.store.board import Board
from dure.store.wire import Reply, StoreRequest

__all__ = ["Coordinator"]

_FORMER = 1000
"""How many names of former members are known, by which a late request to join is recognized."""


@dataclass(slots=True)
class _MemberLease:
    """One agent.

    Attributes:
        nonce: Known to it alone.
        ends: When its lease ends.
        action: Its action as of `revision`.
        revision: Of the action.
    """

    nonce: bytes
    ends: float
    action: Action | None = None
    revision: int = 0


@dataclass(frozen=True, slots=True)
class _ParkedWatch:
    """A `WatchRequest` that waits, until `due`."""

    watch: WatchRequest
    due: float


class Coordinator(Board):
    """The state of a job and the leases of its members; requests in, answers out.

    Args:
        state: Of a job that begins.
        name: Identifies this server among others at the same address.

    Attributes:
        is_left: Set while no agent is a member.

    Threads:
        The server's alone, except `is_left`.
    """

    def __init__(self, state: JobState, name: bytes = b"") -> None:
        super().__init__(name)
        self.state = state
        self.is_left = threading.Event()
        self.is_left.set()
        self._members: dict[str, _MemberLease] = {}
        self._former: deque[str] = deque(maxlen=_FORMER)  # no name is used again
        self._affected: set[str] = set()  # members whose action may be another one
        self._watches: dict[bytes, _ParkedWatch] = {}  # by connection

    # --- as a board of the server --------------------------------------------------------------

    def handle(self, client: bytes, request: StoreRequest, now: float) -> list[ClientAnswer]:
        if request.op == "check" and not request.keys:  # the first request of every connection
            return super().handle(client, request, now)
        if request.op != "control" or len(request.values) != 1:
            raise StoreError("this server coordinates launchers and keeps no keys", op=request.op)
        try:
            message = read_message(request.values[0])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError("a launcher's message cannot be read", seen=str(error)) from None
        answer = self.answer(client, message, request.timeout_s, now)
        return [] if answer is None else [(client, _reply(answer))]

    def leave(self, client: bytes) -> None:
        self._watches.pop(client, None)

    def expire(self, now: float) -> list[ClientAnswer]:
        """Give up members whose leases have ended; return the answers that are due."""
        for agent, member in list(self._members.items()):
            if member.ends <= now:
                silent_s = self.state.settings.lease_s + self.state.settings.margin_s
                self._give_up(agent, f"nothing was heard of it for {silent_s:g} s")
        for agent in self._affected & self._members.keys():
            self._update(agent, self._members[agent])
        self._affected.clear()
        answers: list[ClientAnswer] = []
        for client, parked in list(self._watches.items()):
            if (answer := self._watched(parked, now)) is not None:
                del self._watches[client]
                answers.append((client, _reply(answer)))
        return answers

    @property
    def has_leases(self) -> bool:
        return bool(self._members)

    def next_deadline(self) -> float | None:
        dues = [member.ends for member in self._members.values()]
        dues += [parked.due for parked in self._watches.values()]
        return min(dues, default=None)

    # --- requests ------------------------------------------------------------------------------

    def answer(
        self, client: bytes, message: Message, timeout_s: float, now: float
    ) -> Answer | None:
        """Carry out a request; return the answer, or None if `expire` will give it.

        Args:
            client: The connection.
            message: The request.
            timeout_s: How long a `WatchRequest` waits.
            now: The time.
        """
        if isinstance(message, JoinRequest):
            return self._join(message, now)
        member = self._members.get(message.agent)
        if member is None or member.nonce != message.nonce:
            return Gone()
        match message:
            case Heartbeat():
                member.ends = self._lease_end(now)
                for event in message.events:
                    self._apply(event)
            case WatchRequest():
                self._watches[client] = _ParkedWatch(message, now + timeout_s)
                return None
            case LeaveRequest():
                self._give_up(message.agent, message.why)
        return Accepted()

    def _join(self, message: JoinRequest, now: float) -> Answer:
        agent, former = message.joined.agent, message.former
        if agent not in self._members:
            if self.state.phase is JobPhase.OVER and not former:
                return NoJob()
            if agent in self._former:  # an old request, which was late
                return Gone()
            refusal = why_other_flags(message, self.state)
            if refusal is not None:
                return refusal
            if former in self._members:
                self._give_up(former, "it was cut off, and has come back")
            self._members[agent] = _MemberLease(message.nonce, now)
            self.is_left.clear()
            self._apply(message.joined)
        self._members[agent].ends = self._lease_end(now)
        return Admitted(self.state.settings)

    def _lease_end(self, now: float) -> float:
        """Return when a lease ends that is renewed now."""
        return now + self.state.settings.lease_s + self.state.settings.margin_s

    def _give_up(self, agent: str, why: str) -> None:
        del self._members[agent]
        self._former.append(agent)
        self._apply(Lost(agent, why))
        if not self._members:
            self.is_left.set()

    def _apply(self, event: Event) -> None:
        """Change the state, and note whose action may be another one now."""
        before = self.state.outline
        self.state.apply(event)
        if self.state.outline != before:
            self._affected |= self._members.keys()
        elif not isinstance(event, Expired):
            self._affected.add(event.agent)

    # --- views -----------------------------------------------------------------------------------

    def _update(self, agent: str, member: _MemberLease) -> None:
        action = self.state.action(agent)
        if action != member.action:
            member.action = action
            member.revision += 1

    def _watched(self, parked: _ParkedWatch, now: float) -> Answer | None:
        """Return the answer to a `WatchRequest`; None if it still has to wait."""
        member = self._members.get(parked.watch.agent)
        if member is None or member.action is None:
            return Gone()
        if parked.watch.seen != member.revision:
            return View(member.revision, member.action)
        return Accepted() if parked.due <= now else None


def _reply(answer: Answer) -> Reply:
    return Reply("ok", values=(pack(answer),))
