"""The backend of several hosts: shared memory inside a host, an engine between hosts.

A hybrid group is put together from other backends (links.py): one `shm` group for each
host, one engine group for each lane, and one that joins all ranks. hosts.py has the words;
opening.py tells how every collective begins, and how the small ones are over with that;
reductions.py and moves.py the large ones; messages.py point-to-point;
creation.py and rendezvous.py how the group comes about; fate.py and watch.py what happens when
a rank, a host or a link is lost.

A group whose ranks all share one host is a `shm` group, and nothing more.

Threads: as the contract says. Asynchronous collectives run on a thread of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.hybrid.links import Links
from dure.comm.backends.hybrid.messages import Messages
from dure.comm.backends.hybrid.moves import Moves
from dure.comm.backends.hybrid.opening import Call, Opening, digest_of, mix
from dure.comm.backends.hybrid.pieces import as_tensor, even_parts, fill, parts_of
from dure.comm.backends.hybrid.queue import OperationQueue
from dure.comm.backends.hybrid.reductions import Reductions, fold_by_host
from dure.comm.backends.hybrid.rendezvous import LOCAL_SLACK
from dure.comm.backends.hybrid.watch import SILENCE_S, Watch
from dure.comm.ops import ReduceOp
from dure.errors import DureError

__all__ = ["HybridBackend"]


class HybridBackend:
    """One rank's part of a group over several hosts; the contract is that of `Backend`.

    Args:
        name: The backend's name, which says what joins the hosts.
        links: The group's parts.
        watch: On a leader, who watches the other hosts.
        options: What the group is.
    """

    device_types = frozenset({"cpu"})

    def __init__(
        self, name: str, links: Links, watch: Watch | None, options: BackendOptions
    ) -> None:
        self.name = name
        self._links, self._watch, self._hosts = links, watch, links.hosts
        self._rank, self._size = options.rank, options.size
        self._opening = Opening(links)
        self._reductions, self._moves = Reductions(links), Moves(links)
        self._messages = Messages(links)
        self._queue = OperationQueue(
            f"dure-{options.name}", lambda: links.fate.error("a collective")
        )
        if watch is not None:
            links.absent = lambda: watch.absent(self._opening.begun)
            watch.start(self._opening)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host."""
        return self._hosts.ranks

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has died or left, as far as this rank can know without its host."""
        host, place = self._hosts.place_of(rank)
        if host == self._hosts.here:
            return self._links.local.gone(place)
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
        self._links.fate.timeout_s = timeout.total_seconds()
        self._links.local.set_timeout(timeout + LOCAL_SLACK)

    def _run(self, op: str, action: Callable[[], object], async_op: bool) -> Ticket | None:
        """Run a collective, and let what goes wrong with it break the group on all ranks."""

        def guarded() -> None:
            fate = self._links.fate
            fate.check(op)
            try:
                with torch.inference_mode():  # the user's tensors may be inference tensors
                    action()
                fate.tally.end()
            except DureError as e:
                raise fate.blame(e, op) from e
            except BaseException:  # Ctrl-C: peers must not wait for the rest
                fate.interrupt()
                raise

        return self._queue.run(guarded, async_op)

    def _small(self, nbytes: int) -> bool:
        return nbytes <= self._opening.room

    def _settling(self) -> Iterator[object]:
        """Settle the opening when advanced."""
        yield self._opening.settle()

    # ---- reductions ------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.all_reduce`."""
        call = Call(op="all_reduce", tensor=tensor, reduction=op, equal=(tensor.numel(),))
        text = call.text()

        def action() -> None:
            if self._small(tensor.nbytes):
                frames = self._opening.run(call, text, [tensor])
                fold_by_host(self._hosts, parts_of(frames, tensor), op, tensor)
            else:
                self._opening.begin(call, text)
                self._reductions.all_reduce(tensor, op, self._settling())

        return self._run(call.op, action, async_op)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.reduce`."""
        call = Call(op="reduce", tensor=tensor, reduction=op, root=dst, equal=(tensor.numel(),))
        text = call.text()

        def action() -> None:
            if self._small(tensor.nbytes):
                frames = self._opening.run(call, text, [tensor])
                if self._rank == dst:
                    fold_by_host(self._hosts, parts_of(frames, tensor), op, tensor)
            else:
                self._opening.begin(call, text)
                self._reductions.reduce(tensor, op, dst, self._settling())

        return self._run(call.op, action, async_op)

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter`."""
        return self._reduce_scatter("reduce_scatter", tensor, inputs, op, async_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter_single`."""
        inputs = even_parts(tensor, self._size)
        return self._reduce_scatter("reduce_scatter_single", output, inputs, op, async_op)

    def _reduce_scatter(
        self,
        name: str,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool,
    ) -> Ticket | None:
        lengths = tuple(t.numel() for t in inputs)
        call = Call(op=name, tensor=output, reduction=op, equal=lengths)
        text = call.text()

        def action() -> None:
            if self._small(sum(t.nbytes for t in inputs)):
                frames = self._opening.run(call, text, inputs)
                begin = sum(lengths[: self._rank])
                end = begin + lengths[self._rank]
                parts = [p[begin:end] for p in parts_of(frames, output)]
                fold_by_host(self._hosts, parts, op, output)
            else:
                self._opening.run(call, text)
                self._reductions.reduce_scatter(output, inputs, op)

        return self._run(name, action, async_op)

    # ---- moves -----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        call = Call(op="broadcast", tensor=tensor, root=src, equal=(tensor.numel(),))
        text = call.text()

        def action() -> None:
            if self._small(tensor.nbytes):
                mine = [tensor] if self._rank == src else None
                frames = self._opening.run(call, text, mine)
                if self._rank != src:
                    fill(tensor, frames[src].data)
            else:
                self._opening.run(call, text)
                self._moves.broadcast(tensor, src)

        return self._run(call.op, action, async_op)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather`."""
        return self._all_gather("all_gather", outputs, tensor, async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather_single`."""
        return self._all_gather(
            "all_gather_single", even_parts(output, self._size), tensor, async_op
        )

    def _all_gather(
        self, name: str, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        call = Call(op=name, tensor=tensor, equal=tuple(t.numel() for t in outputs))
        text = call.text()

        def action() -> None:
            if self._small(max(t.nbytes for t in outputs)):
                frames = self._opening.run(call, text, [tensor])
                for output, frame in zip(outputs, frames, strict=True):
                    fill(output, frame.data)
            else:
                self._opening.run(call, text)
                self._moves.all_gather(outputs, tensor)

        return self._run(name, action, async_op)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.gather`."""
        expected = 0 if outputs is None else digest_of([t.numel() for t in outputs])
        call = Call(op="gather", tensor=tensor, root=dst, count=tensor.numel(), expected=expected)
        text = call.text()

        def action() -> None:
            small = self._small(tensor.nbytes)
            frames = self._opening.run(call, text, [tensor] if small else None)
            for r, frame in enumerate(frames):
                if outputs is not None and frame.data is not None:
                    fill(outputs[r], frame.data)
            waiting = [r for r, frame in enumerate(frames) if frame.data is None]
            self._moves.gather(outputs, tensor, dst, waiting)

        return self._run(call.op, action, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.scatter`."""
        lengths = [t.numel() for t in inputs or ()]
        expected = 0 if inputs is None else digest_of(lengths)
        call = Call(op="scatter", tensor=tensor, root=src, count=tensor.numel(), expected=expected)
        text = call.text()

        def action() -> None:
            small = inputs is not None and self._small(sum(t.nbytes for t in inputs))
            frames = self._opening.run(call, text, inputs if small else None)
            data = frames[src].data
            if data is None:
                self._moves.scatter(tensor, inputs, src)
                return
            begin = sum(frame.count for frame in frames[: self._rank]) * tensor.element_size()
            fill(tensor, data[begin : begin + tensor.nbytes])

        return self._run(call.op, action, async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all`."""
        me = self._rank
        call = Call(
            op="all_to_all",
            tensor=inputs[0],
            sends=sum(mix(me, r, t.numel()) for r, t in enumerate(inputs)),
            takes=sum(mix(r, me, t.numel()) for r, t in enumerate(outputs)),
        )
        return self._all_to_all(call, outputs, inputs, async_op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all_single`."""
        call = Call(op="all_to_all_single", tensor=tensor, equal=(tensor.numel(),))
        # Each rank's input is read before its output is written, on both roads.
        if output.data_ptr() == tensor.data_ptr():
            tensor = tensor.clone()
        return self._all_to_all(
            call, even_parts(output, self._size), even_parts(tensor, self._size), async_op
        )

    def _all_to_all(
        self,
        call: Call,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Ticket | None:
        text = call.text()
        table = torch.tensor([t.nbytes for t in inputs], dtype=torch.int32)

        def action() -> None:
            parts = [table, *inputs]
            small = self._small(sum(t.nbytes for t in parts))
            frames = self._opening.run(call, text, parts if small else None)
            if any(frame.data is None for frame in frames):
                self._moves.all_to_all(outputs, inputs)
                return
            for output, frame in zip(outputs, frames, strict=True):
                assert frame.data is not None
                lengths = as_tensor(frame.data[: table.nbytes], torch.int32)
                begin = table.nbytes + int(lengths[: self._rank].sum())
                fill(output, frame.data[begin : begin + output.nbytes])

        return self._run(call.op, action, async_op)

    def barrier(self, async_op: bool) -> Ticket | None:
        """See `Backend.barrier`."""
        call = Call(op="barrier")
        text = call.text()
        return self._run("barrier", lambda: self._opening.run(call, text), async_op)

    # ---- messages, memory, life ------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`."""
        return self._messages.send(tensor, dst, tag, async_op)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        return self._messages.recv(tensor, src, tag, async_op)

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`: memory that the ranks of this host reach directly."""
        return self._allocate("shared_empty", nbytes, self._links.local.shared_empty)

    def host_shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.host_shared_empty`: one memory a host."""
        return self._allocate("host_shared_empty", nbytes, self._links.local.host_shared_empty)

    def _allocate(
        self, op: str, nbytes: int, make: Callable[[int], torch.Tensor]
    ) -> torch.Tensor | None:
        call = Call(op=op, equal=(nbytes,))
        text = call.text()
        made: list[torch.Tensor] = []

        def action() -> None:
            self._opening.run(call, text)
            made.append(make(nbytes))

        self._run(call.op, action, False)
        return made[0]

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        links, fate = self._links, self._links.fate
        if fate.left.is_set():
            return
        abort = abort or self._queue.busy
        fate.left.set()
        if self._watch is not None:
            self._watch.stop(fate.tally.mine)
        links.local.close(abort)
        self._messages.close()
        for engine in fate.engines:
            engine.close(abort)
        self._queue.stop()
