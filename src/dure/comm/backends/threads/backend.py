"""The threads backend: ranks are threads of one process.

It makes odd world sizes, tests with 128 ranks and teaching cheap, and its code is the simplest
definition of each collective: see `threads.rendezvous` and `threads.moves`. It is slow with large
tensors, because one thread moves the data of all ranks.

Ranks find each other in the exchange in which they create the group: rank 0 makes a `ThreadGroup`,
keeps it in a table of this process under a random name until all have found it, and offers this
name.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.request import Request, finished
from dure.comm.backends.threads.rendezvous import Arrival, MessageEnd, ThreadGroup
from dure.comm.call import Call, call_site, place_of
from dure.comm.memory import heap_empty
from dure.errors import UsageError

__all__ = ["ThreadBackend", "ThreadsOpening"]

_incomplete: dict[str, ThreadGroup] = {}


class ThreadsOpening:
    """One rank's part of a group that is being created (see `backends.registry.Opening`)."""

    def __init__(self, options: BackendOptions) -> None:
        self._options, self._name = options, ""
        self._group: ThreadGroup | None = None
        self.offer = b""
        if options.rank == 0:
            self._name = secrets.token_hex(8)
            _incomplete[self._name] = ThreadGroup(options.name, options.size)
            self.offer = f"{os.getpid()}/{self._name}".encode()

    def connect(self, offers: Sequence[bytes]) -> None:
        """Find the group that rank 0 has made.

        Raises:
            UsageError: The ranks are not all in one process.
        """
        options = self._options
        pid, _, name = offers[0].decode().partition("/")
        self._group = _incomplete.get(name)
        if self._group is None:
            raise UsageError(
                "the threads backend needs all ranks in one process",
                group=options.name,
                rank=options.rank,
                seen=f"rank 0 is in process {pid}, this rank in {os.getpid()}",
                fix="Use the shm or gloo backend for ranks that are processes.",
            )
        if self._group.join():
            del _incomplete[name]

    def complete(self) -> ThreadBackend:
        """Return this rank's backend."""
        assert self._group is not None
        return ThreadBackend(self._options, self._group)

    def withdraw(self) -> None:
        """Forget a group that not all ranks have found."""
        _incomplete.pop(self._name, None)


class ThreadBackend:
    """One thread-rank's part of a group; the contract is that of `Backend`."""

    name = "threads"
    device_types = frozenset({"cpu"})
    compares_calls = True

    def __init__(self, options: BackendOptions, rendezvous: ThreadGroup) -> None:
        self._rendezvous, self._rank, self._size = rendezvous, options.rank, options.size
        self._eager_bytes = options.eager_bytes
        self.set_timeout(options.timeout)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host: all are in this process."""
        return (tuple(range(self._size)),)

    def gone(self, rank: int) -> bool:
        """Return whether `rank` has left."""
        return self._rendezvous.has_left(rank)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._timeout_s = timeout.total_seconds()

    def run(self, call: Call, async_op: bool) -> Request | None:
        arrival = Arrival(self._rendezvous, self._rank, call, place_of(call))
        arrival.deadline = arrival.began + self._timeout_s
        self._rendezvous.arrive(arrival)
        if async_op:
            return arrival
        arrival.wait()
        return None

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """See `Backend.send`; complete when it returns, unless `eager_bytes` makes it wait."""
        limit = self._eager_bytes
        eager = limit is None or 0 < tensor.nbytes <= limit
        end = MessageEnd(self._rendezvous, self._rank, "send", tensor, dst, tag, call_site(), eager)
        end.deadline = end.began + self._timeout_s
        self._rendezvous.post(end)
        if async_op:
            return finished() if eager else end
        if not eager:
            end.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        end = MessageEnd(self._rendezvous, self._rank, "recv", tensor, src, tag, call_site())
        end.deadline = end.began + self._timeout_s
        self._rendezvous.post(end)
        if not async_op:
            end.wait()
        return end

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: threads share all memory; with `node_shared` rank 0's."""
        memory = heap_empty(nbytes, dtype=torch.uint8, zeroed=True, must=False)
        if node_shared:
            self.run(Call(op="host_shared_empty", outputs=(memory,)), False)
        return memory

    def close(self, abort: bool) -> None:
        self._rendezvous.leave(self._rank, abort)
