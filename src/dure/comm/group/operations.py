"""The operations of a process group, as far as one rank sees them: checks, memory, the call.

*The fast path.* A call on plain tensors (contiguous, on the CPU, of a real dtype; see
csrc/bindings/tensor.h) goes straight to the engine, which makes the checks of the slow path in one
look at the tensor: no list, no closure, no object is made on the way, but the request and the
`Work` of an asynchronous call. What the engine declines, having done nothing, takes the slow path;
so does everything while a hook listens, in a coalescing manager, and on backends without plain
calls. None, which the binding does not take, takes it too. The lines of the fast path are the same
in every operation, and written out because a helper would cost as much as the rest; for the same
reason these methods hold no closures, whose cells cost at every call.

*The slow path* says what this rank alone can know to be wrong, turns odd tensors into plain memory,
and makes the `Call` that the backend runs (group/core.py).

Messages between one pair of ranks with one tag arrive in the order they were sent; a receive
without a source takes the first message with its tag, whoever sent it.
"""

# pyright: reportUnnecessaryComparison=false
# (what users pass is what is looked at)

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.comm import checks
from dure.comm.backends.base import Backend
from dure.comm.backends.verify import CHECK_THEMSELVES, VerifyingBackend
from dure.comm.call import Call
from dure.comm.group.core import GroupCore, started
from dure.comm.group.sparse import sparse_all_reduce
from dure.comm.ops import CONVERSIONS, ReduceOp, as_reduce_op, check_reducible
from dure.comm.work import Work, combine
from dure.errors import UsageError
from dure.trace import hooks

__all__ = ["Operations"]

_CONVERTING = ("SUM", "AVG", "PREMUL_SUM")

_NUM_TAGS = 0x7FFFFFF0
"""What every backend has; those above, of 31 bits, are the backends' own."""


def _fuses(backend: Backend) -> bool:
    """Tell whether premultiplied sums and conversions need no temporaries (ops.CONVERSIONS)."""
    return getattr(backend, "fuses", False)


