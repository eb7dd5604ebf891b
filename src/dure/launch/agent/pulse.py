"""An agent's connection to the others: it follows the log, writes to it, and watches who lives.

Two threads do all that may have to wait for the network, so that the agent's own loop never does.

The *follower* waits for the next entry of the log (`dure/agents/log/N` in the job's store), wakes
the agent, and once a second sets its *beat*. The one whose server holds the store, the *leader*,
watches the others besides: a connection to each one's standby server breaks within a millisecond of
its process's death, and a host that vanishes without a word stops beating. So does the leader find
the lost; the others find the loss of the leader, for their own connection breaks. They then go down
the ladder (`dure.store.ladder`): the next owner puts its copy of the log into its own store, and
all read it again from the beginning. Every entry has a name of its own, so an agent sees which of
its own are missing there, and writes them again. Two of the log's lines therefore never differ for
long, and a machine is only ever fed from one of them.

The *writer* puts the agent's own events at the end of the log: it offers an entry for number N by
compare-and-set, and where somebody else was first, for the next number.

Nobody leads in any other sense: to be the leader is to hold the store and to notice deaths.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import msgspec

from dure.errors import DureError, StoreError, StoreLost, StoreTimeout
from dure.launch.agent.events import Event, Lost, pack_event, read_event
from dure.launch.agent.watch import Heartbeat, Watch, beat_key
from dure.store.base import Store
from dure.store.key import JobKey
from dure.store.ladder import Ladder

__all__ = ["Pulse", "write_once"]

_LOG = "dure/agents/log"
_LOOKS = 4
"""How many beats a store that was given up may live again until the part that left it gives way:
time for an owner who was stopped to find out, and to follow the others."""


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """A line of the log: its own name, and the event."""

    name: str
    event: bytes


_pack = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(_Entry).decode


def write_once(store: Store, event: Event) -> None:
    """Write an event into the log for one who does not follow it."""
    number, entry = 0, _pack(_Entry(uuid.uuid4().hex, pack_event(event)))
    while store.compare_set(f"{_LOG}/{number}", "", entry) != entry:
        number += 1


class Pulse:
    """The connection of one agent.

    Args:
        ladder: Where the store is; the follower's own from now on.
        key: The job key.
        heartbeat: How to watch.
        carried: Keys that a new store must hold besides the log.
        standby: Makes another server, and returns its address: for an agent whose own server
            held the store of a part of the job that has given way.

    Threads: `tell`, `take` and the properties belong to the agent's thread.
    """

    def __init__(
        self,
        ladder: Ladder,
        key: JobKey,
        heartbeat: Heartbeat,
        carried: tuple[str, ...],
        standby: Callable[[], str],
    ) -> None:
        self.me = ""
        self.cut = ""  # why nobody can be reached any more
        self._ladder, self._key, self._heart = ladder, key, heartbeat
        self._standby = standby
        self._carried = {name: ladder.current.get(name) for name in carried}
        self._lock = threading.Condition()
        self._log: list[tuple[str, Event]] = []
        self._line = 0  # how often the log was read from the beginning
        self._given = (0, 0)  # the line and length that `take` has returned
        self._mine: dict[str, bytes] = {}
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._unsent = 0
        self._heard_at = time.monotonic()
        self._closing = False
        self._revived = 0  # how many looks running a rung above has answered
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._waker.setblocking(False)
        self._watch = Watch(key, heartbeat)
        self._threads = [
            threading.Thread(
                target=self._safely, args=(run,), name=f"dure-agent-{name}", daemon=True
            )
            for run, name in ((self._follow, "follower"), (self._write, "writer"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def fd(self) -> int:
        """Readable when there may be news."""
        return self._wakened.fileno()

    @property
    def store(self) -> str:
        """host:port of the store in use."""
        return self._ladder.address

    @property
    def leading(self) -> bool:
        """Whether this agent's own server holds the store."""
        return self._ladder.leading

    @property
    def fence_at(self) -> float:
        """When to end the workers, should nobody be reached until then."""
        return self._heard_at + self._heart.fence_s

    @property
    def settled(self) -> bool:
        """Whether all that was told stands in the log that was read."""
        with self._lock:
            return self._mine.keys() <= {name for name, _ in self._log}

    def tell(self, event: Event) -> None:
        """Write an event into the log, as soon as possible."""
        name = uuid.uuid4().hex
        with self._lock:
            self._mine[name] = _pack(_Entry(name, pack_event(event)))
            self._unsent += 1
        self._outbox.put(name)

    def take(self) -> tuple[bool, list[Event]]:
        """Return what is new in the log, and whether that is all of it, from the beginning."""
        with contextlib.suppress(BlockingIOError):
            while self._wakened.recv(4096):
                pass
        with self._lock:
            line, seen = self._given
            afresh = line != self._line
            new = [event for _, event in self._log[0 if afresh else seen :]]
            self._given = self._line, len(self._log)
            return afresh, new

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is not sent yet, and end both threads."""
        with self._lock:
            self._lock.wait_for(lambda: not self._unsent or bool(self.cut), timeout_s)
            self._closing = True
            self._lock.notify_all()
        self._outbox.put(None)
        self._ladder.current.close()  # wakes a thread that waits in it
        for thread in self._threads:
            thread.join(timeout_s + 2 * self._heart.lost_s)
        self._watch.close()
        self._ladder.close()
        self._waker.close()
        self._wakened.close()

    def _safely(self, run: Callable[[], None]) -> None:
        """Run a thread; an error that nobody foresaw ends the job here, not in silence."""
        try:
            run()
        except Exception as error:
            self.cut = f"{type(error).__name__}: {error}"
            self._notify()
            raise

    # --- the writer --------------------------------------------------------------------------

    def _write(self) -> None:
        while (name := self._outbox.get()) is not None:
            while not self._closing and not self.cut:
                line = self._line
                try:
                    self._append(name)
                    break
                except DureError:
                    with self._lock:  # the follower finds another store, or the same one
                        self._lock.wait_for(lambda at=line: self._closing or self._line != at, 0.5)
            with self._lock:
                self._unsent -= 1
                self._lock.notify_all()

    def _append(self, name: str) -> None:
        with self._lock:
            if any(name == known for known, _ in self._log):
                return
            number, entry = len(self._log), self._mine[name]
        while (there := self._ladder.current.compare_set(f"{_LOG}/{number}", "", entry)) != entry:
            assert there
            number += 1

    # --- the follower ------------------------------------------------------------------------

    def _follow(self) -> None:
        beat_at, beats, last = 0.0, 0, time.monotonic()
        while not self._closing and not self.cut:
            now = time.monotonic()
            frozen, last = now - last > self._heart.lost_s, now
            try:
                if frozen:
                    self._after_a_freeze()
                self._read_on()
                if now >= beat_at:
                    beats += 1
                    beat_at = now + self._heart.beat_s
                    self._ladder.current.set(beat_key(self.me), str(beats))
                    self._ladder.refresh()
                    self._look_up()
                self._heard_at = time.monotonic()
                if self._ladder.leading:
                    self._look_around()
            except (StoreLost, StoreTimeout):
                self._move()
            except StoreError:  # closed by the agent, or moved under our feet
                continue

    def _read_on(self) -> None:
        """Wait a moment for the next entry, and read all that are there."""
        store, start = self._ladder.current, time.monotonic()
        patience_s = self._heart.look_s if self._ladder.leading else self._heart.beat_s
        try:
            store.wait([f"{_LOG}/{len(self._log)}"], timedelta(seconds=patience_s))
        except StoreTimeout:
            if time.monotonic() - start > patience_s + 0.9:  # not even a "no": the server hangs
                raise
            return
        while store.check([key := f"{_LOG}/{len(self._log)}"]):
            self._add(store.get(key))
        self._notify()

    def _add(self, packed: bytes) -> None:
        entry = _read(packed)
        event = read_event(entry.event)
        with self._lock:
            self._log.append((entry.name, event))
        self._watch.note(event, self.me)

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"!")

    def _move(self) -> None:
        """Go to the next store, or the same one, after the connection was lost."""
        limit_s = 2 * self._heart.lost_s
        deadline = time.monotonic() + limit_s
        while not self._closing:
            try:
                self._ladder.advance(limit_s, self._seed)
                self._read_afresh()
                return
            except DureError as error:
                if time.monotonic() > deadline:
                    self.cut = str(error)
                    self._notify()
                    return
            with self._lock:  # the store was lost again while it was read
                self._lock.wait_for(lambda: self._closing, self._heart.look_s)

    def _go_to(self, address: str) -> None:
        """Follow the others to a rung that is not the next one."""
        self._ladder.follow(address, self._standby(), self._heart.lost_s)
        self._read_afresh()

    def _seed(self, store: Store) -> None:
        """Put into this agent's own store what it knows."""
        for name, value in self._carried.items():
            store.set(name, value)
        for number, (name, event) in enumerate(self._log):
            store.set(f"{_LOG}/{number}", _pack(_Entry(name, pack_event(event))))

    def _read_afresh(self) -> None:
        """Read the log of a store that was found anew, and write again what is missing of ours."""
        store = self._ladder.current
        with self._lock:
            self._log = []
            self._line += 1
        self._watch.begin()
        while store.check([key := f"{_LOG}/{len(self._log)}"]):
            self._add(store.get(key))
        with self._lock:
            there = {name for name, _ in self._log}
            missing = [name for name in self._mine if name not in there]
            self._unsent += len(missing)
            self._lock.notify_all()
        for name in missing:
            self._outbox.put(name)
        if self._ladder.leading:
            above = self._ladder.addresses[: self._ladder.addresses.index(self._ladder.address)]
            for agent in self._watch.held(above):
                self.tell(Lost(agent, "it held the job's store, which is gone"))
        self._notify()

    def _look_up(self) -> None:
        """Look at the rungs above ours: a part of a job that was split gives way to the other."""
        if not self._ladder.leading:
            return
        moved = self._ladder.moved()
        if moved is not None:
            self._go_to(moved)
            return
        found = self._ladder.revived()
        self._revived = 0 if found is None else self._revived + 1
        if found is None:
            return
        address, same = found
        if not same:
            self._ladder.redirect(address)
        elif self._revived >= _LOOKS:  # its owner was not merely stopped for a while
            self._go_to(address)

    def _after_a_freeze(self) -> None:
        """Look where the others are after this process was stopped for a while."""
        self._watch.begin()
        if self._ladder.leading and (address := self._ladder.successor()) is not None:
            self._go_to(address)

    def _look_around(self) -> None:
        for agent, why in self._watch.lost(self._ladder.current):
            self.tell(Lost(agent, why))
