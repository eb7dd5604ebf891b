"""What the store's server decides, without any socket: requests in, replies out.

A `get`, `wait` or `look` for what is not there yet is parked: it is listed under every key it
misses (a `look` under its client), and under its deadline. Whoever changes a key gets, together
with its own reply, the replies of all that waited for it, so nobody polls. A client has at most one
parked request, which is forgotten when the client leaves: what waits here is bounded by the number
of connections.

Each change of a key has a revision. A `look` learns from the last changes whether something below
its prefix is new; one that asks for older ones is answered at once.

A client whose connection broke cannot know whether its last write was done. It asks again, under
the same name (`once`), and gets the reply of the first time: of each client the last reply is kept,
and of those that left the last `_LEFT_KEPT`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dure.errors import StoreError
from dure.store.values import added, appended, exchanged
from dure.store.wire import Reply, Request

__all__ = ["Answer", "Board"]

Answer = tuple[bytes, Reply]
"""A reply, and the client (its ZeroMQ identity) that it is for."""

_OK = Reply("ok")

_MANY_DONE = 64
"""How many deadlines of answered requests may lie about before they are swept together."""

_CHANGES_KEPT = 1024
_LEFT_KEPT = 1024


@dataclass(slots=True, eq=False)
class _Parked:
    """A request that waits, and whether it has been answered since."""

    client: bytes
    request: Request
    done: bool = False


@dataclass(slots=True)
class _Lease:
    """How long a key lives that nobody renews, and through whose connection it was last renewed."""

    ttl_s: float
    ends: float
    client: bytes


def _nobody_asks(key: str, here: bool) -> None:
    """The hook of a board that has none."""


@dataclass(slots=True)
class Board:
    """The keys and values of a server, and who waits for which.

    Attributes:
        presence: Called with a leased key when the connection through which it was last renewed
            broke (False), and when it is held or renewed through another one (True).
        name: What tells this board from others; `check` of no keys asks for it.
    """

    presence: Callable[[str, bool], None] = _nobody_asks
    name: bytes = b""
    data: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _waiting: defaultdict[str, list[_Parked]] = field(
        default_factory=lambda: defaultdict[str, list[_Parked]](list)
    )
    _looking: dict[bytes, _Parked] = field(default_factory=dict[bytes, _Parked])
    _deadlines: list[tuple[float, int, _Parked]] = field(
        default_factory=list[tuple[float, int, _Parked]]
    )
    _parked: dict[bytes, _Parked] = field(default_factory=dict[bytes, _Parked])
    _ticket: itertools.count[int] = field(default_factory=itertools.count)
    _leases: dict[str, _Lease] = field(default_factory=dict[str, _Lease])
    _revision: int = 0
    _changes: deque[tuple[int, str]] = field(
        default_factory=lambda: deque[tuple[int, str]](maxlen=_CHANGES_KEPT)
    )
    _untold: list[str] = field(default_factory=list[str])
    _done: dict[bytes, Reply] = field(default_factory=dict[bytes, Reply])
    _last: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    _left: deque[bytes] = field(default_factory=deque[bytes])

    def handle(self, client: bytes, request: Request, now: float) -> list[Answer]:
        """Carry out `request`; return every reply that is due because of it.

        Raises:
            StoreError: The request makes no sense (a number is none, values are missing), or the
                client's last one still waits.
        """
        if client in self._parked:
            raise StoreError("a client of the store asked before it was answered", op=request.op)
        if request.op in ("get", "wait", "look"):
            return self._wait(client, request, now)
        reply = self._done.get(request.once)
        if reply is None:
            reply = self._carry_out(client, request, now)
        if request.once:
            self._done.pop(self._last.get(client, b""), None)
            self._last[client] = request.once
            self._done[request.once] = reply
        return [(client, reply), *self._tell()]

    def leave(self, client: bytes) -> None:
        """Forget what `client`, who has gone, was waiting for."""
        parked = self._parked.get(client)
        if parked is not None:
            self._forget(parked)
        once = self._last.pop(client, None)
        if once is not None:
            self._left.append(once)
            if len(self._left) > _LEFT_KEPT:
                self._done.pop(self._left.popleft(), None)
        for key, lease in self._leases.items():
            if lease.client == client:
                lease.client = b""
                self.presence(key, False)

    def expire(self, now: float) -> list[Answer]:
        """Return the replies that are due because a deadline has passed, or a lease has ended."""
        for key in [key for key, lease in self._leases.items() if lease.ends <= now]:
            self._put(key, None)
        answers = self._tell()
        while self._deadlines and self._deadlines[0][0] <= now:
            parked = heapq.heappop(self._deadlines)[2]
            if not parked.done:
                self._forget(parked)
                answers.append((parked.client, self._too_late(parked.request)))
        return answers

    def next_deadline(self) -> float | None:
        """Return when `expire` is next needed."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        dues = [lease.ends for lease in self._leases.values()]
        dues += [self._deadlines[0][0]] if self._deadlines else []
        return min(dues, default=None)

    def _missing(self, request: Request) -> tuple[str, ...]:
        return tuple(key for key in request.keys if key not in self.data)

    def _wait(self, client: bytes, request: Request, now: float) -> list[Answer]:
        """Answer at once what can be answered, and park the rest."""
        looks = request.op == "look"
        if looks and len(request.keys) != 1:
            raise _malformed(request)
        missing = () if looks else self._missing(request)
        if self._news(request) if looks else not missing:
            return [(client, self._found(request))]
        if request.timeout_s <= 0:
            return [(client, self._too_late(request))]
        parked = self._parked[client] = _Parked(client, request)
        if looks:
            self._looking[client] = parked
        for key in missing:
            self._waiting[key].append(parked)
        if len(self._deadlines) > 2 * len(self._parked) + _MANY_DONE:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (now + request.timeout_s, next(self._ticket), parked))
        return []

    def _news(self, look: Request) -> bool:
        """Tell whether anything below a prefix may have changed since the revision it names."""
        prefix, since = look.keys[0], look.amount
        kept = self._changes[0][0] if self._changes else self._revision + 1
        if not kept - 1 <= since <= self._revision:
            return True
        for revision, key in reversed(self._changes):
            if revision <= since:
                break
            if key.startswith(prefix):
                return True
        return False

    def _found(self, request: Request) -> Reply:
        if request.op == "wait":
            return _OK
        if request.op == "get":
            return Reply("ok", values=tuple(self.data[key] for key in request.keys))
        below = {key: value for key, value in self.data.items() if key.startswith(request.keys[0])}
        return Reply("ok", self._revision, values=tuple(below.values()), names=tuple(below))

    def _too_late(self, request: Request) -> Reply:
        if request.op == "look":
            return self._found(request)
        return Reply("timeout", names=self._missing(request))

    def _carry_out(self, client: bytes, request: Request, now: float) -> Reply:
        """Do what needs no waiting."""
        keys = request.keys
        match request.op:
            case "count":
                return Reply("ok", len(self.data))
            case "list":
                return Reply("ok", len(self.data), names=tuple(sorted(self.data)))
            case "check" if not keys:
                return Reply("ok", 1, values=(self.name,))
            case "check":
                return Reply("ok", int(all(key in self.data for key in keys)))
            case "delete":
                there = [key for key in keys if key in self.data]
                for key in there:
                    self._put(key, None)
                return Reply("ok", len(there))
            case "transact":
                met = all(self.data.get(key) == value for key, value in request.expect.items())
                for key, value in request.write.items() if met else ():
                    self._put(key, value)
                return Reply("ok", int(met))
            case "hold" | "renew" | "release" if len(keys) == 1:
                return self._lease(client, request, now)
            case _:
                return self._write(request)

    def _write(self, request: Request) -> Reply:
        keys, values = request.keys, request.values
        match request.op:
            case "set" if len(keys) == len(values):
                for key, value in zip(keys, values, strict=True):
                    self._put(key, value)
                return _OK
            case "add" if len(keys) == 1:
                total = added(keys[0], self.data.get(keys[0]), request.amount)
                self._put(keys[0], b"%d" % total)
                return Reply("ok", total)
            case "append" if len(keys) == len(values) == 1:
                self._put(keys[0], appended(keys[0], self.data.get(keys[0]), values[0]))
                return _OK
            case "compare_set" if len(keys) == 1 and len(values) == 2:
                stored, answer = exchanged(self.data.get(keys[0]), values[0], values[1])
                if stored is not None:
                    self._put(keys[0], stored)
                return Reply("ok", values=(answer,))
            case _:
                raise _malformed(request)

    def _lease(self, client: bytes, request: Request, now: float) -> Reply:
        key = request.keys[0]
        if request.op == "release":
            self._put(key, None)
            return _OK
        before = self._leases.get(key)
        if request.op == "hold":
            if len(request.values) != 1:
                raise _malformed(request)
            self._put(key, request.values[0])
            lease = self._leases[key] = _Lease(request.timeout_s, now + request.timeout_s, client)
        elif before is None:
            return Reply("ok", 0)
        else:
            lease = before
        back = before is None or not before.client
        lease.ends, lease.client = now + lease.ttl_s, client
        if back:
            self.presence(key, True)
        return Reply("ok", 1)

    def _put(self, key: str, value: bytes | None) -> None:
        """Give `key` a value, without a lease, or take it away; `_tell` tells of it."""
        self._leases.pop(key, None)
        if value is not None:
            self.data[key] = value
        elif self.data.pop(key, None) is None:
            return
        self._revision += 1
        self._changes.append((self._revision, key))
        self._untold.append(key)

    def _tell(self) -> list[Answer]:
        """Answer those who waited for what has changed."""
        changed, self._untold = self._untold, []
        answers = [answer for key in changed if key in self.data for answer in self._wake(key)]
        if not changed:
            return answers
        for parked in list(self._looking.values()):
            prefix = parked.request.keys[0]
            if any(key.startswith(prefix) for key in changed):
                self._settle(parked)
                answers.append((parked.client, self._found(parked.request)))
        return answers

    def _wake(self, key: str) -> list[Answer]:
        """Answer those that waited for `key` and now miss nothing."""
        answers: list[Answer] = []
        for parked in self._waiting.pop(key, ()):
            if parked.done:
                continue
            missing = self._missing(parked.request)
            if not missing:
                self._settle(parked)
                answers.append((parked.client, self._found(parked.request)))
            for name in missing:  # one that was there, and was deleted again, counts anew
                if parked not in self._waiting[name]:
                    self._waiting[name].append(parked)
        return answers

    def _settle(self, parked: _Parked) -> None:
        parked.done = True
        self._parked.pop(parked.client, None)
        self._looking.pop(parked.client, None)

    def _forget(self, parked: _Parked) -> None:
        """Take a request off every list that it is on."""
        self._settle(parked)
        if parked.request.op == "look":
            return
        for key in set(parked.request.keys):
            left = [other for other in self._waiting.get(key, ()) if not other.done]
            if left:
                self._waiting[key] = left
            else:
                self._waiting.pop(key, None)


def _malformed(request: Request) -> StoreError:
    seen = f"{len(request.keys)} keys and {len(request.values)} values"
    return StoreError("a store request is malformed", op=request.op, seen=seen)