class Operations(GroupCore):
    """What the ranks of a group can do."""

    # ---- reductions ------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: torch.Tensor, op: object = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` of all ranks, in place, on all ranks."""
        if self._plain is not None and not (hooks or tensor is None or op is None):
            if async_op:
                done = self._plain.start_all_reduce(tensor, op)
            else:
                done = self._plain.plain_all_reduce(tensor, op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_reduce", done, tensor)
        reduction = as_reduce_op(op)
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            return sparse_all_reduce(self, tensor, reduction, async_op)
        return self._reduce("all_reduce", tensor, reduction, -1, async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[torch.Tensor], op: object = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce several tensors; every one of them is checked before the first is sent."""
        reduction = as_reduce_op(op)
        for t in tensors:
            self._backend("all_reduce", t)
            check_reducible(t.dtype, reduction, "all_reduce")
        works = [self.all_reduce(t, reduction, async_op=True) for t in tensors]
        return combine([w for w in works if w is not None], list(tensors), async_op)

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: object = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` of all ranks into that of group rank `dst`."""
        return self._reduce("reduce", tensor, as_reduce_op(op), dst, async_op)

    def _reduce(
        self, name: str, tensor: torch.Tensor, reduction: ReduceOp, root: int, async_op: bool
    ) -> Work | None:
        """Reduce in place, on the root or, where it is -1, on all ranks."""
        backend = self._backend(name, tensor)
        writes = root in (-1, self._rank)
        if writes:
            memory, finish = checks.writable(tensor, load=True, op=name)
        else:
            memory, finish = checks.readable(tensor), None
        scaled, reduction = self._premultiply(backend, memory, reduction, name)
        if scaled is not memory:
            memory = scaled
            finish = checks.copy_back(tensor, scaled) if writes else None
        both = (memory,)
        call = Call(op=name, inputs=both, outputs=both, reduction=reduction, root=root)
        return self._issue(backend, call, [tensor], finish=finish, async_op=async_op)

    def _premultiply(
        self, backend: Backend, tensor: torch.Tensor, op: ReduceOp, name: str
    ) -> tuple[torch.Tensor, ReduceOp]:
        """Turn a premultiplied sum into a sum of scaled copies, where the backend does not fuse."""
        check_reducible(tensor.dtype, op, name)
        if op.name != "PREMUL_SUM":
            return tensor, op
        factor = op.checked_factor(name)
        if _fuses(backend) and not isinstance(factor, torch.Tensor):
            return tensor, op
        return (tensor.detach() * factor).to(tensor.dtype), ReduceOp.SUM

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `input_list[i]` of all ranks into rank i's `output`."""
        name = "reduce_scatter"
        checks.check_list(input_list, self._size, name, "input_list")
        backend = self._backend(name, output, *input_list)
        checks.check_same_dtype(input_list, output.dtype, name)
        mine = input_list[self._rank].numel()
        if output.numel() != mine:
            raise self._wrong_size(
                name, f"output has {output.numel()} elements, input_list[{self._rank}] has {mine}"
            )
        return self._reduce_parts(name, backend, output, input_list, as_reduce_op(op), async_op)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce part i [k] of `input` [n*k] of all ranks into rank i's `output` [k].

        SUM, AVG and premultiplied sums may reduce from bfloat16 or float16 into float32, and back:
        the sum is taken in float32, and rounded once if the output is of 16 bits.
        """
        if self._plain is not None and not (hooks or output is None or input is None or op is None):
            if async_op:
                done = self._plain.start_reduce_scatter(output, input, op)
            else:
                done = self._plain.plain_reduce_scatter(output, input, op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("reduce_scatter_single", done, output)
        name = "reduce_scatter_single"
        backend = self._backend(name, output, input)
        reduction = as_reduce_op(op)
        if (input.dtype, output.dtype) not in CONVERSIONS or reduction.name not in _CONVERTING:
            checks.check_same_dtype([input], output.dtype, name)
        self._check_n_times("input", input, "output", output, name)
        return self._reduce_parts(name, backend, output, [input], reduction, async_op)

    def _reduce_parts(
        self,
        name: str,
        backend: Backend,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: ReduceOp,
        async_op: bool,
    ) -> Work | None:
        memory, finish = checks.writable(output, load=False, op=name)
        if inputs[0].dtype is not output.dtype and not _fuses(backend):  # then in float32
            inputs = [t.detach().float() for t in inputs]
            memory = torch.empty(output.shape, dtype=torch.float32, device=output.device)
            finish = checks.copy_back(output, memory)
        scaled = [self._premultiply(backend, t, reduction, name) for t in inputs]
        sources = [checks.readable(t) for t, _ in scaled]
        call = Call(op=name, inputs=sources, outputs=(memory,), reduction=scaled[0][1])
        return self._issue(backend, call, [output], finish=finish, async_op=async_op)

    # ---- movements -------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy `tensor` of group rank `src` to all."""
        if self._plain is not None and not (hooks or tensor is None):
            if async_op:
                done = self._plain.start_broadcast(tensor, src)
            else:
                done = self._plain.plain_broadcast(tensor, src)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("broadcast", done, tensor)
        backend = self._backend("broadcast", tensor)
        if src == self._rank:
            memory, finish = checks.readable(tensor), None
        else:
            memory, finish = checks.writable(tensor, load=False, op="broadcast")
        both = (memory,)
        call = Call(op="broadcast", inputs=both, outputs=both, root=src)
        return self._issue(backend, call, [tensor], finish=finish, async_op=async_op)

    def all_gather(
        self, output_list: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Copy rank i's `tensor` to `output_list[i]` on all ranks; lengths may differ by rank."""
        name = "all_gather"
        checks.check_list(output_list, self._size, name, "tensor_list")
        backend = self._backend(name, tensor, *output_list)
        self._check_slots(output_list, tensor, name, "tensor_list")
        return self._move(name, backend, [tensor], output_list, -1, async_op)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Copy rank i's `input` [k] to `output` [n*k] at i*k on all ranks."""
        if self._plain is not None and not (hooks or output is None or input is None):
            if async_op:
                done = self._plain.start_all_gather(output, input)
            else:
                done = self._plain.plain_all_gather(output, input)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_gather_single", done, output)
        name = "all_gather_single"
        backend = self._backend(name, output, input)
        checks.check_same_dtype([input], output.dtype, name)
        self._check_n_times("output", output, "input", input, name)
        return self._move(name, backend, [input], [output], -1, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None,
        dst: int,
        async_op: bool = False,
    ) -> Work | None:
        """Copy rank i's `tensor` to `gather_list[i]` on group rank `dst`."""
        backend, slots = self._root_slots("gather", tensor, gather_list, dst)
        return self._move("gather", backend, [tensor], slots, dst, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool = False,
    ) -> Work | None:
        """Copy `scatter_list[i]` of group rank `src` to rank i's `tensor`."""
        backend, slots = self._root_slots("scatter", tensor, scatter_list, src)
        return self._move("scatter", backend, slots, [tensor], src, async_op)

    def all_to_all(
        self,
        output_list: Sequence[torch.Tensor],
        input_list: Sequence[torch.Tensor],
        async_op: bool = False,
    ) -> Work | None:
        """Copy `input_list[j]` of rank i to `output_list[i]` of rank j."""
        name = "all_to_all"
        checks.check_list(output_list, self._size, name, "output_tensor_list")
        checks.check_list(input_list, self._size, name, "input_tensor_list")
        backend = self._backend(name, *output_list, *input_list)
        checks.check_same_dtype([*output_list, *input_list], output_list[0].dtype, name)
        self._check_slots(output_list, input_list[self._rank], name, "output_tensor_list")
        return self._move(name, backend, input_list, output_list, -1, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange rows of `input` by rank; equal parts unless split sizes (in rows) are given."""
        # Split sizes may be arrays, which have no truth value; torch passes [] where it has none.
        even = (
            output_split_sizes is None
            or (type(output_split_sizes) is list and not output_split_sizes)
        ) and (
            input_split_sizes is None or (type(input_split_sizes) is list and not input_split_sizes)
        )
        if even and self._plain is not None and not (hooks or output is None or input is None):
            if async_op:
                done = self._plain.start_all_to_all(output, input)
            else:
                done = self._plain.plain_all_to_all(output, input)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_to_all_single", done, output)
        name, n = "all_to_all_single", self._size
        backend = self._backend(name, output, input)
        checks.check_same_dtype([input], output.dtype, name)
        out_rows = checks.as_splits(output_split_sizes, name, "output")
        in_rows = checks.as_splits(input_split_sizes, name, "input")
        even = not out_rows and not in_rows
        if even and output.numel() != input.numel():
            raise self._wrong_size(
                name, f"output has {output.numel()} elements, input {input.numel()}"
            )
        takes = checks.split_bounds(output, out_rows, n, name, "output")
        gives = checks.split_bounds(input, in_rows, n, name, "input")
        if even:
            return self._move(name, backend, [input], [output], -1, async_op)
        if takes[self._rank] != gives[self._rank]:
            raise self._wrong_size(
                name,
                f"this rank sends itself {gives[self._rank]} elements and expects "
                f"{takes[self._rank]}",
            )
        memory, finish = checks.writable(output, load=False, op=name)
        ins = checks.readable(input).view(-1).split(gives)
        call = Call(op=name, inputs=ins, outputs=memory.view(-1).split(takes))
        return self._issue(backend, call, [output], finish=finish, async_op=async_op)

    def _move(
        self,
        name: str,
        backend: Backend,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        root: int,
        async_op: bool,
    ) -> Work | None:
        """Run a movement of checked tensors that are not each other's memory."""
        sources = [checks.readable(t) for t in inputs]
        pairs = [checks.writable(t, load=False, op=name) for t in outputs]
        call = Call(op=name, inputs=sources, outputs=[memory for memory, _ in pairs], root=root)
        finish = checks.run_all([copy for _, copy in pairs])
        return self._issue(backend, call, list(outputs), finish=finish, async_op=async_op)

    def _root_slots(
        self, name: str, tensor: torch.Tensor, slots: Sequence[torch.Tensor] | None, root: int
    ) -> tuple[Backend, Sequence[torch.Tensor]]:
        """Check a call whose root alone has one tensor a rank; return these, none elsewhere."""
        what = f"{name}_list"
        if self._rank == root and slots is None:
            raise UsageError(
                f"{what} is missing on the root", op=name, rank=self._rank, group=self.group_name
            )
        none = slots is None or (isinstance(slots, (list, tuple)) and not slots)
        if self._rank != root and not none:
            raise UsageError(
                f"{what} is given on a rank that is not the root",
                op=name,
                rank=self._rank,
                group=self.group_name,
                seen=f"the root is rank {root} of the group",
                fix="Pass None (or an empty list) there.",
            )
        if self._rank != root:
            return self._backend(name, tensor), ()
        given = checks.check_list(slots, self._size, name, what)
        backend = self._backend(name, tensor, *given)
        self._check_slots(given, tensor, name, what)
        return backend, given

    def _check_slots(
        self, slots: Sequence[torch.Tensor], tensor: torch.Tensor, op: str, what: str
    ) -> None:
        """Raise unless this rank's own tensor fits into its place among those of all ranks."""
        checks.check_same_dtype(slots, tensor.dtype, op)
        if slots[self._rank].numel() != tensor.numel():
            raise self._wrong_size(
                op,
                f"{what}[{self._rank}] has {slots[self._rank].numel()} elements, this rank's "
                f"tensor {tensor.numel()}",
            )

    def _check_n_times(
        self, all_name: str, of_all: torch.Tensor, one_name: str, of_one: torch.Tensor, op: str
    ) -> None:
        """Raise unless one tensor is as long as all ranks' others together."""
        if of_all.numel() != of_one.numel() * self._size:
            raise self._wrong_size(
                op,
                f"{all_name} has {of_all.numel()} elements, {one_name} {of_one.numel()}, for "
                f"{self._size} ranks; wanted {all_name} = {self._size} x {one_name}",
            )

    def barrier(
        self, async_op: bool = False, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Return when all ranks have called; `timeout` is a limit below the group's own."""
        if self._plain is not None and not hooks and timeout is None:
            done = self._plain.start_barrier() if async_op else self._plain.plain_barrier()
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("barrier", done, None)
        backend = self._backend("barrier")
        deferred = async_op or timeout is not None
        work = self._issue(backend, Call(op="barrier"), [], async_op=deferred)
        if async_op or timeout is None:
            return work
        started(work).wait(timeout)
        return None

    def announce_groups(self, members: int, timeout: timedelta) -> None:
        """Find out whether all ranks make the same groups now, where the backend compares calls.

        Args:
            members: Who is in them (`call.members_code`).
            timeout: How long to wait for the other ranks.

        Raises:
            CommError: As any collective.
        """
        for backend in self._backends.values():
            if backend.name in CHECK_THEMSELVES or isinstance(backend, VerifyingBackend):
                call = Call(op="new_group", nbytes=members)
                started(self._issue(backend, call, [], async_op=True)).wait(timeout)
                return

    # ---- memory ----------------------------------------------------------------------------------

    def shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate as `dure.shared_empty` does, where this group's backend has such memory."""
        memory = self._allocate("shared_empty", shape, dtype, node_shared=False)
        return torch.zeros(shape, dtype=dtype) if memory is None else memory

    def host_shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate as `dure.host_shared_empty` does; a group of one has a tensor of its own."""
        memory = self._allocate("host_shared_empty", shape, dtype, node_shared=True)
        if memory is None:
            raise UsageError(
                "the ranks of this group share no memory",
                op="host_shared_empty",
                group=self.group_name,
                rank=self._rank,
                world_size=self._size,
                seen=f"the backend is {self.backend_name}, where ranks only exchange messages",
                fix='Use the backend "shm" on one host, or "hybrid" on several.',
            )
        return memory

    def _allocate(
        self, op: str, shape: tuple[int, ...], dtype: torch.dtype, *, node_shared: bool
    ) -> torch.Tensor | None:
        backend, numel = self._backend(op), math.prod(shape)
        if numel == 0 or (node_shared and self._size == 1):
            return torch.zeros(shape, dtype=dtype)
        memory = backend.allocate(numel * dtype.itemsize, node_shared)
        return None if memory is None else memory.view(dtype).view(shape)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks by the host whose memory they share; each alone where they share none."""
        known = getattr(self._only, "hosts", None)
        return known or tuple((rank,) for rank in range(self._size))

    # ---- messages --------------------------------------------------------------------------------

    def _check_peer(self, peer: int | None, op: str, tag: int) -> None:
        if peer == self._rank:
            raise UsageError(
                "a rank cannot send to or receive from itself",
                op=op,
                rank=self._rank,
                group=self.group_name,
                fix="Copy the tensor instead.",
            )
        if not 0 <= tag < _NUM_TAGS:
            raise UsageError(
                f"a tag must lie between 0 and {_NUM_TAGS - 1}",
                op=op,
                rank=self._rank,
                seen=f"{tag}",
            )

    def send(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send `tensor` to group rank `dst`."""
        if self._plain is not None and not (async_op or hooks or tensor is None):
            done = self._plain.plain_send(tensor, dst, tag)
            if done is True:
                self.seq += 1
                return None
            if done:
                raise self._plain_error(done)
        op = "isend" if async_op else "send"
        backend = self._backend(op, tensor)
        self._check_peer(dst, op, tag)
        call = Call(op=op, inputs=(checks.readable(tensor),), peer=dst, tag=tag)
        return self._issue(backend, call, [tensor], async_op=async_op)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> int:
        """Receive into `tensor` from group rank `src`, or anyone; return the sender's rank."""
        if self._plain is not None and src is not None and not (hooks or tensor is None):
            done = self._plain.plain_receive(tensor, src, tag)
            if done is True:
                self.seq += 1
                return src
            if done:
                raise self._plain_error(done)
        backend, call, finish = self._prepare_receive(tensor, src, tag, "recv")
        deferred = self._coalesced is not None  # its number stands among theirs
        request, ended = self._start(backend, call, deferred, finish)
        assert request is not None
        if deferred:
            Work(request, [tensor], finish=finish, settled=ended).wait()
        return request.source

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> Work:
        """Begin to receive into `tensor` from group rank `src`, or anyone."""
        backend, call, finish = self._prepare_receive(tensor, src, tag, "irecv")
        return started(self._issue(backend, call, [tensor], finish=finish, async_op=True))

    def _prepare_receive(
        self, tensor: torch.Tensor, src: int | None, tag: int, op: str
    ) -> tuple[Backend, Call, checks.Finish | None]:
        backend = self._backend(op, tensor)
        self._check_peer(src, op, tag)
        memory, finish = checks.writable(tensor, load=False, op=op)
        return backend, Call(op=op, outputs=(memory,), peer=src, tag=tag), finish
