"""Watching other hosts: how a lost host, link or rank becomes one error everywhere.

Each leader holds a *line* to every other leader (lines.py). A thread of the leader sends a *beat*
down each line every second, watches the processes of its own host (pidfd), and looks whether a rank
of its host broke the group.

* A line that breaks: the other leader's process, or its whole host, ended. The kernel says so at
  once, where it still can.
* A line that is silent for three seconds: the host is gone, or the link is cut.
* A rank of this host died, or broke the group: the verdict goes down all lines.
* A leader that leaves says how many collectives it has ended: who is in one more than that, or
  begins it, waits in vain.

A leader that died said nothing of what it had ended. Its last messages may have come all the same:
so an operation that has begun has half a second to end.

Beats also carry how many collectives the leader has begun, and how many its host has; so who runs
out of time knows which ranks did not come.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Protocol

import zmq

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.fate import Verdict
from dure.comm.backends.hybrid.lines import BEAT_S, SILENCE_S, Line, Word, open_line
from dure.comm.backends.hybrid.links import Links
from dure.errors import RendezvousTimeout
from dure.store.address import outward_address
from dure.store.identity import myself
from dure.store.monitor import read_event

__all__ = ["SILENCE_S", "Watch"]

_LOOK_MS = 50
_ANSWER_S = 0.5
_PAUSE_S = 0.05
_END_S = 0.5


class _Progress(Protocol):
    """How far this host's operations are."""

    begun: int

    @property
    def opened(self) -> int: ...


