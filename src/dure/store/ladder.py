"""The stores of a job in order, so that whoever loses one finds the same next one as all others.

The first *rung* is the store of the job's endpoint. Every further process that could hold the store
runs a server of its own, a *standby*, and writes its address at the end of the list of rungs, which
lies in the store that is in use. A rung is *open* once its owner has said so, under a name (its
`id`) that no other store has; a standby is up, but not open, and holds nothing.

          rung 0 (endpoint)      rung 1            rung 2
          open, id a31c…         standby           standby
             ✗ dies
                                 its owner finds    waits at rung 1
                                 rung 0 gone, puts  until it is open,
                                 in what it knows,  then goes on there
                                 and opens it

**One way for all.** Whoever loses the store walks the list from the top: a rung that nobody holds
any more is passed by, an open one is taken, a standby is waited at. Only a rung's own owner opens
it, and only after it has found every rung above gone. So the living agree on the highest rung that
lives, without a word between them. A member whose connection broke by chance finds its old rung
open, and stays.

**Splits.** Where a network falls apart, each part may find "the rungs above" gone. Three rules
contain that. A part with fewer hosts than the job's minimum ends (`launch/agent`); with a minimum
of more than half the hosts, no two parts go on. Who opened a rung goes on looking at those above
(`revived`): one that goes on answering under its old id was never dead, and the lower part gives
way to it. One that answers with a new id was started afresh, by an owner that knows nothing of the
rest: it is told where the job has gone (`redirect`), and who finds such a note follows it. An owner
that was stopped for a while finds the rung below open (`successor`), leaves such a note itself, and
follows the others.

**Fresh stores.** A newcomer that finds nobody at the endpoint, because the store there has just
died, opens one of its own. To those who are on their way down it looks open, but it knows nothing.
So the first to open a rung gives the job a name, which every further rung repeats; whoever has lost
a store passes by the rungs that have another one.

Cost: a walk passes a rung that refuses the connection in a few milliseconds, one whose host is
silent in `patience_s`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

from dure.errors import StoreError, StoreLost, StoreRefused, StoreTimeout
from dure.store.address import resolve
from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.store.key import JobKey
from dure.store.network import NetworkStore

__all__ = ["Ladder", "moved_to", "rungs_of"]

_RUNGS = "dure/ladder/rungs"
_OPEN = "dure/ladder/open"
_MOVED = "dure/ladder/moved"
_JOB = "dure/ladder/job"
_PATIENCE_S = 2.0
_LOOK = timedelta(seconds=0.1)
"""How long one look at a standby waits for it to open."""


def rungs_of(store: Store) -> tuple[str, ...]:
    """Return the addresses ("host:port") that are written in a store, from the top."""
    if not store.check([_RUNGS]):
        return ()
    return tuple(dict.fromkeys(store.get(_RUNGS).decode().split()))


def moved_to(store: Store) -> str | None:
    """Return where the job has gone ("host:port"), if a store holds such a note."""
    return store.get(_MOVED).decode() if store.check([_MOVED]) else None


class Ladder:
    """One process's place on the ladder: the store it uses, and where to go when that is lost.

    Args:
        addresses: The rungs that are known, "host:port", from the top; the first is enough.
        key: The job key; None talks in the clear.
        own: The address of this process's own standby, if it has one.
        timeout: How long operations of the stores wait.
        patience_s: How long a rung may be silent before it counts as gone; one that refuses the
            connection does so at once.
        door: Says where the endpoint's name leads by now ("host:port"), if it is a name: a host
            that was replaced may have got another address.

    Threads: one at a time; the store that `current` returns may be used by any.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: JobKey | None,
        *,
        own: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        patience_s: float = _PATIENCE_S,
        door: Callable[[], str | None] | None = None,
    ) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        self._endpoint = addresses[0]
        self._key, self._own, self._timeout = key, own, timeout
        self._patience_s, self._door = patience_s, door
        self._ids: dict[str, bytes] = {}  # of the stores that were used, by address
        self._job = b""  # what all rungs that know this job say
        self._store: NetworkStore | None = None
        self._address = ""
        self._silences: dict[str, float] = {}  # seconds spent at rungs that nobody holds
        self._looked = 0  # how many rungs above `revived` has looked at, if it has not seen all

    @property
    def addresses(self) -> tuple[str, ...]:
        """The rungs, from the top, as far as this process knows them."""
        return tuple(self._addresses)

    @property
    def address(self) -> str:
        """The rung in use, "host:port"."""
        return self._address

    @property
    def leading(self) -> bool:
        """Whether the rung in use is this process's own."""
        return self._address == self._own

    @property
    def current(self) -> NetworkStore:
        """The store in use.

        Raises:
            StoreError: `join` or `lead` was not called, or failed.
        """
        if self._store is None:
            raise StoreError("the job's store has not been found yet")
        return self._store

    def lead(self) -> NetworkStore:
        """Open this process's own rung, as the job's first."""
        assert self._own is not None
        return self._open_own(None)

    def join(self, timeout_s: float) -> NetworkStore:
        """Find the store in use, and learn the other rungs from it.

        Raises:
            StoreTimeout: No rung is open.
            StoreRefused: A rung has another key.
        """
        return self._walk(timeout_s, None)

    def stand_by(self) -> None:
        """Write this process's own rung at the end of the list, for all to find."""
        assert self._own is not None
        if self._own not in rungs_of(self.current):
            self.current.append(_RUNGS, f"{self._own}\n")
        self.refresh()

    def refresh(self) -> None:
        """Learn of rungs that have come since; call it now and then, while the store lives."""
        self._addresses = list(dict.fromkeys([*rungs_of(self.current), *self._addresses]))

    def advance(
        self, timeout_s: float = 10.0, seed: Callable[[Store], None] | None = None
    ) -> NetworkStore:
        """Find the store in use after `StoreLost`: the same one, if it still lives, or a lower one.

        Args:
            timeout_s: How long to look.
            seed: Puts into this process's own, empty store what the others will need, before it
                is opened; called only if this process is the next in order.

        Raises:
            StoreLost: No rung lives, or none was opened in time.
        """
        try:
            return self._walk(timeout_s, seed)
        except StoreTimeout as error:
            raise StoreLost(
                "the job's store is lost, and no other takes its place",
                elapsed_s=timeout_s,
                seen=f"tried {', '.join(self._addresses)}",
                fix="Look at the errors of the processes that held them.",
            ) from error

    def revived(self) -> tuple[str, bool] | None:
        """Look whether a rung above lives again; a look ends at the first that is silent.

        The next one goes on behind that, so that many silent hosts hold nobody up.

        Returns:
            Its address, and whether it is the very store that was lost (a split) rather than one
            that was started afresh, or whose note is out of date; None if there is none.
        """
        start, above = time.monotonic(), self._above()
        for address in above[self._looked :]:
            found = self._is_open(address)
            if found is not None and found[1] != self._address:
                name, moved = found
                return address, moved is None and name == self._ids.get(address)
            self._looked += 1
            if self._looked < len(above) and time.monotonic() - start >= self._patience_s:
                return None  # the others are looked at next time
        self._looked = 0
        return None

    def _is_open(self, address: str) -> tuple[bytes, str | None] | None:
        """Return the id of the rung at `address` and where the job has gone; None if not open."""
        store = self._peek(address)
        if store is None:
            return None
        try:
            return (store.get(_OPEN), moved_to(store)) if store.check([_OPEN]) else None
        except StoreError:
            return None
        finally:
            store.close()

    def _above(self) -> list[str]:
        """Return the rungs above the one in use, and the endpoint: newcomers look there alone."""
        above = self._addresses[: self._addresses.index(self._address)]
        if self._endpoint not in (self._address, *above):
            above.append(self._endpoint)
        door = self._door() if above and self._door is not None else None
        return above if door is None or door in self._addresses else [*above, door]

    def successor(self) -> str | None:
        """Return a rung below that is open: the others went there while we were not looking."""
        below = self._addresses[self._addresses.index(self._address) + 1 :]
        return next((address for address in below if self._is_open(address) is not None), None)

    def redirect(self, address: str) -> None:
        """Leave a note in the store at `address`: the job has gone to the rung in use."""
        store = self._peek(address)
        if store is not None:
            with contextlib.suppress(StoreError):
                store.set(_MOVED, self._address)
            store.close()

    def moved(self) -> str | None:
        """Return where the job has gone, if the store in use holds such a note."""
        return moved_to(self.current)

    def follow(self, address: str, own: str, timeout_s: float) -> NetworkStore:
        """Go to the rung at `address`, of whom a note speaks, and stand by there.

        Args:
            address: Where the job has gone.
            own: A new standby of this process; its former rung holds the note, and stays as it is.
            timeout_s: How long to look.
        """
        if self.leading:
            with contextlib.suppress(StoreError):
                self.current.set(_MOVED, address)
        former, self._own, self._job = self._own, own, b""
        self._addresses = [address, *(a for a in self._addresses if a not in (address, former))]
        store = self._walk(timeout_s, None)
        self.stand_by()
        return store

    def close(self) -> None:
        """Say goodbye to the store in use."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _walk(self, timeout_s: float, seed: Callable[[Store], None] | None) -> NetworkStore:
        """Walk from the top, again and again, until an open rung is found.

        Members that came by different ways may disagree on the order, and wait for each other; so
        in the second half of the time they take the rungs in the order of their addresses. A rung
        that refuses a member may be crowded by strangers for a moment; if it still does after a
        quarter of the time, a stranger has taken its place, and it is gone. What is spent at silent
        rungs is added to the time, once for each: a rack that fails has many.
        """
        start = time.monotonic()
        self._silences.clear()
        pause_s = 0.005
        while True:
            gone: set[str] = set()
            now = time.monotonic()
            late = now > start + timeout_s / 2 and bool(self._ids)
            for address in sorted(self._addresses) if late else list(self._addresses):
                if address == self._own and self._ids:
                    return self._open_own(seed)  # all above are gone
                try:
                    store = self._visit(address)
                except StoreRefused:
                    if not self._ids:
                        raise
                    if now < start + timeout_s / 4:
                        break
                    store = None
                if store is None:
                    gone.add(address)
                    continue
                if self._take(address, store, gone):
                    return self.current
                if address not in gone:
                    break  # a standby, whose owner is on the way, or a note of another rung
            if time.monotonic() > start + timeout_s + sum(self._silences.values()):
                raise StoreTimeout(
                    "the job's store cannot be reached",
                    elapsed_s=timeout_s,
                    seen=f"no store is open at {', '.join(self._addresses)}",
                    fix="Check that the launcher on the endpoint's host runs, and that its port "
                    "can be reached from here.",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)

    def _peek(self, address: str) -> NetworkStore | None:
        """Return a store for `address`; None if nobody holds it, or a stranger has taken it."""
        try:
            return self._visit(address)
        except StoreRefused:
            return None

    def _visit(self, address: str) -> NetworkStore | None:
        """Return a store for `address`; None if nobody holds it."""
        host, _, port = address.rpartition(":")
        endpoint = resolve(host.strip("[]"), int(port), "a host of the job").endpoint
        began = time.monotonic()
        try:
            return NetworkStore(endpoint, self._key, self._timeout, patience_s=self._patience_s)
        except (StoreTimeout, StoreLost):
            self._silences.setdefault(address, time.monotonic() - began)
            return None

    def _take(self, address: str, store: NetworkStore, gone: set[str]) -> bool:
        """Use a store if it is open, or opens in a moment; otherwise leave it.

        One that holds a note counts as gone itself, if the rung that the note names is, or is this
        process's own; so does one that was started afresh, for those who come from another.
        """
        try:
            store.wait([_OPEN], _LOOK)
            name = store.get(_OPEN)
            job = store.get(_JOB)
            moved = moved_to(store)
        except (StoreTimeout, StoreLost):
            store.close()
            return False
        if self._job not in (b"", job) and moved is None:
            store.close()
            gone.add(address)  # started afresh
            return False
        if moved is None or moved == address:
            self._use(address, store, name)
            return True
        store.close()
        if moved in gone or moved == self._own:
            gone.add(address)
        else:
            self._addresses = [moved, *(a for a in self._addresses if a != moved)]
        return False

    def _open_own(self, seed: Callable[[Store], None] | None) -> NetworkStore:
        assert self._own is not None
        store = self._visit(self._own)
        if store is None:
            raise StoreLost("this process's own store does not answer", seen=self._own)
        if self._own not in self._addresses:
            self._addresses.append(self._own)
        store.set(_RUNGS, "".join(f"{address}\n" for address in self._addresses))
        if seed is not None:
            seed(store)
        self._job = self._job or uuid.uuid4().hex.encode()
        store.set(_JOB, self._job)
        name = store.compare_set(_OPEN, "", uuid.uuid4().hex.encode())
        store.delete_key(_MOVED)  # a note of times when this was open, and the job elsewhere
        self._use(self._own, store, name)
        return store

    def _use(self, address: str, store: NetworkStore, name: bytes) -> None:
        self.close()
        self._store, self._address = store, address
        self._ids[address] = name
        self._job = self._job or store.get(_JOB)
        self.refresh()
