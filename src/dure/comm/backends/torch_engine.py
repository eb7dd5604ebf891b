"""Torch's own process groups as engines: Gloo, NCCL, and any other `Backend` object of torch.

Torch's classes are used as plain objects: nothing of torch.distributed's global state is touched,
and `torch.distributed.init_process_group` is never called. What an engine does differently from
our contract is made up for here:

* **Dtypes.** What only moves, moves as bytes. What is reduced travels as a carrier (see
  `carriers`); where there is none, bytes are gathered and reduced in rank order.
* **Lengths.** Engines want equal lengths. An uneven all_gather is padded to the longest part, an
  uneven reduce_scatter is an all_reduce of everything of which each rank keeps its part; gather,
  scatter and all_to_all use the engine's all_to_all with split sizes, where a rank needs to know
  no length but its own.
* **Leaving.** Gloo cannot abort. A receive that times out at once makes it close all connections
  of the group, which ends what is pending here and shows the peers that this rank has gone.
* **Mismatched calls** are beyond a cheap check: unlike our own backends, Gloo may hang until the
  timeout, fail, or return wrong numbers when ranks call different things.

Ranks find each other through our store, which torch's classes see as one of theirs. All ranks of
one host: loopback; otherwise the interface that routes to the job's master.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch._C import _distributed_c10d as c10d

from dure import env
from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.carriers import Carrier, carry
from dure.comm.backends.engine_tickets import (
    CollectiveTicket,
    EngineState,
    EngineWork,
    MessageTicket,
)
from dure.comm.backends.engine_trouble import TroubleLog
from dure.comm.ops import ReduceOp
from dure.comm.reduction import as_bytes, reduce_in_order
from dure.errors import DureError, UsageError
from dure.store.base import Store

__all__ = ["TorchEngine", "create_gloo", "create_nccl"]

Engine = Any  # torch's Backend, whose stub leaves the collectives out
_POISON = timedelta(milliseconds=1)
_POISON_TAG = 0x7FFFFFF0
_OPS = {
    name: getattr(c10d.ReduceOp, name)
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


# --- making one ----------------------------------------------------------------------------------


class _StoreBridge(c10d.Store):
    """Our store, as torch's classes want to see one."""

    def __init__(self, store: Store) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def deleteKey(self, key: str) -> bool:
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        return False


def create_gloo(options: BackendOptions) -> TorchEngine:
    """Make this rank's part of a Gloo group; every rank must do so.

    Raises:
        UsageError: Torch was built without Gloo.
        CommError: A rank did not come, or could not be connected to.
    """
    cls = getattr(c10d, "ProcessGroupGloo", None)
    if cls is None:
        raise UsageError(
            "this torch was built without Gloo", fix="Use the shm backend, or another torch."
        )
    settings = cls._Options()
    settings._devices = [cls.create_device(hostname=_own_address(options))]
    settings._timeout = options.timeout
    settings._threads = 2
    return _connect("gloo", frozenset({"cpu"}), cls, settings, options)


def create_nccl(options: BackendOptions) -> TorchEngine:
    """Make this rank's part of an NCCL group; every rank must do so, with its device set.

    Raises:
        UsageError: Torch has no NCCL (a CPU build), or there is no CUDA device.
        CommError: A rank did not come, or could not be connected to.
    """
    cls = getattr(c10d, "ProcessGroupNCCL", None)
    if cls is None or not torch.cuda.is_available():
        why = "this torch was built without NCCL" if cls is None else "there is no CUDA device"
        raise UsageError(
            "the nccl backend cannot run here", seen=why, fix="Use shm or gloo for CPU tensors."
        )
    if options.device_id is not None:
        torch.cuda.set_device(options.device_id)
    settings = cls.Options()
    settings._timeout = options.timeout
    return _connect("nccl", frozenset({"cuda"}), cls, settings, options)


def _connect(
    name: str,
    device_types: frozenset[str],
    cls: Callable[..., Engine],
    settings: object,
    options: BackendOptions,
) -> TorchEngine:
    began = time.monotonic()
    bridge = _StoreBridge(options.store)
    try:
        engine = cls(bridge, options.rank, options.size, settings)
    except RuntimeError as e:
        state = EngineState(
            options.name, options.rank, options.size, lambda _: ((), ()), lambda: None
        )
        raise state.translate(e, f"create {name}", began) from e
    return TorchEngine(name, device_types, engine, options)


def _own_address(options: BackendOptions) -> str:
    """Return the address peers can reach this rank at: loopback if all are on this host."""
    keys = [f"engine/host/{r}" for r in range(options.size)]
    options.store.set(keys[options.rank], platform.node())
    options.store.wait(keys, options.timeout)
    if len({*options.store.multi_get(keys)}) == 1:
        return "127.0.0.1"
    master = env.text("MASTER_ADDR")
    if master is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((master, 9))  # sends nothing: only asks which interface it would be
            return probe.getsockname()[0]
    return platform.node()


# --- the adapter ---------------------------------------------------------------------------------


