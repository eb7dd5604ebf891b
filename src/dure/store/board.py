"""What the store's server decides, without any socket: requests in, replies out.

A `get` or `wait` for keys that are not there yet is parked: it is listed under every key it misses,
and under its deadline. Whoever makes a key appear gets, together with its own reply, the replies of
all that waited for it, so nobody polls. A client has at most one parked request, which is forgotten
when the client leaves: what waits here is bounded by the number of connections.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
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


@dataclass(slots=True, eq=False)
class _Parked:
    """A request that waits, and whether it has been answered since."""

    client: bytes
    request: Request
    done: bool = False


@dataclass(slots=True)
class Board:
    """The keys and values of a server, and who waits for which."""

    data: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _waiting: defaultdict[str, list[_Parked]] = field(
        default_factory=lambda: defaultdict[str, list[_Parked]](list)
    )
    _deadlines: list[tuple[float, int, _Parked]] = field(
        default_factory=list[tuple[float, int, _Parked]]
    )
    _parked: dict[bytes, _Parked] = field(default_factory=dict[bytes, _Parked])
    _ticket: itertools.count[int] = field(default_factory=itertools.count)

    def handle(self, client: bytes, request: Request, now: float) -> list[Answer]:
        """Carry out `request`; return every reply that is due because of it.

        Raises:
            StoreError: The request makes no sense (a number is none, values are missing), or the
                client's last one still waits.
        """
        op = request.op
        if client in self._parked:
            raise StoreError("a client of the store asked before it was answered", op=op)
        if op in ("get", "wait"):
            return self._look(client, request, now)
        if op in ("count", "list"):
            names = tuple(sorted(self.data)) if op == "list" else ()
            return [(client, Reply("ok", len(self.data), names=names))]
        if op == "check":
            return [(client, Reply("ok", int(all(key in self.data for key in request.keys))))]
        if op == "delete":
            gone = [self.data.pop(key, None) for key in request.keys]
            return [(client, Reply("ok", sum(value is not None for value in gone)))]
        before = [key for key in request.keys if key not in self.data]
        reply = self._write(request)
        woken = [answer for key in before if key in self.data for answer in self._wake(key)]
        return [(client, reply), *woken]

    def leave(self, client: bytes) -> None:
        """Forget what `client`, who has gone, was waiting for."""
        parked = self._parked.get(client)
        if parked is not None:
            self._forget(parked)

    def expire(self, now: float) -> list[Answer]:
        """Return the replies to those whose deadline has passed."""
        late: list[Answer] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            parked = heapq.heappop(self._deadlines)[2]
            if not parked.done:
                missing = self._missing(parked.request)
                self._forget(parked)
                late.append((parked.client, Reply("timeout", names=missing)))
        return late

    def next_deadline(self) -> float | None:
        """Return when `expire` is next needed."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _missing(self, request: Request) -> tuple[str, ...]:
        return tuple(key for key in request.keys if key not in self.data)

    def _look(self, client: bytes, request: Request, now: float) -> list[Answer]:
        missing = self._missing(request)
        if not missing:
            return [(client, self._found(request))]
        if request.timeout_s <= 0:
            return [(client, Reply("timeout", names=missing))]
        parked = self._parked[client] = _Parked(client, request)
        for key in missing:
            self._waiting[key].append(parked)
        if len(self._deadlines) > 2 * len(self._parked) + _MANY_DONE:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (now + request.timeout_s, next(self._ticket), parked))
        return []

    def _found(self, request: Request) -> Reply:
        if request.op == "wait":
            return _OK
        return Reply("ok", values=tuple(self.data[key] for key in request.keys))

    def _write(self, request: Request) -> Reply:
        keys, values = request.keys, request.values
        match request.op:
            case "set" if len(keys) == len(values):
                self.data.update(zip(keys, values, strict=True))
                return _OK
            case "add" if len(keys) == 1:
                total = added(keys[0], self.data.get(keys[0]), request.amount)
                self.data[keys[0]] = b"%d" % total
                return Reply("ok", total)
            case "append" if len(keys) == len(values) == 1:
                self.data[keys[0]] = appended(keys[0], self.data.get(keys[0]), values[0])
                return _OK
            case "compare_set" if len(keys) == 1 and len(values) == 2:
                stored, answer = exchanged(self.data.get(keys[0]), values[0], values[1])
                if stored is not None:
                    self.data[keys[0]] = stored
                return Reply("ok", values=(answer,))
            case _:
                seen = f"{len(keys)} keys and {len(values)} values"
                raise StoreError("a store request is malformed", op=request.op, seen=seen)

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

    def _forget(self, parked: _Parked) -> None:
        """Take a request off every list that it is on."""
        self._settle(parked)
        for key in set(parked.request.keys):
            left = [other for other in self._waiting.get(key, ()) if not other.done]
            if left:
                self._waiting[key] = left
            else:
                self._waiting.pop(key, None)
