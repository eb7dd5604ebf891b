"""Verification of a foreign engine's collectives: the ranks compare their calls before data move.

Dure's own backends compare calls as they begin; an engine such as Gloo does not, and a mismatch
gives wrong numbers, an abort or a hang. `VerifyingBackend` wraps any backend if the user asks for
it (`wanted`): for finding a mistake, not for training.

Before each collective the ranks gather each other's *headers*: the fingerprint of the call and the
line of the program that made it. They use a separate Gloo group for that, so that a mismatch cannot
reach it. All ranks read the same headers, so all raise the same `Desync`, or all call the engine.
After a difference, or when a rank did not call, the group is broken: later calls raise the same
error.

**Asynchronous calls** must not wait for peers, so their headers are gathered on the thread of an
ordered queue; later calls queue behind them.

Threads:
    As `Backend` demands; the engine sees one call at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
from msgspec import structs

from dure import env
from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.engine.watchdog import Deaths
from dure.comm.backends.header import Header, difference
from dure.comm.backends.queue import OrderedQueue
from dure.comm.backends.request import Request
from dure.comm.call import Call, fingerprint, place_of
from dure.errors import DureError, PeerLost, StoreError
from dure.store.prefix import PrefixStore

_DEATH_S = 0.3
"""How long after an engine has lost a process the store may take to know that it ended."""

_SEE_ITS_OUTPUT = "See that rank's own output; then make a new group of the ranks that are left."


def wanted(options: BackendOptions) -> bool:
    """Tell whether the user asks for verification: DURE_VERIFY=1 or pg_options={"verify": True}."""
    given = options.pg_options
    asked = given.get("verify") if isinstance(given, Mapping) else None
    return env.flag("DURE_VERIFY") if asked is None else bool(asked)


class VerifyingBackend:
    """A backend whose collectives are compared before data move (see the module's text).

    Args:
        inner: The backend that moves the data. Nothing else may use it.
        options: Of the group.

    Collective:
        All ranks of the group make one.
    """

    compares_calls = True

    def __init__(self, inner: Backend, options: BackendOptions) -> None:
        from dure.comm.backends.torch_engine import create_gloo  # lazy: only where it is wanted

        self.name, self.device_types = inner.name, inner.device_types
        self.in_stream: bool = getattr(inner, "in_stream", False)
        self.makes_records: bool = getattr(inner, "makes_records", False)
        self._inner, self._store = inner, options.store
        self._rank, self._size = options.rank, options.size
        self._state = GroupState(options.name, options.rank, options.size)
        self._headers = create_gloo(replace(options, store=PrefixStore("verify", options.store)))
        self._num = 0  # of the call
        self._engine = threading.RLock()  # the engine sees one call at a time
        self._queue = OrderedQueue("dure-verify", lambda: self._state.error("a collective"))

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call waits for its peers."""
        for part in (self._headers, self._inner):
            change = getattr(part, "set_timeout", None)
            if change is not None:
                change(timeout)

    def run(self, call: Call, async_op: bool) -> Request | None:
        site = place_of(call)

        def verified() -> Request | None:
            self._state.check(call.op)
            self._num += 1
            began = time.monotonic()
            record = self._compare(call, site)
            if record is not None:
                self._state.adopt(record)
                if record.kind == "CommTimeout":
                    self._inner.close(True)  # end waits in the engine
                raise record.error(**self._state.where(call.op, self._num, began))
            with self._engine:
                return self._inner.run(call, True)

        return self._queue.run(verified, async_op)

    def _compare(self, call: Call, site: str) -> AbortRecord | None:
        """Compare `call` with those of the other ranks; return a record if they differ."""
        header = Header(fingerprint(call, self._rank, self._size), site, self._num)
        mine = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        gathered = mine.new_empty((self._size, mine.numel()))
        try:
            gather = Call(op="all_gather_single", inputs=(mine,), outputs=(gathered,))
            self._headers.run(gather, False)
        except DureError as error:
            record = AbortRecord.of(error)
            return self._lost(record) if record.kind == "PeerLost" else record
        return difference([Header.unpack(bytes(row.tolist())) for row in gathered])

    def _lost(self, record: AbortRecord) -> AbortRecord:
        """Return the record of a lost peer; the store soon knows which process has ended."""
        until = time.monotonic() + (_DEATH_S if record.peer is None else 0.0)
        while True:
            try:
                self._store.check(["verify/absent"])
            except PeerLost as dead:
                what = f"the process of rank {dead.peer} ended"
                return structs.replace(AbortRecord.of(dead), what=what, fix=_SEE_ITS_OUTPUT)
            except StoreError:
                return record
            if time.monotonic() >= until:
                return record
            time.sleep(_DEATH_S / 10)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """Send without a comparison: the two ends of a message need not call together."""
        with self._engine:
            request = self._inner.send(tensor, dst, tag, True)
        if async_op or request is None:
            return request
        request.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        with self._engine:
            request = self._inner.recv(tensor, src, tag, True)
        if not async_op:
            request.wait()
        return request

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `EngineGroup.together`."""
        with self._engine, getattr(self._inner, "together", nullcontext)():
            yield

    def watch(self, deaths: Deaths) -> None:
        """See `EngineGroup.watch`."""
        watch = getattr(self._inner, "watch", None)
        if watch is not None:
            watch(deaths)

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        return self._inner.allocate(nbytes, node_shared)

    def close(self, abort: bool) -> None:
        self._state.left.set()
        self._headers.close(abort)
        self._queue.stop()
        self._inner.close(abort)
