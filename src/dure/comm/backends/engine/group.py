"""A group that a foreign engine serves: our `Backend` contract on top of an engine's calls.

What an engine does differently from the contract is made up for here:

* **Dtypes.** What only moves, moves as bytes. What is reduced travels as a carrier (see
  `carriers`); where there is none, bytes are gathered and reduced in rank order.
* **Lengths.** Engines want equal lengths. An uneven all_gather is padded to the longest part, an
  uneven reduce_scatter is an all_reduce of everything of which each rank keeps its part; gather,
  scatter and all_to_all use the engine's all_to_all with split sizes, where a rank needs to know
  no length but its own.
* **Nothing.** Engines differ in what they do with zero elements; here it is a barrier.
* **Mismatched calls** are beyond a cheap check: unlike our own backends, an engine may hang until
  the timeout, fail, or return wrong numbers when ranks call different things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.engine.calls import EngineCalls
from dure.comm.backends.engine.carriers import Carrier, carry
from dure.comm.backends.engine.starting import Starter
from dure.comm.ops import ReduceOp
from dure.comm.reduction import as_bytes, reduce_in_order
from dure.errors import UsageError

__all__ = ["EngineGroup"]


class EngineGroup:
    """One rank's part of a group that an engine serves; the contract is that of `Backend`.

    Args:
        engine: The engine's calls.
        options: What the group is.
    """

    def __init__(self, engine: EngineCalls, options: BackendOptions) -> None:
        self.name, self.device_types = engine.name, engine.device_types
        self._rank, self._size = options.rank, options.size
        self._in_stream, self._bitwise = engine.in_stream, engine.bitwise
        self._any_source = engine.any_source
        self._starter = Starter(engine, options)
        self._run, self._message = self._starter.run, self._starter.message

    # Reductions ---------------------------------------------------------------------------------

    def _carry(self, tensor: torch.Tensor, op: ReduceOp) -> Carrier | None:
        return carry(tensor, op, self._size, bitwise=self._bitwise)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.all_reduce`."""
        if not tensor.numel():
            return self.barrier(async_op)
        carrier = self._carry(tensor, op)
        if carrier is None:
            return self._gather_and_reduce(
                "all_reduce", tensor, tensor, (0, tensor.numel()), op, async_op
            )
        wire = carrier.wire
        return self._run(
            "all_reduce",
            lambda e: e.all_reduce(wire, carrier.op),
            async_op,
            _landing(carrier, wire, tensor),
        )

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.reduce`."""
        if not tensor.numel():
            return self.barrier(async_op)
        here = self._rank == dst
        carrier = self._carry(tensor, op)
        if carrier is None:
            out = tensor if here else torch.empty_like(tensor)
            return self._gather_and_reduce("reduce", out, tensor, (0, tensor.numel()), op, async_op)
        wire = carrier.wire
        if not here and wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()  # the engine uses it as scratch memory
        return self._run(
            "reduce",
            lambda e: e.reduce(wire, carrier.op, dst),
            async_op,
            _landing(carrier, wire, tensor) if here else None,
        )

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter`; uneven lengths cost an all_reduce of everything."""
        joined = _join(inputs).view(tensor.dtype)
        lengths = [t.numel() for t in inputs]
        if len(set(lengths)) == 1:
            return self.reduce_scatter_single(tensor, joined, op, async_op)
        begin = sum(lengths[: self._rank])
        mine = joined[begin : begin + lengths[self._rank]]
        carrier = self._carry(joined, op)
        if carrier is None:
            part = (begin, begin + mine.numel())
            return self._gather_and_reduce("reduce_scatter", tensor, joined, part, op, async_op)
        ratio = carrier.wire.numel() // joined.numel()
        wire_part = carrier.wire[begin * ratio : (begin + mine.numel()) * ratio]
        return self._run(
            "reduce_scatter",
            lambda e: e.all_reduce(carrier.wire, carrier.op),
            async_op,
            _landing(carrier, wire_part, tensor),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter_single`."""
        name, k = "reduce_scatter_single", output.numel()
        if not tensor.numel():
            return self.barrier(async_op)
        carrier = self._carry(tensor, op)
        if carrier is None:
            part = (self._rank * k, self._rank * k + k)
            return self._gather_and_reduce(name, output, tensor, part, op, async_op)
        wire = carrier.wire
        result = wire.new_empty(wire.numel() // self._size)
        return self._run(
            name,
            lambda e: e.reduce_scatter(result, wire, carrier.op),
            async_op,
            _landing(carrier, result, output),
        )

    def _gather_and_reduce(
        self,
        name: str,
        output: torch.Tensor,
        tensor: torch.Tensor,
        part: tuple[int, int],
        op: ReduceOp,
        async_op: bool,
    ) -> Ticket | None:
        """Reduce elements `part` of all ranks' `tensor` [k] into `output`; sends (n-1)*k."""
        gathered = tensor.new_empty((self._size, tensor.numel()))

        def land() -> None:
            reduce_in_order([row[part[0] : part[1]] for row in gathered], op, output)

        return self._run(
            name,
            lambda e: e.all_gather(as_bytes(gathered), as_bytes(tensor)),
            async_op,
            land,
        )

    # Movements ----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        if not tensor.numel():
            return self.barrier(async_op)
        return self._run("broadcast", lambda e: e.broadcast(as_bytes(tensor), src), async_op)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather`; shorter tensors are padded to the longest."""
        longest = max(t.numel() for t in outputs) * tensor.element_size()
        if not longest:
            return self.barrier(async_op)
        source = as_bytes(tensor)
        if len(source) < longest:
            source = torch.cat([source, source.new_zeros(longest - len(source))])
        gathered = source.new_empty((self._size, longest))

        def land() -> None:
            for target, row in zip(outputs, gathered, strict=True):
                target_bytes = as_bytes(target)
                target_bytes.copy_(row[: len(target_bytes)])

        return self._run(
            "all_gather",
            lambda e: e.all_gather(gathered.view(-1), source),
            async_op,
            land,
        )

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather_single`."""
        if not tensor.numel():
            return self.barrier(async_op)
        return self._run(
            "all_gather_single",
            lambda e: e.all_gather(as_bytes(output), as_bytes(tensor)),
            async_op,
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.gather`."""
        inputs = [tensor if r == dst else tensor.new_empty(0) for r in range(self._size)]
        targets = outputs or [tensor.new_empty(0)] * self._size
        return self._exchange("gather", targets, inputs, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.scatter`."""
        targets = [tensor if r == src else tensor.new_empty(0) for r in range(self._size)]
        sources = inputs or [tensor.new_empty(0)] * self._size
        return self._exchange("scatter", targets, sources, async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all`."""
        return self._exchange("all_to_all", outputs, inputs, async_op)

    def _exchange(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Ticket | None:
        """Send `inputs[j]` to rank j and receive `outputs[i]` from rank i; empty ones are free."""
        takes = [t.numel() * t.element_size() for t in outputs]
        gives = [t.numel() * t.element_size() for t in inputs]
        source = _join(inputs)
        result = source.new_empty(sum(takes))

        def land() -> None:
            end = 0
            for target, length in zip(outputs, takes, strict=True):
                begin, end = end, end + length
                if length:
                    as_bytes(target).copy_(result[begin:end])

        return self._run(name, lambda e: e.exchange(result, source, takes, gives), async_op, land)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all_single`."""
        if not tensor.numel():
            return self.barrier(async_op)
        source = as_bytes(tensor)
        if source.data_ptr() == output.data_ptr():
            source = source.clone()
        return self._run(
            "all_to_all_single",
            lambda e: e.exchange(as_bytes(output), source, [], []),
            async_op,
        )

    def barrier(self, async_op: bool) -> Ticket | None:
        """See `Backend.barrier`."""
        land = torch.cuda.synchronize if self._in_stream else None
        return self._run("barrier", lambda e: e.barrier(), async_op, land)

    # Messages -----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`."""
        ticket = self._message("send", lambda e: e.send(as_bytes(tensor), dst, tag), dst)
        if async_op:
            return ticket
        ticket.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        if src is None and not self._any_source:
            raise UsageError(
                f"{self.name} cannot receive from just anyone", op="recv", fix="Name `src`."
            )
        memory = as_bytes(tensor)
        ticket = self._message("recv", lambda e: e.recv(memory, src, tag), src)
        if not async_op:
            ticket.wait()
        return ticket

    # The rest -----------------------------------------------------------------------------------

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`: an engine's ranks share no memory."""
        del nbytes
        return None

    def host_shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.host_shared_empty`: there is none."""
        del nbytes
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._starter.set_timeout(timeout)

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        self._starter.close(abort)


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of `tensors`, one after another, as a new tensor."""
    return torch.cat([as_bytes(t) for t in tensors])


def _landing(
    carrier: Carrier, result: torch.Tensor, target: torch.Tensor
) -> Callable[[], object] | None:
    """Return what brings `result` to `target` when the engine is done, if anything has to."""
    flat = target.detach().view(-1)
    land = carrier.land
    if land is not None:
        return lambda: land(result, flat)
    if result.data_ptr() != flat.data_ptr():
        return lambda: flat.copy_(result)
    return None
