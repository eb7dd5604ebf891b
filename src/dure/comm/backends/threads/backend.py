"""The threads backend: ranks are threads of one process.

It makes odd world sizes, tests with 128 ranks and teaching cheap, and it is the plainest statement
of what a collective does: see `threads.rendezvous` and `threads.moves`. It is not
meant to be fast with large tensors; one thread moves the data of all ranks.

Ranks find each other through the group's store: rank 0 makes a `Rendezvous`, keeps it in a table of
this process under a random name, and says the name. The table holds it weakly: when the last rank
drops its backend it is gone.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from weakref import WeakValueDictionary

import torch

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.request import Request, finished
from dure.comm.backends.threads.rendezvous import (
    Collective,
    Message,
    Receive,
    Rendezvous,
    TimedRequest,
    message_text,
)
from dure.comm.backends.threads.waiting import Wait, table_of
from dure.comm.call import Call, call_site, fingerprint
from dure.errors import RendezvousTimeout, UsageError

__all__ = ["ThreadBackend", "create_threads"]

_all: WeakValueDictionary[str, Rendezvous] = WeakValueDictionary()
_all_lock = threading.Lock()
_KEY = "threads/rendezvous"


def create_threads(options: BackendOptions) -> ThreadBackend:
    """Meet the other ranks of the group, which must be threads of this process.

    Raises:
        UsageError: The ranks are not all in one process.
        RendezvousTimeout: A rank did not come; `missing` says which.
    """
    rendezvous = _open(options) if options.rank == 0 else _find(options)
    if options.eager_bytes is not None:  # before anyone can begin to wait
        table_of(options.store).join(options.global_ranks[options.rank])
    rendezvous.join(options.rank)
    if not rendezvous.everyone_here.wait(options.timeout.total_seconds()):
        missing = rendezvous.not_joined()
        raise RendezvousTimeout(
            "not all thread-ranks came",
            group=options.name,
            rank=options.rank,
            world_size=options.size,
            came=tuple(r for r in range(options.size) if r not in missing),
            missing=missing,
        )
    return ThreadBackend(options, rendezvous)


def _open(options: BackendOptions) -> Rendezvous:
    rendezvous = Rendezvous(options.name, options.size)
    token = secrets.token_hex(8)
    with _all_lock:
        _all[token] = rendezvous
    options.store.set(_KEY, f"{os.getpid()}/{token}")
    return rendezvous


def _find(options: BackendOptions) -> Rendezvous:
    options.store.wait([_KEY], options.timeout)
    pid, _, token = options.store.get(_KEY).decode().partition("/")
    with _all_lock:
        rendezvous = _all.get(token)
    if rendezvous is None:
        raise UsageError(
            "the threads backend needs all ranks in one process",
            group=options.name,
            rank=options.rank,
            seen=f"rank 0 is in process {pid}, this rank in {os.getpid()}",
            fix="Use the shm or gloo backend for ranks that are processes.",
        )
    return rendezvous


class ThreadBackend:
    """One thread-rank's part of a group; the contract is that of `Backend`."""

    name = "threads"
    device_types = frozenset({"cpu"})

    def __init__(self, options: BackendOptions, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._rank, self._size = rendezvous, options.rank, options.size
        self._eager_bytes, self._global_rank = (
            options.eager_bytes,
            options.global_ranks[options.rank],
        )
        self._waiting = None if options.eager_bytes is None else table_of(options.store)
        self.set_timeout(options.timeout)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host: all are in this process."""
        return (tuple(range(self._size)),)

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has left, or ended."""
        return self._rendezvous.has_left(rank)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._timeout_s = timeout.total_seconds()

    def run(self, call: Call, async_op: bool) -> Request | None:
        """See `Backend.run`."""
        request = self._arrive(call)
        if async_op:
            return request
        request.wait()
        return None

    def _arrive(self, call: Call) -> Request:
        at: list[Collective] = []
        site = call_site()
        request = self._request(
            lambda why: self._rendezvous.expire(at[0], why),
            lambda: fingerprint(call, self._rank, self._size).text(site),
        )
        at.append(self._rendezvous.arrive(self._rank, call, request, site))
        return request

    def _request(
        self, expire: Callable[[AbortRecord | None], None], text: Callable[[], str]
    ) -> TimedRequest:
        """Make the request of an operation: how it is given up, and how it is told of."""
        rendezvous, waiting = self._rendezvous, self._waiting
        request = TimedRequest(self._timeout_s, lambda: expire(None), rendezvous.lose_ended_threads)
        if waiting is not None:
            request.watch(waiting, self._global_rank, Wait(request, text(), expire))
        return request

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """See `Backend.send`; it is complete when it returns, unless it is to wait."""
        message = Message(self._rank, tag, tensor, call_site())
        eager = self._eager_bytes
        if eager is None or 0 < tensor.nbytes <= eager:
            self._rendezvous.send(dst, message)
            return finished() if async_op else None
        request = message.request = self._request(
            lambda why: self._rendezvous.expire_send(dst, message, why),
            lambda: message_text("send", tensor, message.site, f"to rank {dst}"),
        )
        self._rendezvous.send(dst, message)
        if async_op:
            return request
        request.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        """See `Backend.recv`."""
        receive = Receive(tensor, src, tag, call_site())
        source = "anyone" if src is None else f"rank {src}"
        request = receive.request = self._request(
            lambda why: self._rendezvous.expire_receive(self._rank, receive, why),
            lambda: message_text("recv", tensor, receive.site, f"from {source}"),
        )
        self._rendezvous.post(self._rank, receive)
        if not async_op:
            request.wait()
        return request

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: threads share all memory; one node's is that of rank 0."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        if node_shared:
            self.run(Call(op="host_shared_empty", outputs=(memory,)), False)
        return memory

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        self._rendezvous.leave(self._rank, abort)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.leave(self._global_rank)
