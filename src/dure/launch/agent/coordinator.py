"""The coordinator: holds the state of a job on several hosts, and answers its agents.

It runs in the launcher at the endpoint, in the thread of the control server (`StoreServer`), and
does no input or output itself: requests in, answers out. Agents send events, and the coordinator
applies them in the order in which they arrive. An agent's `Watch` is answered when its own action
changes, so an event costs messages to those agents only that have something else to do because of
it.

**Leases.** A member's lease ends `lease + margin` after its last renewal was *received*. Its own
deadline is when that renewal was *sent*, plus the lease, so its ranks are dead before it is given
up here. The server's clock stands still while this launcher is paused (`ListeningClock`).

**Connections.** A launcher that dies closes its connections. A member that has not opened them
again after `_MISSING_S` is `Missing`: the round is stopped, and the next one starts when the member
is back, or its ranks are known to have ended, or its lease is over.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import msgspec

from dure.errors import StoreError
from dure.launch.agent.events import Action, Event, Expired, Lost, Missing, Refused
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Gone,
    Join,
    Leave,
    Message,
    NoJob,
    Renew,
    Tell,
    View,
    Watch,
    author,
    pack,
    read_joining,
    read_message,
    why_other_build,
    why_other_flags,
)
from dure.launch.agent.state import JobState, Phase
from dure.store.board import Answer as ClientAnswer
from dure.store.board import Board
from dure.store.wire import Reply, Request

__all__ = ["Coordinator"]

_MISSING_S = 2.0
"""How long a broken connection may take to be opened again before the round is stopped: longer than
the time between two renewals, each of which opens it."""


@dataclass(slots=True)
class _Member:
    """One agent.

    Attributes:
        nonce: Known to it alone.
        ends: When its lease ends.
        client: The connection through which it was last renewed.
        absent_since: When that connection broke; None: it has not, or was reported.
        action: Its action as of `revision`.
        revision: Of the action.
    """

    nonce: bytes
    ends: float
    client: bytes
    absent_since: float | None = None
    action: Action | None = None
    revision: int = 0


@dataclass(frozen=True, slots=True)
class _Parked:
    """A `Watch` that waits, until `due`."""

    watch: Watch
    due: float


class Coordinator(Board):
    """The state of a job and the leases of its members; requests in, answers out.

    Args:
        state: Of a job that begins.
        name: What tells this server from others at the same address.

    Attributes:
        is_left: Set while no agent is a member.
        own_agent: The name under which this launcher joins. It is told how the job ended even if
            that was before it could join: others may come first, and one of them end the job.

    Threads: the server's alone, but for `is_left` and `own_agent`.
    """

    def __init__(self, state: JobState, name: bytes = b"") -> None:
        super().__init__(name)
        self.state = state
        self.is_left = threading.Event()
        self.is_left.set()
        self.own_agent = ""
        self._members: dict[str, _Member] = {}
        self._former: set[str] = set()  # names of those who were members: none is used again
        self._broken: set[bytes] = set()  # connections, since the last `expire`
        self._affected: set[str] = set()  # members whose action may be another one
        self._watches: dict[bytes, _Parked] = {}  # by connection

    # --- as a board of the server --------------------------------------------------------------

    def handle(self, client: bytes, request: Request, now: float) -> list[ClientAnswer]:
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
        self._broken.add(client)

    def expire(self, now: float) -> list[ClientAnswer]:
        """Give up members whose leases have ended; return the answers that are due."""
        self._note_broken_connections(now)
        for agent, member in list(self._members.items()):
            if member.ends <= now:
                silent_s = self.state.settings.lease_s + self.state.settings.margin_s
                self._give_up(agent, f"nothing was heard of it for {silent_s:g} s")
            elif member.absent_since is not None and now >= member.absent_since + _MISSING_S:
                member.absent_since = None
                if self.state.plan is not None:
                    self._apply(Missing(agent, self.state.plan.number))
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
        for member in self._members.values():
            if member.absent_since is not None:
                dues.append(member.absent_since + _MISSING_S)
        return min(dues, default=None)

    # --- requests ------------------------------------------------------------------------------

    def answer(
        self, client: bytes, message: Message, timeout_s: float, now: float
    ) -> Answer | None:
        """Carry out a request; return the answer, or None if `expire` will give it.

        Args:
            client: The connection.
            message: The request.
            timeout_s: How long a `Watch` waits.
            now: The time.
        """
        if isinstance(message, Join):
            return self._join(client, message, now)
        member = self._members.get(message.agent)
        if member is None or member.nonce != message.nonce:
            return Gone()
        match message:
            case Tell():
                for event in message.events:
                    self._apply(event)
            case Watch():
                self._watches[client] = _Parked(message, now + timeout_s)
                return None
            case Renew():
                self._extend_lease(client, member, now)
            case Leave():
                self._give_up(message.agent, message.why)
        return Accepted(self.state.missing)

    def _join(self, client: bytes, message: Join, now: float) -> Answer:
        mine = author()
        try:
            readable = message.author.build == mine.build
            joining = read_joining(message.body) if readable else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            joining = None
        if joining is None:
            refusal = why_other_build(mine, message.author)
            if self.state.waits_for_first:  # for this host, which will not come
                self._apply(Refused(refusal.seen))
            return refusal
        agent, former = joining.joined.agent, joining.former
        if self.state.phase is Phase.OVER and not former and agent != self.own_agent:
            return NoJob()
        if agent not in self._members:
            if agent in self._former:  # an old request, which was late
                return Gone()
            refusal = why_other_flags(joining, self.state)
            if refusal is not None:
                return refusal
            if former in self._members:
                self._give_up(former, "it was cut off, and has come back")
            self._members[agent] = _Member(joining.nonce, now, client)
            self.is_left.clear()
            self._apply(joining.joined)
        self._extend_lease(client, self._members[agent], now)
        return Admitted(self.state.settings)

    def _extend_lease(self, client: bytes, member: _Member, now: float) -> None:
        settings = self.state.settings
        member.ends, member.client = now + settings.lease_s + settings.margin_s, client
        member.absent_since = None

    def _give_up(self, agent: str, why: str) -> None:
        del self._members[agent]
        self._former.add(agent)
        self._apply(Lost(agent, why))
        if not self._members:
            self.is_left.set()

    def _note_broken_connections(self, now: float) -> None:
        for client in self._broken:
            self._watches.pop(client, None)
        for member in self._members.values() if self._broken else ():
            if member.client in self._broken and member.absent_since is None:
                member.absent_since = now
        self._broken.clear()

    def _apply(self, event: Event) -> None:
        """Change the state, and note whose action may be another one now."""
        before = self.state.outline
        self.state.apply(event)
        if self.state.outline != before:
            self._affected |= self._members.keys()
        elif not isinstance(event, Expired | Refused):
            self._affected.add(event.agent)

    # --- views -----------------------------------------------------------------------------------

    def _update(self, agent: str, member: _Member) -> None:
        action = self.state.action(agent)
        if action != member.action:
            member.action = action
            member.revision += 1

    def _watched(self, parked: _Parked, now: float) -> Answer | None:
        """Return the answer to a `Watch`; None if it still has to wait."""
        watch, state = parked.watch, self.state
        member = self._members.get(watch.agent)
        if member is None or member.action is None:
            return Gone()
        new_notes = max(0, state.num_notes - watch.heard)
        if watch.seen == member.revision and not new_notes:
            return Accepted(state.missing) if parked.due <= now else None
        notes = tuple(state.notes[-new_notes:]) if new_notes else ()
        return View(member.revision, member.action, notes, state.num_notes)


def _reply(answer: Answer) -> Reply:
    return Reply("ok", values=(pack(answer),))
