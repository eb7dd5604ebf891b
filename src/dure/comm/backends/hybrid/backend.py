"""The backend of several hosts: shared memory inside a host, an engine between hosts.

A hybrid group is put together from other backends (subcomms.py, which has the words): one `shm`
group for each host, one engine group for each rail, and one that joins all ranks. header.py tells
how every collective begins, and how the small ones are over with that; collectives.py the large
ones; messages.py point-to-point; creation.py how the group comes about; state.py and control.py
what happens when a rank, a host or a link is lost.

Threads: as the contract says. Asynchronous collectives run on a thread of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.collectives import Moves, Reductions, fold_by_host
from dure.comm.backends.hybrid.control import SILENCE_S, Watch
from dure.comm.backends.hybrid.header import Header, HeaderExchange
from dure.comm.backends.hybrid.messages import Messages
from dure.comm.backends.hybrid.subcomms import SubComms
from dure.comm.backends.queue import OrderedQueue
from dure.comm.backends.request import Request
from dure.comm.call import Call, call_site, fingerprint
from dure.comm.ops import ReduceOp
from dure.errors import DureError

__all__ = ["LOCAL_SLACK", "HybridBackend"]

LOCAL_SLACK = timedelta(seconds=1)
"""How much longer the ranks of a host wait for each other: one of them may wait for another host,
and knows better who is missing."""


class HybridBackend:
    """One rank's part of a group over several hosts; the contract is that of `Backend`.

    Args:
        name: The backend's name, which says what joins the hosts.
        comms: The group's sub-communicators.
        watch: On a leader, who watches the other hosts.
        options: What the group is.
    """

    device_types = frozenset({"cpu"})

    def __init__(
        self, name: str, comms: SubComms, watch: Watch | None, options: BackendOptions
    ) -> None:
        self.name = name
        self._comms, self._watch, self._hosts = comms, watch, comms.hosts
        self._rank, self._size = options.rank, options.size
        self._headers = HeaderExchange(comms)
        self._reductions, self._moves = Reductions(comms), Moves(comms)
        self._messages = Messages(comms)
        self._queue = OrderedQueue(
            f"dure-{options.name}", lambda: comms.state.error("a collective")
        )
        if watch is not None:
            comms.absent = lambda: watch.absent(self._headers.begun)
            watch.start(self._headers)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host."""
        return self._hosts.ranks

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has died or left, as far as this rank can know without its host."""
        host, place = self._hosts.place_of(rank)
        if host == self._hosts.here:
            return self._comms.local.gone(place)
        return place == 0 and self._lost_for_s(rank) > 0

    def silent(self, rank: int) -> bool:
        """Tell whether nothing can be heard of `rank` any more, whose host has lost its leader.

        It may live: then it knows of that at once, and has had the time to show itself.
        """
        return self._lost_for_s(rank) > SILENCE_S

    def severed(self, rank: int) -> bool:
        """Tell whether the host of `rank` fell silent: it may live, and the link may be cut."""
        return self._watch is not None and self._watch.fell_silent(rank)

    def _lost_for_s(self, rank: int) -> float:
        return 0.0 if self._watch is None else self._watch.lost_for_s(rank)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._comms.state.timeout_s = timeout.total_seconds()
        self._comms.local.set_timeout(timeout + LOCAL_SLACK)

    # ---- collectives -----------------------------------------------------------------------------

    def run(self, call: Call, async_op: bool) -> Request | None:
        """See `Backend.run`."""
        return self._start(call, getattr(self, f"_{call.kind}"), async_op)

    def _start(
        self, call: Call, do: Callable[[Call, Header], None], async_op: bool
    ) -> Request | None:
        """Run a collective, and let what goes wrong with it break the group on all ranks."""
        header = Header(fingerprint(call, self._rank, self._size), call_site())

        def guarded() -> None:
            state = self._comms.state
            state.check(call.op)
            try:
                with torch.inference_mode():  # the user's tensors may be inference tensors
                    do(call, header)
                state.completed.add()
            except DureError as e:
                raise state.blame(e, call.op) from e
            except Exception as e:  # no memory for scratch, say: peers must not wait for the rest
                state.fail(f"{type(e).__name__}: {e}")
                raise state.error(call.op) from e
            except BaseException:  # Ctrl-C
                state.interrupt()
                raise

        return self._queue.run(guarded, async_op)

    def _small(self, nbytes: int) -> bool:
        return nbytes <= self._headers.room

    def _settling(self) -> Iterator[object]:
        """Settle the header exchange when advanced."""
        yield self._headers.settle()

    def _barrier(self, call: Call, header: Header) -> None:
        self._headers.run(call.op, header)

    _new_group = _barrier

    def _all_reduce(self, call: Call, header: Header) -> None:
        (tensor,), op = call.outputs, _reduction(call)
        if self._small(tensor.nbytes):
            headers = self._headers.run(call.op, header, [tensor])
            fold_by_host(self._hosts, _parts_of(headers, tensor), op, tensor)
        else:
            self._headers.begin(call.op, header)
            self._reductions.all_reduce(tensor, op, self._settling())

    def _reduce(self, call: Call, header: Header) -> None:
        (tensor,), op = call.outputs, _reduction(call)
        if not self._small(tensor.nbytes):
            self._headers.begin(call.op, header)
            self._reductions.reduce(tensor, op, call.root, self._settling())
            return
        headers = self._headers.run(call.op, header, [tensor])
        if self._rank == call.root:
            fold_by_host(self._hosts, _parts_of(headers, tensor), op, tensor)

    def _reduce_scatter(self, call: Call, header: Header) -> None:
        (output,), inputs, op = call.outputs, call.gives(self._size), _reduction(call)
        if not self._small(sum(t.nbytes for t in inputs)):
            self._headers.run(call.op, header)
            self._reductions.reduce_scatter(output, inputs, op)
            return
        headers = self._headers.run(call.op, header, inputs)
        begin = sum(t.numel() for t in inputs[: self._rank])
        end = begin + output.numel()
        parts = [p[begin:end] for p in _parts_of(headers, output)]
        fold_by_host(self._hosts, parts, op, output)

    def _broadcast(self, call: Call, header: Header) -> None:
        (tensor,), src = call.outputs, call.root
        if not self._small(tensor.nbytes):
            self._headers.run(call.op, header)
            self._moves.broadcast(tensor, src)
            return
        headers = self._headers.run(call.op, header, [tensor] if self._rank == src else None)
        if self._rank != src:
            _fill(tensor, headers[src].data)

    def _all_gather(self, call: Call, header: Header) -> None:
        (tensor,), outputs = call.inputs, call.takes(self._size)
        if not self._small(max(t.nbytes for t in outputs)):
            self._headers.run(call.op, header)
            self._moves.all_gather(outputs, tensor)
            return
        headers = self._headers.run(call.op, header, [tensor])
        for output, other in zip(outputs, headers, strict=True):
            _fill(output, other.data)

    def _gather(self, call: Call, header: Header) -> None:
        (tensor,), outputs = call.inputs, call.outputs or None
        data = [tensor] if self._small(tensor.nbytes) else None
        headers = self._headers.run(call.op, header, data)
        for r, other in enumerate(headers):
            if outputs is not None and other.data is not None:
                _fill(outputs[r], other.data)
        waiting = [r for r, other in enumerate(headers) if other.data is None]
        self._moves.gather(outputs, tensor, call.root, waiting)

    def _scatter(self, call: Call, header: Header) -> None:
        (tensor,), inputs = call.outputs, call.inputs or None
        small = inputs is not None and self._small(sum(t.nbytes for t in inputs))
        headers = self._headers.run(call.op, header, inputs if small else None)
        data = headers[call.root].data
        if data is None:
            self._moves.scatter(tensor, inputs, call.root)
            return
        before = sum(other.fingerprint.own for other in headers[: self._rank])
        begin = before * tensor.element_size()
        _fill(tensor, data[begin : begin + tensor.nbytes])

    def _all_to_all(self, call: Call, header: Header) -> None:
        inputs, outputs = call.gives(self._size), call.takes(self._size)
        if call.single and call.inputs[0].data_ptr() == call.outputs[0].data_ptr():
            # Each rank's input is read before its output is written, small or large.
            inputs = [t.clone() for t in inputs]
        table = torch.tensor([t.nbytes for t in inputs], dtype=torch.int32)
        parts = [table, *inputs]
        small = self._small(sum(t.nbytes for t in parts))
        headers = self._headers.run(call.op, header, parts if small else None)
        if any(other.data is None for other in headers):
            self._moves.all_to_all(outputs, inputs)
            return
        for output, other in zip(outputs, headers, strict=True):
            assert other.data is not None
            lengths = _as_tensor(other.data[: table.nbytes], torch.int32)
            begin = table.nbytes + int(lengths[: self._rank].sum())
            _fill(output, other.data[begin : begin + output.nbytes])

    # ---- messages, memory, life ------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """See `Backend.send`."""
        return self._messages.send(tensor, dst, tag, async_op)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        """See `Backend.recv`."""
        return self._messages.recv(tensor, src, tag, async_op)

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: one memory a host, or what its ranks reach directly."""
        if not node_shared:
            return self._comms.local.allocate(nbytes, False)
        made: list[torch.Tensor] = []

        def make(call: Call, header: Header) -> None:
            self._headers.run(call.op, header)
            made.append(self._comms.local.allocate(nbytes, True))

        self._start(Call(op="host_shared_empty", nbytes=nbytes), make, False)
        return made[0]

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        comms, state = self._comms, self._comms.state
        if state.left.is_set():
            return
        abort = abort or self._queue.busy
        state.left.set()
        if self._watch is not None:
            self._watch.stop(state.completed.mine)
        comms.local.close(abort)
        for engine in state.engines:  # which ends the thread that receives, too
            engine.close(abort)
        self._queue.stop()


def _reduction(call: Call) -> ReduceOp:
    assert call.reduction is not None
    return call.reduction


def _parts_of(headers: Sequence[Header], like: torch.Tensor) -> list[torch.Tensor]:
    """Return the data of all ranks as tensors of the dtype of `like`."""
    return [_as_tensor(header.data, like.dtype) for header in headers]


def _as_tensor(data: bytes | None, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes that travelled with a header as a flat tensor of its own."""
    assert data is not None
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def _fill(tensor: torch.Tensor, data: bytes | None) -> None:
    """Write bytes that travelled with a header into a tensor."""
    flat = tensor.detach().view(-1)
    if flat.numel():
        flat.copy_(_as_tensor(data, flat.dtype))