class Watch:
    """A leader's watch over the other hosts, and over its own. Threads: any.

    Args:
        links: The group's parts.
        options: What the group is.
    """

    def __init__(self, links: Links, options: BackendOptions) -> None:
        self._links, self._options = links, options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lines: list[Line] = []
        self._wake, self._wakened = os.pipe()[::-1]
        os.set_blocking(self._wake, False)
        self._pids: dict[int, int] = {}
        self._progress: _Progress | None = None
        self._told = False
        self._asking = 0
        self._leaving = -1
        self._answered = threading.Condition()
        self._thread: threading.Thread | None = None

    # ---- connecting ------------------------------------------------------------------------------

    @classmethod
    def connect(cls, links: Links, options: BackendOptions) -> Watch:
        """Open the lines to all other leaders; every leader calls.

        Raises:
            RendezvousTimeout: A leader cannot be reached.
        """
        watch = cls(links, options)
        try:
            watch._connect()
        except BaseException:
            watch._release()
            raise
        return watch

    def _connect(self) -> None:
        links = self._links
        here, address = links.here, outward_address(self._options.store)
        for host in range(links.num_hosts):
            if host != here:
                self._lines.append(open_line(self._context, (here, host), address, self._options))
        deadline = time.monotonic() + self._options.timeout.total_seconds()
        while not all(line.greeted for line in self._lines):
            for line in self._lines:
                self._say(line, Word())
                if line.socket.poll(_LOOK_MS):
                    self._hear(line)
            if time.monotonic() > deadline:
                silent = [line.host for line in self._lines if not line.greeted]
                raise RendezvousTimeout(
                    "not all hosts can be reached",
                    missing=tuple(links.hosts.ranks[h][0] for h in silent),
                    group=self._options.name,
                    rank=self._options.rank,
                    seen=", ".join(map(links.hosts.describe, silent)),
                    fix="Check that the hosts can reach each other's ports.",
                )
        for line in self._lines:
            line.close_door()
        self._tell(Word())  # what was said before the other was there is lost

    def start(self, progress: _Progress) -> None:
        """Begin to watch."""
        self._progress = progress
        mine = self._links.hosts.mine
        for place, rank in enumerate(mine):
            if rank != self._links.hosts.rank:
                with contextlib.suppress(OSError):
                    self._pids[os.pidfd_open(self._links.local.pid_of(place))] = place
        for line in self._lines:
            line.heard = time.monotonic()
        self._links.fate.listeners.append(self._prod)
        self._thread = threading.Thread(target=self._serve, name="dure-watch", daemon=True)
        self._thread.start()

    def _prod(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b"x")

    # ---- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        for line in self._lines:
            poller.register(line.socket, zmq.POLLIN)
            poller.register(line.monitor, zmq.POLLIN)
        for pidfd in self._pids:
            poller.register(pidfd, zmq.POLLIN)
        next_beat = 0.0
        while self._leaving < 0:
            ready = dict(poller.poll(_LOOK_MS))
            if self._wakened in ready:
                os.read(self._wakened, 64)
            for pidfd in [fd for fd in self._pids if fd in ready]:
                poller.unregister(pidfd)
                self._bury(pidfd)
            for line in self._lines:
                if line.socket in ready:
                    self._hear(line)
                if line.monitor in ready and not line.over:
                    self._broke(line)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._tell(Word())
            self._examine(now)
        self._tell(Word(left=self._leaving))

    def _examine(self, now: float) -> None:
        """Look for silence, for leaders that left, and for what to tell."""
        fate = self._links.fate
        for line in self._lines:
            if not line.over and now - line.heard > SILENCE_S:
                line.fell_silent = True
                self._lose(line, f"nothing was heard from it for {SILENCE_S:g} s", 0)
            if 0 <= line.left < self._begun:
                rank = self._links.hosts.ranks[line.host][0]
                fate.settle(
                    Verdict(
                        kind="PeerLost",
                        what=f"rank {rank} left the group",
                        peer=rank,
                        host=self._links.hosts.names[line.host],
                        fix="Make a new group of the ranks that are left.",
                        after=line.left,
                    )
                )
        verdict = fate.look()
        if verdict is not None and not self._told:
            self._told = True
            self._tell(Word(verdict=verdict))
        if self._asking:
            self._asking, number = 0, self._asking
            self._tell(Word(asked=number))

    @property
    def _begun(self) -> int:
        return 0 if self._progress is None else self._progress.begun

    def _tell(self, word: Word) -> None:
        for line in self._lines:
            if not line.over:
                self._say(line, word)

    def _say(self, line: Line, word: Word) -> None:
        word.begun = self._begun
        word.opened = 0 if self._progress is None else self._progress.opened
        line.say(word)

    def _hear(self, line: Line) -> None:
        """Read all that came down a line."""
        for word in line.words():
            line.greeted, line.heard = True, time.monotonic()
            with self._answered:
                line.begun, line.opened = word.begun, word.opened
                self._answered.notify_all()
            if word.asked:
                self._say(line, Word())
                progress = self._progress
                if progress is not None and progress.begun >= word.asked > progress.opened:
                    self._links.local.hurry()  # the group is broken; only we can tell by whom
            if word.verdict is not None:
                self._links.fate.settle(word.verdict)
            if word.left >= 0:
                line.left, line.over, line.lost = word.left, True, time.monotonic()

    def _broke(self, line: Line) -> None:
        """A line broke: see whether the other leader had said goodbye."""
        with contextlib.suppress(zmq.Again):
            read_event(line.monitor, zmq.NOBLOCK)
        self._hear(line)
        if not line.over:
            # One that was silent was closed by our own side.
            line.fell_silent = time.monotonic() - line.heard >= SILENCE_S
            self._lose(line, "the connection to it broke", self._begun)

    def _lose(self, line: Line, how: str, after: int) -> None:
        line.over, line.lost = True, time.monotonic()
        hosts, host = self._links.hosts, line.host
        self._links.fate.settle(
            Verdict(
                kind="PeerLost",
                what=f"{hosts.describe(host)} is lost",
                peer=hosts.ranks[host][0],
                host=hosts.names[host],
                seen=f"{how}, as rank {hosts.rank} noticed",
                fix="See the output of its ranks, and whether the network is whole; "
                "then make a new group of the ranks that are left.",
                after=after,
            ),
            patience_s=_END_S,
        )

    def _bury(self, pidfd: int) -> None:
        """A process of this host ended: unless its rank had left, the group is broken."""
        place = self._pids.pop(pidfd)
        os.close(pidfd)
        links = self._links
        if links.local.has_left(place) or links.fate.look() is not None:
            return
        rank, me = links.hosts.mine[place], myself()
        pid = links.local.pid_of(place)
        links.fate.settle(
            Verdict(
                kind="PeerLost",
                what=f"the process of rank {rank} ended",
                peer=rank,
                pid=pid,
                host=me.host,
                seen=f"pid {pid}, on {me.host}",
                fix="See that rank's own output; then make a new group of the ranks that are left.",
                after=links.fate.tally.of(place),
            )
        )

    # ---- questions and the end -------------------------------------------------------------------

    def absent(self, number: int) -> tuple[int, ...]:
        """Return the ranks of other hosts that have not come to operation `number`.

        A host that is in it, but not with all its ranks, finds out itself who is missing; there is
        a verdict then.
        """
        until = time.monotonic() + _ANSWER_S
        while True:
            late = [line for line in self._lines if line.opened < number]
            if not late or time.monotonic() > until or self._links.fate.look() is not None:
                break
            with self._answered:
                self._asking = number
                self._prod()
                self._answered.wait(_PAUSE_S)
        out: list[int] = []
        for line in late:
            ranks = self._links.hosts.ranks[line.host]
            out.extend(ranks[1:] if line.begun >= number else ranks[:1])
        return tuple(out)

    def lost_for_s(self, rank: int) -> float:
        """Return for how long the leader of a rank's host has been lost; 0 while it is not."""
        host, _ = self._links.hosts.place_of(rank)
        since = [line.lost for line in self._lines if line.host == host and line.lost is not None]
        return max(time.monotonic() - since[0], 1e-9) if since else 0.0

    def fell_silent(self, rank: int) -> bool:
        """Tell whether a rank's host was lost and may live: the link to it may be cut."""
        host, _ = self._links.hosts.place_of(rank)
        return any(line.host == host and line.fell_silent for line in self._lines)

    def stop(self, ended: int) -> None:
        """Say goodbye, after `ended` collectives."""
        self._leaving = ended
        self._prod()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        self._release()

    def _release(self) -> None:
        for line in self._lines:
            line.close()
        self._context.term()
        for fd in (self._wake, self._wakened, *self._pids):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pids = {}
