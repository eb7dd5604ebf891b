"""A host's membership in a job: its messages to the state, its lease, and its deadline.

**Deadlines.** A lease is renewed every second, and lasts as long as a host may be silent
(`silence`, or `--rdzv-conf lease=S`): a launcher that is busy or stopped for a while, or whose
host is paused, loses nothing. An agent's deadline is when its last renewal that was acknowledged
was *sent*, plus the lease; at that time its ranks die, by its own hand or its reaper's. It is given
up when the last renewal was *received*, plus the lease and a margin. So the ranks of a host that
was cut off are dead before the others continue. The clock is CLOCK_BOOTTIME, which counts while a
host sleeps.

The job's state is lost with the coordinator's launcher. If the coordinator's host refuses
connections at its port, the launcher has ended, and a member does not wait for its deadline.

Past its deadline an agent looks for the others for a while, and joins as another member.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from dure.errors import StoreError, StoreLost
from dure.launch.agent.control import open_control
from dure.launch.agent.events import Action, Event, Idle, Joined, Settings
from dure.launch.agent.messages import (
    Accepted,
    Answer,
    Control,
    Gone,
    Heartbeat,
    LeaveRequest,
    View,
    WatchRequest,
)

__all__ = ["HostMember", "HostMembership", "LastWill", "boottime", "say_dead"]

_RENEW_S = 1.0
"""How often a lease is renewed; more often if it is shorter than four times that."""

_WATCH_S = 60.0
"""How long a `WatchRequest` waits before it is asked again."""

_AGAIN_S = 0.2
_GIVEN_UP = "the others have given this host up"


def boottime() -> float:
    """Return the time of the clock that leases are counted by."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HostMembership:
    """What a member knows, and what it sends next; no clock, no threads, no input and output.

    Args:
        joined: The host.
        nonce: Known to this member alone.
        settings: Of the job.
        sent: When its request to join was sent.

    Attributes:
        deadline: When its ranks must be dead, unless it is renewed.
        view: Its current action.
    """

    def __init__(self, joined: Joined, nonce: bytes, settings: Settings, sent: float) -> None:
        self.joined, self.agent, self.settings = joined, joined.agent, settings
        self.nonce = nonce
        self.deadline = sent + settings.lease_s
        self.view = View(0, Idle())
        self._ended = ""
        self._events: list[Event] = []  # that are not acknowledged yet
        self._renew_at = sent

    def gone(self, now: float) -> str:
        """Return why this host is no member any more; empty while it is one."""
        if not self._ended and now > self.deadline:
            return f"the coordinator was not reached for {self.settings.lease_s:g} s"
        return self._ended

    def end(self, why: str) -> None:
        """Be no member any more."""
        self._ended = self._ended or why

    def report(self, event: Event) -> None:
        """Send an event, as soon as possible."""
        self._events.append(event)

    @property
    def settled(self) -> bool:
        """Whether all events are acknowledged."""
        return not self._events

    def wake_at(self, now: float) -> float:
        """Return when `next_request` has one."""
        return now if self._events else self._renew_at

    def next_request(self, now: float) -> Heartbeat | None:
        """Return what to send now, if anything."""
        if now < self.wake_at(now):
            return None
        return Heartbeat(self.agent, self.nonce, tuple(self._events))

    def answered(self, request: Heartbeat, answer: Answer, sent: float, now: float) -> None:
        """Note an answer to a request that was sent at `sent`."""
        if not isinstance(answer, Accepted):
            self.end(_GIVEN_UP)
        elif why := self.gone(now):
            self.end(why)  # too late: the ranks may be dead already
        else:
            del self._events[: len(request.events)]
            self.deadline = sent + self.settings.lease_s
            self._renew_at = sent + min(_RENEW_S, self.settings.lease_s / 4)

    def next_watch(self) -> WatchRequest:
        """Return the request for the next view."""
        return WatchRequest(self.agent, self.nonce, self.view.revision)

    def watched(self, answer: Answer) -> bool:
        """Note an answer to a `WatchRequest`; return whether there is news."""
        if isinstance(answer, View):
            self.view = answer
            return True
        if isinstance(answer, Gone):
            self.end(_GIVEN_UP)
        return isinstance(answer, Gone)


