"""An agent's connection to the others: it follows the log, writes to it, and watches who lives.

Two threads do all that may have to wait for the network, so that the agent's own loop never does.

The *follower* waits for the next entry of the log (`journal`), wakes the agent, and once a second
sets its *beat*. The one whose server holds the store, the *leader*, watches the others besides: a
connection to each one's standby server breaks within a millisecond of its process's death, and a
host that vanishes without a word stops beating. So does the leader find the lost; the others find
the loss of the leader, for their own connection breaks. They then go down the ladder
(`dure.store.ladder`): the next owner puts its copy of the log into its own store, and all read it
again from the beginning. Every entry has its author's name and number, so an agent sees which of
its own are missing there, and writes them again. Two of the log's lines therefore never differ for
long, and a machine is only ever fed from one of them.

The *writer* puts the agent's own events at the end of the log, one after the other.

The log's beginning becomes its past (`chronicle`): on all agents, and in the store by the leader.
An agent forgets its own events when they have become past, hundreds of entries behind the end.
Should the next store's owner lack even those, the agent cannot give them back: it counts as lost
there, and joins anew.

Where the network is cut, each part has a leader. When it is whole again, the owner of the lower
rung finds the upper one alive. If its own part has the quorum (`judge`), it leaves a note there,
and the upper part follows it; otherwise it gives way itself. What the part that gives way has told
since stays behind: it belongs to a job that is not. Who has just taken over a store does not know
yet who is in its part: that is so when each of the others was heard there, or has been given up.

Nobody leads in any other sense: to be the leader is to hold the store and to notice deaths.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from dure.errors import DureError, StoreError, StoreLost, StoreTimeout
from dure.launch.agent.chronicle import Chronicle, pack_entry
from dure.launch.agent.events import Event, Joined, Lost
from dure.launch.agent.journal import append, bury, entry_key, fetch, is_behind, seed
from dure.launch.agent.machine import Machine
from dure.launch.agent.watch import Watch, beat_key, refuses
from dure.store.base import Store
from dure.store.ladder import Ladder

__all__ = ["Pulse"]

_LOOKS = 4
"""How many beats a store that was given up may live again until the part that left it gives way:
time for an owner who was stopped to find out, and to follow the others."""


class Pulse:
    """The connection of one agent.

    Args:
        ladder: Where the store is; the follower's own from now on.
        watch: How the others are watched; the follower's own from now on.
        carried: Keys that a new store must hold besides the log.
        standby: Makes another server, and returns its address: for an agent whose own server
            held the store of a part of the job that has given way.
        make: Makes the machine of a job to which nothing has happened.

    Threads: `tell`, `take` and the properties belong to the agent's thread.
    """

    def __init__(
        self,
        ladder: Ladder,
        watch: Watch,
        carried: tuple[str, ...],
        standby: Callable[[], str],
        make: Callable[[], Machine],
    ) -> None:
        self.me = ""
        self.cut = ""  # why nobody can be reached any more
        self._ladder, self._watch, self._heart = ladder, watch, watch.heart
        self._standby, self._make = standby, make
        self._carried = {name: ladder.current.get(name) for name in carried}
        self._lock = threading.Condition()
        self._chronicle = Chronicle(make)
        self._store: Store = ladder.current  # where that is from
        self._line = 0  # how often the log was read from the beginning
        self._given = (0, 0)  # the line and the end that `take` has returned
        self._judged: tuple[tuple[int, int], bool] = (0, 0), False
        self._author = uuid.uuid4().hex
        self._mine: dict[int, Event] = {}  # by our number; not those that are past
        self._forgotten = 0  # the last of those
        self._told = self._written = 0  # the last of ours, and the last in this line's store
        self._heard_at = time.monotonic()
        self._closing = False
        self._revived = 0  # how many looks running a rung above has answered
        self._broken = ""  # the rung whose end its kernel has told
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._waker.setblocking(False)
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
            return self._chronicle.heard(self._author) == self._told

    def tell(self, event: Event) -> None:
        """Write an event into the log, as soon as possible."""
        with self._lock:
            self._told += 1
            self._mine[self._told] = event
            self._lock.notify_all()

    def take(self) -> tuple[Machine | None, list[Event]]:
        """Return what is new in the log; if that starts anew, the machine to feed with it."""
        with contextlib.suppress(BlockingIOError):
            while self._wakened.recv(4096):
                pass
        with self._lock:
            line, seen = self._given
            afresh = line != self._line or seen < self._chronicle.start
            self._given = self._line, self._chronicle.end
            if afresh:
                return self._chronicle.past(), self._chronicle.events(self._chronicle.start)
            return None, self._chronicle.events(seen)

    def judge(self, prevails: bool) -> None:
        """Say whether this part of the job goes on, by what was taken, though others may live."""
        with self._lock:
            self._judged = self._given, prevails

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is not sent yet, and end both threads."""
        with self._lock:
            self._lock.wait_for(lambda: self._written >= self._told or bool(self.cut), timeout_s)
            self._closing = True
            self._lock.notify_all()
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
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._stopped or self._written < self._told)
                if self._stopped:
                    return
                line, store, end = self._line, self._store, self._chronicle.end
                number = self._written + 1
                entry = pack_entry(self._mine[number], self._author, number)
            try:
                append(store, end, entry)
            except DureError:
                with self._lock:  # the follower finds another store, or the same one
                    self._lock.wait_for(lambda at=line: self._stopped or self._line != at, 0.5)
                continue
            with self._lock:
                if line == self._line:
                    self._written = number
                    self._lock.notify_all()

    @property
    def _stopped(self) -> bool:
        return self._closing or bool(self.cut)

    # --- the follower ------------------------------------------------------------------------

    def _follow(self) -> None:
        beat_at, beats, last, since = 0.0, 0, time.monotonic(), float("inf")
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
                self._heard_at, since = time.monotonic(), float("inf")
                if self._ladder.leading:
                    self._look_around()
            except (StoreLost, StoreTimeout) as error:
                self._broken = self._ladder.address if isinstance(error, StoreLost) else ""
                self._move()
            except StoreError as error:  # closed by the agent; or no store would do better
                since = min(since, time.monotonic())
                self._bear(error, since)

    def _bear(self, error: StoreError, since: float) -> None:
        """Wait a moment after an error that another store would not mend, or give up."""
        with self._lock:
            self._lock.wait_for(lambda: self._closing, self._heart.look_s)
        if time.monotonic() > since + 2 * self._heart.lost_s:
            self.cut = str(error)
            self._notify()

    def _read_on(self) -> None:
        """Wait a moment for the next entry, and read all that are there."""
        if self._store is not self._ladder.current:
            self._read_afresh()
            return
        store, end, start = self._store, self._chronicle.end, time.monotonic()
        patience_s = self._heart.look_s if self._ladder.leading else self._heart.beat_s
        try:
            store.wait([entry_key(end)], timedelta(seconds=patience_s))
        except StoreTimeout:
            if time.monotonic() - start > patience_s + 0.9:  # not even a "no": the server hangs
                raise
            if not is_behind(store, end):
                return
        self._take_in(store, *fetch(store, end))
        self._notify()

    def _take_in(
        self, store: Store, past: bytes | None, entries: list[bytes], *, anew: bool = False
    ) -> None:
        """Take what was read: the next entries; `anew`, or with a past, the log from there on."""
        anew = anew or past is not None
        with self._lock:
            if anew:
                self._chronicle, self._store = Chronicle(self._make, past), store
                self._line += 1
            chronicle = self._chronicle
            joined = chronicle.past().present if anew else ()
            news = [event for entry in entries if (event := chronicle.add(entry)) is not None]
            if anew:
                self._written = chronicle.heard(self._author)
                if self._written < self._forgotten:
                    self._begin_anew()
            folded = chronicle.fold()
            while folded and chronicle.fold():
                pass
            self._forget(chronicle.buried(self._author))
            self._lock.notify_all()
        for event in (*joined, *news):
            self._watch.note(event, self.me)
        if folded and self._ladder.leading:
            bury(store, chronicle)

    def _forget(self, buried: int) -> None:
        for number in range(self._forgotten + 1, buried + 1):
            del self._mine[number]
        self._forgotten = max(self._forgotten, buried)

    def _begin_anew(self) -> None:
        """Go on as another author: the log lacks entries of ours that we have forgotten."""
        left = [event for number, event in self._mine.items() if number > self._written]
        self._author, self._mine = uuid.uuid4().hex, {}
        self._forgotten = self._told = self._written = 0
        for event in (Lost(self.me, "the job's new store knows too little of it"), *left):
            self.tell(event)

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
        """Follow the others to a rung that is not the next one, with nothing but who we are."""
        self._ladder.follow(address, self._standby(), self._heart.lost_s)
        with self._lock:
            mine = [e for e in self._mine.values() if isinstance(e, Joined) and e.agent == self.me]
            self._author, self._mine = uuid.uuid4().hex, {}
            self._forgotten = self._told = self._written = 0
            self._line += 1  # the writer's last entry was the other author's
            for event in mine:
                self.tell(event)
        self._read_afresh()

    def _seed(self, store: Store) -> None:
        """Put into this agent's own store what it knows."""
        for name, value in self._carried.items():
            store.set(name, value)
        seed(store, self._chronicle)

    def _read_afresh(self) -> None:
        """Read the log of a store that was found anew, and write again what is missing of ours."""
        store = self._ladder.current
        self._watch.begin()
        self._take_in(store, *fetch(store, 0), anew=True)
        if self._ladder.leading:
            above = self._ladder.addresses[: self._ladder.addresses.index(self._ladder.address)]
            for agent, rung in self._watch.held(above):
                ended = rung == self._broken or refuses(rung, self._heart.knock_s)
                why = "is gone" if ended else "does not answer"
                why = f"it held the job's store, which {why}"
                self.tell(Lost(agent, why, silent=not ended))
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
        prevails = self._prevails()
        if not same or prevails:
            self._ladder.redirect(address)
        elif prevails is None:
            pass
        elif self._revived >= _LOOKS:  # its owner was not merely stopped for a while
            self._go_to(address)

    def _prevails(self) -> bool | None:
        """Tell whether our part goes on, though others may live; None while that is not known.

        It is when each agent that the log has at hand was heard in this store, or is lost; when
        that is in the log; and when the machine has been fed with it.
        """
        if not self._watch.sure:
            return None
        with self._lock:
            fed, prevails = self._judged
            told = self._chronicle.heard(self._author) == self._told
            return prevails if told and fed == (self._line, self._chronicle.end) else None

    def _after_a_freeze(self) -> None:
        """Look where the others are after this process was stopped for a while."""
        self._watch.begin()
        if self._ladder.leading and (address := self._ladder.successor()) is not None:
            self._go_to(address)

    def _look_around(self) -> None:
        for event in self._watch.lost(self._ladder.current):
            self.tell(event)
