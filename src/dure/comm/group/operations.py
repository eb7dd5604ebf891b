"""The operations of a process group, as far as one rank sees them: checks, memory, the call.

Each operation here says what this rank alone can know to be wrong, turns odd tensors into plain
memory, and makes the `Call` that the backend runs (group/core.py). Messages between one pair of
ranks with one tag arrive in the order they were sent; a receive without a source takes the first
message with its tag, whoever sent it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.comm import call as calls
from dure.comm import checks
from dure.comm.backends.base import Backend
from dure.comm.backends.verify import CHECK_THEMSELVES, VerifyingBackend
from dure.comm.call import Call
from dure.comm.group.core import GroupCore
from dure.comm.ops import CONVERSIONS, ReduceOp, as_reduce_op, check_reducible
from dure.comm.sparse import sparse_all_reduce
from dure.comm.work import Work, combine
from dure.errors import UsageError

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

    def _premultiply(
        self, backend: Backend, tensor: torch.Tensor, op: ReduceOp, name: str
    ) -> tuple[torch.Tensor, ReduceOp]:
        """Turn a premultiplied sum into a sum of scaled copies, where the backend does not fuse."""
        check_reducible(tensor.dtype, op, name)
        if op.name != "PREMUL_SUM":
            return tensor, op
        if not isinstance(op.factor, (int, float, torch.Tensor)):
            raise UsageError(
                "PREMUL_SUM has no factor", op=name, fix="Use dure.ReduceOp.premul_sum(factor)."
            )
        if _fuses(backend) and not isinstance(op.factor, torch.Tensor):
            return tensor, op
        return (tensor.detach() * op.factor).to(tensor.dtype), ReduceOp.SUM

    def all_reduce(
        self, tensor: torch.Tensor, op: object = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` of all ranks, in place, on all ranks."""
        reduction = as_reduce_op(op)
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            return sparse_all_reduce(self, tensor, reduction, async_op)
        backend = self._backend("all_reduce", tensor)
        check_reducible(tensor.dtype, reduction, "all_reduce")
        memory, finish = checks.writable(tensor, load=True, op="all_reduce")
        scaled, reduction = self._premultiply(backend, memory, reduction, "all_reduce")
        if scaled is not memory:
            memory, finish = scaled, checks.copy_back(tensor, scaled)
        return self._issue(
            backend, calls.all_reduce(memory, reduction), [tensor], finish=finish, async_op=async_op
        )

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
        self,
        tensor: torch.Tensor,
        dst: int,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `tensor` of all ranks into that of group rank `dst`."""
        backend = self._backend("reduce", tensor)
        reduction = as_reduce_op(op)
        if dst == self._rank:
            memory, finish = checks.writable(tensor, load=True, op="reduce")
        else:
            memory, finish = checks.readable(tensor), None
        scaled, reduction = self._premultiply(backend, memory, reduction, "reduce")
        if scaled is not memory:
            memory = scaled
            finish = checks.copy_back(tensor, scaled) if dst == self._rank else None
        return self._issue(
            backend,
            calls.reduce(memory, dst, reduction),
            [tensor],
            finish=finish,
            async_op=async_op,
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `input_list[i]` of all ranks into rank i's `output`."""
        checks.check_list(input_list, self._size, "reduce_scatter", "input_list")
        backend = self._backend("reduce_scatter", output, *input_list)
        checks.check_same_dtype(input_list, output.dtype, "reduce_scatter")
        mine = input_list[self._rank].numel()
        if output.numel() != mine:
            raise self._wrong_size(
                "reduce_scatter",
                f"output has {output.numel()} elements, input_list[{self._rank}] has {mine}",
            )
        scaled = [
            self._premultiply(backend, t, as_reduce_op(op), "reduce_scatter") for t in input_list
        ]
        inputs, reduction = [checks.readable(t) for t, _ in scaled], scaled[0][1]
        memory, finish = checks.writable(output, load=False, op="reduce_scatter")
        return self._issue(
            backend,
            calls.reduce_scatter(memory, inputs, reduction),
            [output],
            finish=finish,
            async_op=async_op,
        )

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
        name = "reduce_scatter_single"
        backend = self._backend(name, output, input)
        reduction = as_reduce_op(op)
        converts = (input.dtype, output.dtype) in CONVERSIONS and reduction.name in _CONVERTING
        if not converts:
            checks.check_same_dtype([input], output.dtype, name)
        if input.numel() != output.numel() * self._size:
            raise self._wrong_size(
                name,
                f"input has {input.numel()} elements, output {output.numel()}, for {self._size} "
                f"ranks; wanted input = {self._size} x output",
            )
        temporary = converts and not _fuses(backend)  # then it is done in float32
        given = input.detach().float() if temporary else input
        scaled, reduction = self._premultiply(backend, given, reduction, name)
        source = checks.readable(scaled)
        memory, finish = checks.writable(output, load=False, op=name)
        if temporary:
            memory = torch.empty(output.shape, dtype=torch.float32, device=output.device)
            finish = checks.copy_back(output, memory)
        return self._issue(
            backend,
            calls.reduce_scatter_single(memory, source, reduction),
            [output],
            finish=finish,
            async_op=async_op,
        )

    # ---- movements -------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy `tensor` of group rank `src` to all."""
        backend = self._backend("broadcast", tensor)
        if src == self._rank:
            memory, finish = checks.readable(tensor), None
        else:
            memory, finish = checks.writable(tensor, load=False, op="broadcast")
        return self._issue(
            backend, calls.broadcast(memory, src), [tensor], finish=finish, async_op=async_op
        )

    def _writables(
        self, tensors: Sequence[torch.Tensor], op: str
    ) -> tuple[list[torch.Tensor], checks.Finish | None]:
        pairs = [checks.writable(t, load=False, op=op) for t in tensors]
        return [m for m, _ in pairs], checks.run_all([f for _, f in pairs])

    def all_gather(
        self,
        output_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
    ) -> Work | None:
        """Copy rank i's `tensor` to `output_list[i]` on all ranks; lengths may differ by rank."""
        checks.check_list(output_list, self._size, "all_gather", "tensor_list")
        backend = self._backend("all_gather", tensor, *output_list)
        checks.check_same_dtype(output_list, tensor.dtype, "all_gather")
        self._check_own_slot(output_list, tensor, "all_gather", "tensor_list")
        memories, finish = self._writables(output_list, "all_gather")
        source = checks.readable(tensor)
        return self._issue(
            backend,
            calls.all_gather(memories, source),
            list(output_list),
            finish=finish,
            async_op=async_op,
        )

    def _check_own_slot(
        self, slots: Sequence[torch.Tensor], tensor: torch.Tensor, op: str, what: str
    ) -> None:
        if slots[self._rank].numel() != tensor.numel():
            raise self._wrong_size(
                op,
                f"{what}[{self._rank}] has {slots[self._rank].numel()} elements, this rank's "
                f"tensor {tensor.numel()}",
            )

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Copy rank i's `input` [k] to `output` [n*k] at i*k on all ranks."""
        name = "all_gather_single"
        backend = self._backend(name, output, input)
        checks.check_same_dtype([input], output.dtype, name)
        if output.numel() != input.numel() * self._size:
            raise self._wrong_size(
                name,
                f"output has {output.numel()} elements, input {input.numel()}, for {self._size} "
                f"ranks; wanted output = {self._size} x input",
            )
        memory, finish = checks.writable(output, load=False, op=name)
        source = checks.readable(input)
        return self._issue(
            backend,
            calls.all_gather_single(memory, source),
            [output],
            finish=finish,
            async_op=async_op,
        )

    def _only_at_root(self, tensors: object, root: int, op: str, what: str) -> None:
        if self._rank == root and tensors is None:
            raise UsageError(
                f"{what} is missing on the root", op=op, rank=self._rank, group=self.group_name
            )
        none = tensors is None or (isinstance(tensors, (list, tuple)) and not tensors)
        if self._rank != root and not none:
            raise UsageError(
                f"{what} is given on a rank that is not the root",
                op=op,
                rank=self._rank,
                group=self.group_name,
                seen=f"the root is rank {root} of the group",
                fix="Pass None (or an empty list) there.",
            )

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None,
        dst: int,
        async_op: bool = False,
    ) -> Work | None:
        """Copy rank i's `tensor` to `gather_list[i]` on group rank `dst`."""
        self._only_at_root(gather_list, dst, "gather", "gather_list")
        backend = self._backend("gather", tensor)
        memories, finish = None, None
        if self._rank == dst:
            slots = checks.check_list(gather_list, self._size, "gather", "gather_list")
            self._backend("gather", *slots)
            checks.check_same_dtype(slots, tensor.dtype, "gather")
            self._check_own_slot(slots, tensor, "gather", "gather_list")
            memories, finish = self._writables(slots, "gather")
        source = checks.readable(tensor)
        return self._issue(
            backend,
            calls.gather(memories, source, dst),
            list(gather_list or ()),
            finish=finish,
            async_op=async_op,
        )

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool = False,
    ) -> Work | None:
        """Copy `scatter_list[i]` of group rank `src` to rank i's `tensor`."""
        self._only_at_root(scatter_list, src, "scatter", "scatter_list")
        backend = self._backend("scatter", tensor)
        sources = None
        if self._rank == src:
            slots = checks.check_list(scatter_list, self._size, "scatter", "scatter_list")
            self._backend("scatter", *slots)
            checks.check_same_dtype(slots, tensor.dtype, "scatter")
            self._check_own_slot(slots, tensor, "scatter", "scatter_list")
            sources = [checks.readable(t) for t in slots]
        memory, finish = checks.writable(tensor, load=False, op="scatter")
        return self._issue(
            backend, calls.scatter(memory, sources, src), [tensor], finish=finish, async_op=async_op
        )

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
        self._check_own_slot(output_list, input_list[self._rank], name, "output_tensor_list")
        memories, finish = self._writables(output_list, name)
        sources = [checks.readable(t) for t in input_list]
        return self._issue(
            backend,
            calls.all_to_all(memories, sources),
            list(output_list),
            finish=finish,
            async_op=async_op,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange rows of `input` by rank; equal parts unless split sizes (in rows) are given."""
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
        memory, finish = checks.writable(output, load=False, op=name)
        source = checks.readable(input)
        if even:
            call = calls.all_to_all_single(memory, source)
        else:
            if takes[self._rank] != gives[self._rank]:
                raise self._wrong_size(
                    name,
                    f"this rank sends itself {gives[self._rank]} elements and expects "
                    f"{takes[self._rank]}",
                )
            outs = list(memory.view(-1).split(takes))
            ins = list(source.view(-1).split(gives))
            call = Call(op=name, inputs=ins, outputs=outs)
        return self._issue(backend, call, [output], finish=finish, async_op=async_op)

    def barrier(
        self, async_op: bool = False, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Return when all ranks have called; `timeout` is a limit below the group's own."""
        backend = self._backend("barrier")
        if timeout is None:
            return self._issue(backend, calls.barrier(), [], async_op=async_op)
        work = self._issue(backend, calls.barrier(), [], async_op=True)
        assert work is not None
        if async_op:
            return work
        work.wait(timeout)
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
                work = self._issue(backend, calls.new_group(members), [], async_op=True)
                assert work is not None
                work.wait(timeout)
                return

    def shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a zeroed tensor that the group's ranks can reach without copies.

        Collective: all ranks call with the same shape and dtype, in the same order. Where the
        backend has no shared memory, the tensor is an ordinary one.

        Shapes:
            result: `shape`, contiguous, on the CPU; private to this rank as far as values go.
        """
        backend = self._backend("shared_empty")
        numel = math.prod(shape)
        memory = backend.allocate(numel * dtype.itemsize, False) if numel else None
        if memory is None:
            return torch.zeros(shape, dtype=dtype)
        return memory.view(dtype).view(shape)

    def host_shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a zeroed tensor that is one memory for all ranks of a host.

        Collective: all ranks call with the same shape and dtype, in the same order.

        Shapes:
            result: `shape`, contiguous, on the CPU.

        Raises:
            UsageError: The group's backend has no memory that ranks share.
        """
        backend = self._backend("host_shared_empty")
        numel = math.prod(shape)
        if numel == 0 or self._size == 1:
            return torch.zeros(shape, dtype=dtype)
        memory = backend.allocate(numel * dtype.itemsize, True)
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
        return memory.view(dtype).view(shape)

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
        op = "isend" if async_op else "send"
        backend = self._backend(op, tensor)
        self._check_peer(dst, op, tag)
        call = Call(op=op, inputs=(checks.readable(tensor),), peer=dst, tag=tag)
        return self._issue(backend, call, [tensor], async_op=async_op)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> int:
        """Receive into `tensor` from group rank `src`, or anyone; return the sender's rank."""
        backend, call, finish = self._prepare_receive(tensor, src, tag, "recv")
        deferred = self._coalesced is not None  # its number stands among theirs
        request, ended = self._start(backend, call, deferred, finish)
        assert request is not None
        if deferred:
            Work(request, [tensor], finish=finish, keep=call, settled=ended).wait()
        return request.source

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> Work:
        """Begin to receive into `tensor` from group rank `src`, or anyone."""
        backend, call, finish = self._prepare_receive(tensor, src, tag, "irecv")
        work = self._issue(backend, call, [tensor], finish=finish, async_op=True)
        assert work is not None
        return work

    def _prepare_receive(
        self, tensor: torch.Tensor, src: int | None, tag: int, op: str
    ) -> tuple[Backend, Call, checks.Finish | None]:
        backend = self._backend(op, tensor)
        self._check_peer(src, op, tag)
        memory, finish = checks.writable(tensor, load=False, op=op)
        return backend, Call(op=op, outputs=(memory,), peer=src, tag=tag), finish
