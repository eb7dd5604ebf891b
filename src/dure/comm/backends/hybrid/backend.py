"""The backend of several hosts: shared memory inside a host, an engine between hosts.

A hybrid group consists of other backends (subcomms.py, which defines the terms): one `shm` group
for each host, one engine group for each rail, and one for all ranks. header.py has the first step
of every collective, collectives.py the others, messages.py point-to-point, creation.py the creation
of the group, and state.py and control.py the loss of a rank, a host or a link.

Threads:
    As the contract. Asynchronous collectives run on a thread of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.header import Header
from dure.comm.backends.hybrid.collectives import Collectives
from dure.comm.backends.hybrid.control import SHOW_S, ControlChannel, HostWatch
from dure.comm.backends.hybrid.header import HeaderExchange
from dure.comm.backends.hybrid.messages import Messages
from dure.comm.backends.hybrid.subcomms import LOCAL_SLACK, SubComms
from dure.comm.backends.queue import OrderedQueue
from dure.comm.backends.request import Request
from dure.comm.call import Call, fingerprint, place_of
from dure.errors import DureError

__all__ = ["HybridBackend"]


class HybridBackend:
    """One rank's part of a group over several hosts; the contract is that of `Backend`.

    Args:
        name: The backend's name, which depends on the engine between hosts.
        comms: The group's sub-communicators.
        headers: Its header exchange.
        watch: On a leader: the watch over the other hosts.
        options: Of the group.
    """

    device_types = frozenset({"cpu"})
    compares_calls = True

    def __init__(
        self,
        name: str,
        comms: SubComms,
        headers: HeaderExchange,
        watch: HostWatch | None,
        options: BackendOptions,
    ) -> None:
        self.name = name
        self._comms, self._watch, self._hosts = comms, watch, comms.hosts
        self._rank, self._size = options.rank, options.size
        self._global_ranks = options.global_ranks
        self._collectives, self._messages = Collectives(comms, headers), Messages(comms)
        self._queue = OrderedQueue(
            f"dure-{options.name}", lambda: comms.state.error("a collective")
        )
        if watch is not None:
            watch.start()

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host."""
        return self._hosts.ranks

    @property
    def details(self) -> str:
        """What was chosen for the group, as text for the log; ranks are global ranks."""
        leaders = ", ".join(str(self._global_ranks[ranks[0]]) for ranks in self._hosts.ranks)
        rails = self._hosts.num_rails
        engine = self._comms.mesh.name
        return (
            f"leaders of hosts: ranks {leaders}; {rails} rank{'s' if rails > 1 else ''} per host "
            f"talk to other hosts, over {engine}; within the host: {self._comms.local.details}"
        )

    def gone(self, rank: int) -> bool:
        """Return whether `rank` has died or left, as far as this host knows."""
        host, place = self._hosts.places[rank]
        if host == self._hosts.here:
            return self._comms.local.gone(place)
        return place == 0 and self._lost_for_s(rank) > 0

    def lost(self, rank: int) -> bool:
        """Return whether `rank` has died, as far as this host knows; or left, on another host."""
        host, place = self._hosts.places[rank]
        if host == self._hosts.here:
            return self._comms.local.lost(place)
        record = self._comms.state.look()
        is_named = record is not None and (record.kind, record.peer) == ("PeerLost", rank)
        return is_named or self.gone(rank)

    def silent(self, rank: int) -> bool:
        """Return whether the host of `rank` has lost its leader, and `rank` may have died too.

        A rank that lives notices the loss at once, and has had the time to write to the store.
        """
        return self._lost_for_s(rank) > SHOW_S

    def _channel_to(self, rank: int) -> ControlChannel | None:
        return None if self._watch is None else self._watch.channel_to(rank)

    def _lost_for_s(self, rank: int) -> float:
        channel = self._channel_to(rank)
        return 0.0 if channel is None else channel.lost_for_s

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._comms.state.timeout_s = timeout.total_seconds()
        self._comms.local.set_timeout(timeout + LOCAL_SLACK)

    def run(self, call: Call, async_op: bool) -> Request | None:
        return self._start(call, self._collectives.run, async_op)

    def _start(
        self, call: Call, do: Callable[[Call, Header], None], async_op: bool
    ) -> Request | None:
        """Run a collective; an error breaks the group on all ranks."""
        header = Header(fingerprint(call, self._rank, self._size), place_of(call))

        def guarded() -> None:
            state = self._comms.state
            state.check(call.op)
            try:
                with torch.inference_mode():  # the user's tensors may be inference tensors
                    do(call, header)
                state.complete()
            except DureError as e:
                raise state.blame(e, call.op) from None
            except Exception as e:  # such as no memory for scratch; peers must not wait
                state.fail(f"{type(e).__name__}: {e}")
                raise state.error(call.op) from e
            except BaseException:  # Ctrl-C
                state.interrupt()
                raise

        return self._queue.run(guarded, async_op)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        return self._messages.send(tensor, dst, tag, async_op)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        return self._messages.recv(tensor, src, tag, async_op)

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: one block per host, or memory that its ranks read directly."""
        if not node_shared:
            return self._comms.local.allocate(nbytes, False)
        made: list[torch.Tensor] = []

        def make(call: Call, header: Header) -> None:
            self._collectives.run(call, header)
            made.append(self._comms.local.allocate(nbytes, True))

        self._start(Call(op="host_shared_empty", nbytes=nbytes), make, False)
        return made[0]

    def close(self, abort: bool) -> None:
        comms, state = self._comms, self._comms.state
        if state.left.is_set():
            return
        abort = abort or self._queue.busy
        state.left.set()
        if self._watch is not None:
            self._watch.stop(state.num_completed)
        comms.close(abort)  # this ends the receive thread, too
        self._queue.stop()
