"""The key-value state behind every store, without any socket: requests in, replies out.

A `get` or `wait` for a missing key is parked. A request that changes a key returns, with
its own reply, the replies of all requests that waited for it, so no client polls. A client has at
most one parked request, which is forgotten when the client leaves, so the number of
parked requests is bounded by that of connections.

A client whose connection broke cannot know whether its last write was done. It asks again, under
the same name (`once`), and gets the reply of the first time: of each client the last reply is kept,
and of those that left the last `_KEPT`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

from dure.errors import StoreError
from dure.store.builds import own_build
from dure.store.identity import host_name
from dure.store.wire import MAX_VALUE_BYTES, Reply, StoreRequest

__all__ = ["Answer", "Board"]

Answer = tuple[bytes, Reply]
"""A reply, and the client (its ZeroMQ identity) that it is for."""

_OK = Reply("ok")
_KEPT = 1024
"""How many replies to clients that left are remembered."""


_STALE = 64
"""How many deadlines of requests that were answered are kept, plus one per parked request."""


@dataclass(slots=True)
class _Parked:
    """A request that waits; `missing` are the keys that do not exist yet."""

    request: StoreRequest
    number: int
    missing: set[str]


class Board:
    """The keys and values of a server, and the clients that wait for them.

    Args:
        name: Identifies this board; `check` of no keys asks for it, and for the build
            and the host.
    """

    def __init__(self, name: bytes = b"") -> None:
        self.data: dict[str, bytes] = {}
        self._name = name
        self._parked: dict[bytes, _Parked] = {}
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int, bytes]] = []  # heap: when, request's number, client
        self._waiting: dict[str, dict[bytes, None]] = {}  # clients by the keys of `get` and `wait`
        self._untold: list[str] = []
        self._done: dict[bytes, Reply] = {}  # by the name of the write
        self._last: dict[bytes, bytes] = {}  # the name of each client's last write
        self._left: deque[bytes] = deque()

    def handle(self, client: bytes, request: StoreRequest, now: float) -> list[Answer]:
        """Carry out `request`; return every reply that is due because of it.

        Raises:
            StoreError: The request makes no sense (a number is none, values are missing), or the
                client's last one still waits.
        """
        if client in self._parked:
            raise StoreError("a client of the store asked before it was answered", op=request.op)
        if request.op in ("get", "wait"):
            return self._wait(client, request, now)
        reply = self._done.get(request.once)
        if reply is None:
            reply = self._carry_out(request)
        if request.once:
            self._done.pop(self._last.get(client, b""), None)
            self._last[client] = request.once
            self._done[request.once] = reply
        return [(client, reply), *self._tell()]

    def leave(self, client: bytes) -> None:
        """Forget what `client`, which has gone, was waiting for."""
        self._forget(client)
        once = self._last.pop(client, None)
        if once is not None:
            self._left.append(once)
            if len(self._left) > _KEPT:
                self._done.pop(self._left.popleft(), None)

    def expire(self, now: float) -> list[Answer]:
        """Return the replies that are due because a deadline has passed."""
        answers: list[Answer] = []
        while (due := self.next_deadline()) is not None and due <= now:
            _, _, client = heapq.heappop(self._deadlines)
            request = self._parked[client].request
            self._forget(client)
            answers.append((client, self._too_late(request)))
        return answers

    @property
    def has_leases(self) -> bool:
        """Whether a key would vanish if it were not renewed."""
        return False

    def next_deadline(self) -> float | None:
        """Return when `expire` is next needed."""
        while self._deadlines and not self._is_parked(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_parked(self, due: float, number: int, client: bytes) -> bool:
        """Return whether the request of a deadline still waits."""
        del due
        parked = self._parked.get(client)
        return parked is not None and parked.number == number

    def _park(self, client: bytes, request: StoreRequest, due: float) -> None:
        parked = _Parked(request, next(self._numbers), set(self._missing(request)))
        self._parked[client] = parked
        for key in request.keys:
            self._waiting.setdefault(key, {})[client] = None
        heapq.heappush(self._deadlines, (due, parked.number, client))
        if len(self._deadlines) > 2 * len(self._parked) + _STALE:
            self._deadlines = [each for each in self._deadlines if self._is_parked(*each)]
            heapq.heapify(self._deadlines)

    def _missing(self, request: StoreRequest) -> tuple[str, ...]:
        return tuple(key for key in request.keys if key not in self.data)

    def _wait(self, client: bytes, request: StoreRequest, now: float) -> list[Answer]:
        """Answer at once what can be answered, and park the rest."""
        if not self._missing(request):
            return [(client, self._found(request))]
        if request.timeout_s <= 0:
            return [(client, self._too_late(request))]
        self._park(client, request, now + request.timeout_s)
        return []

    def _found(self, request: StoreRequest) -> Reply:
        if request.op == "wait":
            return _OK
        return Reply("ok", values=tuple(self.data[key] for key in request.keys))

    def _too_late(self, request: StoreRequest) -> Reply:
        return Reply("timeout", names=self._missing(request))

    def _carry_out(self, request: StoreRequest) -> Reply:
        """Do what needs no waiting."""
        keys, values = request.keys, request.values
        match request.op:
            case "count":
                return Reply("ok", len(self.data))
            case "list":
                return Reply("ok", len(self.data), names=tuple(sorted(self.data)))
            case "check" if not keys:
                build = own_build()
                names = (str(build.protocol), build.version, host_name())
                return Reply("ok", 1, values=(self._name,), names=names)
            case "check":
                return Reply("ok", int(not self._missing(request)))
            case "delete":
                there = [key for key in keys if key in self.data]
                for key in there:
                    self._put(key, None)
                return Reply("ok", len(there))
            case "set" if len(keys) == len(values):
                for key, value in zip(keys, values, strict=True):
                    self._put(key, value)
                return _OK
            case "add" if len(keys) == 1:
                total = _added(keys[0], self.data.get(keys[0], b"0"), request.amount)
                self._put(keys[0], b"%d" % total)
                return Reply("ok", total)
            case "append" if len(keys) == len(values) == 1:
                self._put(keys[0], _appended(keys[0], self.data.get(keys[0], b""), values[0]))
                return _OK
            case "compare_set" if len(keys) == 1 and len(values) == 2:
                return self._compare_set(keys[0], self.data.get(keys[0]), values[0], values[1])
            case _:
                raise _malformed(request)

    def _compare_set(self, key: str, now: bytes | None, expected: bytes, desired: bytes) -> Reply:
        if now == expected or (now is None and not expected):
            self._put(key, desired)
            return Reply("ok", values=(desired,))
        return Reply("ok", values=(expected if now is None else now,))

    def _put(self, key: str, value: bytes | None) -> None:
        """Give `key` a value, or delete it; `_tell` reports it."""
        if value is not None:
            self.data[key] = value
        elif self.data.pop(key, None) is None:
            return
        self._untold.append(key)

    def _tell(self) -> list[Answer]:
        """Answer the clients that waited for what has changed."""
        changed, self._untold = self._untold, []
        answers: list[Answer] = []
        met: dict[bytes, None] = {}
        for key in changed:
            for client in self._waiting.get(key, ()):
                missing = self._parked[client].missing
                if key not in self.data:
                    missing.add(key)
                    met.pop(client, None)
                else:
                    missing.discard(key)
                    if not missing:
                        met[client] = None
        for client in met:
            answers.append((client, self._found(self._parked[client].request)))
            self._forget(client)
        return answers

    def _forget(self, client: bytes) -> None:
        """Take a client's request off every list that it is on."""
        parked = self._parked.pop(client, None)
        if parked is None:
            return
        for key in set(parked.request.keys):
            waiting = self._waiting[key]
            del waiting[client]
            if not waiting:
                del self._waiting[key]


def _malformed(request: StoreRequest) -> StoreError:
    seen = f"{len(request.keys)} keys and {len(request.values)} values"
    return StoreError("a store request is malformed", op=request.op, seen=seen)


def _added(key: str, current: bytes, amount: int) -> int:
    try:
        total = int(current or b"0") + amount
    except ValueError:
        raise StoreError(
            f"cannot add to the key {key!r}",
            op="add",
            seen=f"its value {current[:40]!r} is not an integer",
            fix="Use `add` only on keys that `add` made, or that hold decimal text.",
        ) from None
    if not -(1 << 63) <= total < 1 << 63:
        raise StoreError(
            f"cannot add to the key {key!r}", op="add", seen=f"{total} has more than 64 bits"
        )
    return total


def _appended(key: str, current: bytes, more: bytes) -> bytes:
    size = len(current) + len(more)
    if size > MAX_VALUE_BYTES:
        raise StoreError(
            f"cannot append to the key {key!r}",
            op="append",
            seen=f"it would have {size} bytes, and {MAX_VALUE_BYTES} are allowed",
        )
    return current + more