class HostMember:
    """A membership, and the two threads that do all that may have to wait for the network.

    The *watcher* waits for the next view; the *sender* renews the lease and sends events.

    Args:
        control: The way to the job's state; this member's own from now on.
        membership: Its state.
        renewed: Called with each new deadline.

    Attributes:
        agent: Its name, which no other member had.
        settings: Of the job.
        fd: Readable when there may be news, until `action` is called.

    Threads:
        All methods belong to the agent's thread.
    """

    def __init__(
        self,
        control: Control,
        membership: HostMembership,
        renewed: Callable[[float], None] = lambda deadline: None,
    ) -> None:
        self.agent, self.settings = membership.agent, membership.settings
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._control, self._membership, self._renewed = control, membership, renewed
        self._changed = threading.Condition()  # guards the membership
        self._closing = False
        self._renewed(membership.deadline)
        self._threads = [
            threading.Thread(target=self._safely, args=(run,), name=name, daemon=True)
            for name, run in {"dure-watcher": self._watch, "dure-sender": self._send}.items()
        ]
        for thread in self._threads:
            thread.start()

    # --- the agent's thread ------------------------------------------------------------------

    @property
    def gone(self) -> str:
        """Why this agent is no member any more; empty while it is one."""
        return self._membership.gone(boottime())

    @property
    def expires_at(self) -> float:
        """The deadline, of `boottime`."""
        return self._membership.deadline

    def action(self) -> Action:
        """Return what the job wants now; `fd` is not readable until that is something else."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with self._changed:
            return self._membership.view.action

    def report(self, event: Event) -> None:
        """Send an event, as soon as possible."""
        with self._changed:
            self._membership.report(event)
            self._changed.notify_all()

    def leave(self, timeout_s: float = 2.0) -> None:
        """Send the events that are left, and give the lease back."""
        with self._changed:
            self._changed.wait_for(lambda: self._membership.settled or bool(self.gone), timeout_s)
            self._closing = True
            self._changed.notify_all()
        self._threads[1].join(timeout_s)
        if not self._threads[1].is_alive():
            with contextlib.suppress(StoreError):
                self._control.ask(LeaveRequest(self.agent, self._membership.nonce))

    def close(self) -> None:
        """End both threads, and close the connections."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._control.close()  # ends the calls of both
        for thread in self._threads:
            thread.join(5.0)
        if not any(thread.is_alive() for thread in self._threads):  # one would wake a stranger
            os.close(self.fd)

    # --- both threads ------------------------------------------------------------------------

    def _safely(self, run: Callable[[], None]) -> None:
        """Run a thread; an unexpected error ends the membership, and is not hidden."""
        try:
            run()
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
            if not self._closing:
                raise

    @property
    def _stopped(self) -> bool:
        return self._closing or bool(self.gone)

    def _end(self, why: str) -> None:
        with self._changed:
            self._membership.end(why)
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, _AGAIN_S)

    def _watch(self) -> None:
        while not self._stopped:
            with self._changed:
                request = self._membership.next_watch()
            try:
                answer = self._control.ask(request, _WATCH_S)
            except StoreError:
                self._rest()
                continue
            with self._changed:
                news = self._membership.watched(answer)
            if news:
                self._wake()

    def _send(self) -> None:
        while not self._stopped:
            with self._changed:
                now = boottime()
                request = self._membership.next_request(now)
                if request is None:
                    self._changed.wait(max(0.0, self._membership.wake_at(now) - now))
                    continue
            sent = boottime()
            try:
                answer = self._control.ask(request)
            except StoreError as error:
                if self.gone:
                    self._end(self.gone)
                elif isinstance(error, StoreLost) and self._control.has_ended():
                    self._end("the coordinator's launcher has ended")
                self._rest()
                continue
            with self._changed:
                self._membership.answered(request, answer, sent, boottime())
                self._changed.notify_all()
            self._renewed(self._membership.deadline)
            if self.gone:
                self._wake()


# --- for the reaper -------------------------------------------------------------------------------


class LastWill(msgspec.Struct, frozen=True):
    """What the reaper needs to report that an agent has died; see `open_control`."""

    endpoint: str
    secret: bytes
    agent: str
    nonce: bytes


def say_dead() -> None:
    """Report that an agent's ranks are dead, and give its lease back: the reaper's last act.

    Standard input has what the launcher gave the reaper.
    """
    will = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LastWill)
    control = open_control(will.endpoint, will.secret, 2.0)
    control.ask(LeaveRequest(will.agent, will.nonce, "its launcher was killed"))