class TorchEngine:
    """One rank's part of a group that one of torch's engines serves; see `Backend`.

    Args:
        name: As users name it.
        device_types: Whose tensors the engine takes.
        engine: Torch's object.
        options: What the group is.
    """

    def __init__(
        self,
        name: str,
        device_types: frozenset[str],
        engine: Engine,
        options: BackendOptions,
    ) -> None:
        self.name, self.device_types = name, device_types
        self._engine: Engine | None = engine
        self._rank, self._size = options.rank, options.size
        self._in_stream = "cuda" in device_types
        self._trouble = TroubleLog(options.store, options.rank, options.size)
        self._state = EngineState(
            options.name, options.rank, options.size, self._trouble.ask, self._break_off
        )
        self._collectives: set[CollectiveTicket] = set()
        self._messages: WeakSet[MessageTicket] = WeakSet()

    def _torch(self) -> Engine:
        """Return torch's object, unless the group was left."""
        if self._engine is None:
            raise RuntimeError("the group was left")
        return self._engine

    def _translated(
        self, error: RuntimeError, op: str, began: float, peer: int | None = None
    ) -> DureError:
        if isinstance(error, DureError):
            return error
        return self._state.translate(error, op, began, peer)

    def _run(
        self,
        op: str,
        start: Callable[[Engine], EngineWork],
        async_op: bool,
        land: Callable[[], object] | None = None,
    ) -> Ticket | None:
        """Start the engine's work and, unless asynchronous, wait for it."""
        began = time.monotonic()
        try:
            work = start(self._torch())
        except RuntimeError as e:
            raise self._translated(e, op, began) from e
        ticket = CollectiveTicket(self._state, op, work, land, self._in_stream)
        if not async_op:
            ticket.wait()
            return None
        self._collectives = {t for t in self._collectives if not t.ended}
        self._collectives.add(ticket)
        return ticket

    # Reductions ---------------------------------------------------------------------------------

    def _carry(self, tensor: torch.Tensor, op: ReduceOp) -> Carrier | None:
        return carry(tensor, op, self._size, bitwise=self.name != "nccl")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.all_reduce`."""
        if not tensor.numel():
            return self.barrier(async_op)
        carrier = self._carry(tensor, op)
        if carrier is None:
            return self._gather_and_reduce(
                "all_reduce", tensor, tensor, (0, tensor.numel()), op, async_op
            )
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[carrier.op]
        wire = carrier.wire
        return self._run(
            "all_reduce",
            lambda e: e.allreduce([wire], options),
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
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = _OPS[carrier.op], dst
        wire = carrier.wire
        if not here and wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()  # the engine uses it as scratch memory
        return self._run(
            "reduce",
            lambda e: e.reduce([wire], options),
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
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[carrier.op]
        ratio = carrier.wire.numel() // joined.numel()
        wire_part = carrier.wire[begin * ratio : (begin + mine.numel()) * ratio]
        return self._run(
            "reduce_scatter",
            lambda e: e.allreduce([carrier.wire], options),
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
        options = c10d.ReduceScatterOptions()
        options.reduceOp = _OPS[carrier.op]
        wire = carrier.wire
        result = wire.new_empty(wire.numel() // self._size)
        return self._run(
            name,
            lambda e: e._reduce_scatter_base(result, wire, options),
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
            lambda e: e._allgather_base(as_bytes(gathered), as_bytes(tensor)),
            async_op,
            land,
        )

    # Movements ----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        if not tensor.numel():
            return self.barrier(async_op)
        options = c10d.BroadcastOptions()
        options.rootRank = src
        return self._run("broadcast", lambda e: e.broadcast([as_bytes(tensor)], options), async_op)

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
            lambda e: e._allgather_base(gathered.view(-1), source),
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
            lambda e: e._allgather_base(as_bytes(output), as_bytes(tensor)),
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

        return self._run(
            name, lambda e: e.alltoall_base(result, source, takes, gives), async_op, land
        )

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
            lambda e: e.alltoall_base(as_bytes(output), source, [], []),
            async_op,
        )

    def barrier(self, async_op: bool) -> Ticket | None:
        """See `Backend.barrier`."""
        if self._in_stream:
            token = torch.zeros(1, dtype=torch.uint8, device="cuda")
            return self._run(
                "barrier", lambda e: e.allreduce([token]), async_op, torch.cuda.synchronize
            )
        return self._run("barrier", lambda e: e.barrier(), async_op)

    # Messages -----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`."""
        ticket = self._message("send", lambda e: e.send([as_bytes(tensor)], dst, tag), dst)
        if async_op:
            return ticket
        ticket.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        if src is None and self._in_stream:
            raise UsageError("nccl cannot receive from just anyone", op="recv", fix="Name `src`.")
        memory = [as_bytes(tensor)]
        ticket = self._message(
            "recv",
            lambda e: e.recv_anysource(memory, tag) if src is None else e.recv(memory, src, tag),
            src,
        )
        if not async_op:
            ticket.wait()
        return ticket

    def _message(
        self, op: str, start: Callable[[Engine], EngineWork], peer: int | None
    ) -> MessageTicket:
        began = time.monotonic()
        try:
            work = start(self._torch())
        except RuntimeError as e:
            raise self._translated(e, op, began, peer) from e
        ticket = MessageTicket(self._state, op, work, peer)
        self._messages.add(ticket)
        return ticket

    # The rest -----------------------------------------------------------------------------------

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`: an engine's ranks share no memory."""
        del nbytes
        return None

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        pending = not all(t.ended for t in [*self._collectives, *self._messages])
        self._state.left.set()
        self._trouble.say("left")
        if self._in_stream:
            engine.abort() if abort or pending else engine.shutdown()
        elif abort or pending:
            _poison(engine, self._peers())

    def _peers(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank]

    def _break_off(self) -> None:
        if self._engine is not None and not self._in_stream:
            _poison(self._engine, self._peers())


def _poison(engine: Engine, peers: list[int]) -> None:
    """Make Gloo close the group's connections: see "Leaving" above."""
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in peers:
        try:
            engine.recv([nothing], peer, _POISON_TAG).wait(_POISON)
        except RuntimeError as e:
            if "Timed out" in str(e):
                return  # else this connection was closed already: try another


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
