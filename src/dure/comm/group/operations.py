"""The operations of a process group.

*The fast path.* A call on plain tensors (contiguous, on the CPU, of a real dtype; see
csrc/bindings/tensor.h) is passed to the engine, which makes the checks of the slow path. Python
makes no objects for it, except the request and the `Work` of an asynchronous call. The engine
declines other calls without doing anything, and they take the slow path; so do all calls in a
coalescing manager, and on backends without plain calls. The lines of the fast path are repeated in
every operation because a helper would cost as much as the rest; for the same reason these methods
have no closures, whose cells cost time at every call.

The engine also declines every call while a hook listens (dure.trace) or one of torch's profilers
runs (profiling.py), and while a graph is captured, which the slow path refuses (capture.py).

*Versions.* With ``counts=True`` an operation increments the versions of the tensors that it writes,
so that autograd detects the write, as with `Tensor.add_`. The public functions use it, since their
tensors are the program's; Dure's own buckets and unsharded parameters must not be counted. On the
fast path the engine does this, in nanoseconds.

*The slow path* checks the arguments, copies other tensors to plain memory, and makes the `Call`
that the backend runs (group/core.py).

Messages between one pair of ranks with one tag arrive in the order they were sent; a receive
without a source takes the first message with its tag, of any sender.
"""

# pyright: reportUnnecessaryComparison=false
# (programs may pass arguments of other types)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch

from dure.comm import checks, overlap
from dure.comm.call import Call
from dure.comm.capture import out_of_graphs
from dure.comm.group.core import GroupCore, count_writes, started
from dure.comm.group.sparse import sparse_all_reduce
from dure.comm.monitored import monitored_barrier
from dure.comm.ops import ReduceOp, as_reduce_op, check_reducible
from dure.comm.profiling import profiler
from dure.comm.work import Work, combine
from dure.errors import CopyError, UsageError


class ProcessGroup(GroupCore):
    """A set of ranks that communicate; this object is one rank's part.

    All ranks must call the collectives of a group in the same order. Groups are independent of
    each other, and point-to-point messages are independent of collectives. A group has a second
    order of calls: see `channel`. The methods take group ranks; the public functions
    (`dure.broadcast`, ...) take global ranks, and document each operation with its shapes and cost.

    Threads:
        `Work` objects may be used from any thread. Tensors belong to an operation until it has
        ended.

    Obtained from:
        `new_group`, `split_group`, `DeviceMesh.get_group`; `dure.group.WORLD` is the default group.

    Example:
        ```python
        pair = dist.new_group([0, 1])
        tensor = torch.tensor([pair.rank() + 1.0])
        pair.all_reduce(tensor)  # or dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 3.0 and pair.size() == 2
        ```
    """

    splitter: ClassVar[Callable[..., ProcessGroup | None]]
    """`dure.split_group`, which makes groups of this class; set by comm/init.py."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a group is the connections of this process.

        Raises:
            CopyError: Always. It is a `TypeError`, as torch raises here.
        """
        raise CopyError(
            "process groups cannot be copied or pickled",
            group=self.group_name,
            fix="Copy what holds the group without it, such as a state_dict(), or copy it before "
            "it gets the group. Another process makes its own group with dure.new_group().",
        )

    # ---- reductions ------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Reduce `tensor` of all ranks, in place, on all ranks."""
        plain = self._plain
        if plain is not None:
            done = plain.plain_all_reduce(tensor, op, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_reduce", done, tensor)
        reduction = as_reduce_op(op)
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            return sparse_all_reduce(self, tensor, reduction, async_op)
        both = (tensor,)
        call = Call(op="all_reduce", inputs=both, outputs=both, reduction=reduction)
        return self._issue(call, async_op, counts)

    def all_reduce_into(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `input` of all ranks into `output` on all ranks; the two share no memory.

        To the other ranks it is an `all_reduce`.
        """
        plain = self._plain
        if plain is not None:
            done = plain.plain_all_reduce_into(output, input, op, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_reduce", done, output)
        checks.check_memory(input, "all_reduce")  # a clearer error than that of the copy
        output.copy_(input)
        return self.all_reduce(output, op, async_op)

    def all_reduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Reduce several tensors; every one of them is checked before the first is sent."""
        reduction = as_reduce_op(op)
        for t in tensors:
            self._backend("all_reduce", t)
            check_reducible(t.dtype, reduction, "all_reduce")
        overlap.check_apart(tensors, (), "all_reduce_coalesced")
        with nullcontext() if async_op else self.hold("all_reduce_coalesced"):
            starts = async_op or not self.runs_plain
            works = [self.all_reduce(t, reduction, starts, counts) for t in tensors]
            return combine([w for w in works if w is not None], list(tensors), async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Reduce `tensor` of all ranks into that of group rank `dst`."""
        both, reduction = (tensor,), as_reduce_op(op)
        call = Call(op="reduce", inputs=both, outputs=both, reduction=reduction, root=dst)
        return self._issue(call, async_op, counts)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Reduce `input_list[i]` of all ranks into rank i's `output`."""
        plain = self._plain
        if plain is not None:
            done = plain.plain_reduce_scatter_list(output, input_list, op, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("reduce_scatter", done, output)
        reduction, into = as_reduce_op(op), (output,)
        call = Call(op="reduce_scatter", inputs=input_list, outputs=into, reduction=reduction)
        return self._issue(call, async_op, counts)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Reduce part i [k] of `input` [n*k] of all ranks into rank i's `output` [k].

        SUM, AVG and premultiplied sums may reduce from bfloat16 or float16 into float32, and back:
        the sum is taken in float32, and rounded once if the output is of 16 bits.
        """
        plain = self._plain
        if plain is not None:
            done = plain.plain_reduce_scatter(output, input, op, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("reduce_scatter_single", done, output)
        name, reduction = "reduce_scatter_single", as_reduce_op(op)
        call = Call(op=name, inputs=(input,), outputs=(output,), reduction=reduction)
        return self._issue(call, async_op, counts)

    # ---- movements -------------------------------------------------------------------------------

    def broadcast(
        self, tensor: torch.Tensor, src: int, async_op: bool = False, counts: bool = False
    ) -> Work | None:
        """Copy `tensor` of group rank `src` to all."""
        plain = self._plain
        if plain is not None:
            done = plain.plain_broadcast(tensor, src, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("broadcast", done, tensor)
        both = (tensor,)
        call = Call(op="broadcast", inputs=both, outputs=both, root=src)
        return self._issue(call, async_op, counts)

    def all_gather(
        self,
        output_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Copy rank i's `tensor` to `output_list[i]` on all ranks; lengths may differ by rank."""
        plain = self._plain
        if plain is not None:
            done = plain.plain_all_gather_list(output_list, tensor, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_gather", done, *output_list)
        call = Call(op="all_gather", inputs=(tensor,), outputs=output_list)
        return self._issue(call, async_op, counts)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Copy rank i's `input` [k] to `output` [n*k] at i*k on all ranks."""
        plain = self._plain
        if plain is not None:
            done = plain.plain_all_gather(output, input, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_gather_single", done, output)
        call = Call(op="all_gather_single", inputs=(input,), outputs=(output,))
        return self._issue(call, async_op, counts)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None,
        dst: int,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Copy rank i's `tensor` to `gather_list[i]` on group rank `dst`."""
        slots = () if gather_list is None else gather_list
        call = Call(op="gather", inputs=(tensor,), outputs=slots, root=dst)
        return self._issue(call, async_op, counts)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Copy `scatter_list[i]` of group rank `src` to rank i's `tensor`."""
        parts = () if scatter_list is None else scatter_list
        call = Call(op="scatter", inputs=parts, outputs=(tensor,), root=src)
        return self._issue(call, async_op, counts)

    def scatter_along(self, output: torch.Tensor, input: torch.Tensor, dim: int, src: int) -> None:
        """Copy part j of the `input` of group rank `src` to `output` of rank j.

        It is cut into equal parts along `dim`. The other ranks' `input` has its shape, and is not
        read.
        """
        plain = self._plain
        if plain is not None:
            rows = math.prod(input.shape[:dim])
            done = plain.plain_scatter_cut(output, input, src, rows)
            if done is True:
                self.seq += 1
                return
            if done:
                raise self._plain_error(done)
        parts = input.chunk(self._size, dim) if self._rank == src else None
        self.scatter(output, parts, src)

    def all_to_all(
        self,
        output_list: Sequence[torch.Tensor],
        input_list: Sequence[torch.Tensor],
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Copy `input_list[j]` of rank i to `output_list[i]` of rank j."""
        plain = self._plain
        if plain is not None:
            done = plain.plain_all_to_all_list(output_list, input_list, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_to_all", done, *output_list)
        call = Call(op="all_to_all", inputs=input_list, outputs=output_list)
        return self._issue(call, async_op, counts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        counts: bool = False,
    ) -> Work | None:
        """Exchange rows of `input` by rank; equal parts unless split sizes (in rows) are given."""
        # Split sizes may be arrays, which have no truth value; torch passes [] where it has none.
        even = (
            output_split_sizes is None
            or (type(output_split_sizes) is list and not output_split_sizes)
        ) and (
            input_split_sizes is None or (type(input_split_sizes) is list and not input_split_sizes)
        )
        plain = self._plain
        if even and plain is not None:
            done = plain.plain_all_to_all(output, input, counts, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_to_all_single", done, output)
        name = "all_to_all_single"
        self._backend(name, output, input)
        gives = checks.split_rows(input, input_split_sizes, self._size, name, "input")
        takes = checks.split_rows(output, output_split_sizes, self._size, name, "output")
        inputs, outputs = [input], [output]
        if not even:
            inputs = torch.atleast_1d(input.detach()).split(gives)
            outputs = torch.atleast_1d(output.detach()).split(takes)
        return self._issue(Call(op=name, inputs=inputs, outputs=outputs), async_op, counts)

    def all_to_all_along(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_dim: int,
        input_dim: int,
        async_op: bool = False,
    ) -> Work | None:
        """Copy part j of `input` of rank i to part i of `output` of rank j.

        Both are cut into equal parts, each along its own dimension, which the number of ranks
        divides.
        """
        plain = self._plain
        if plain is not None:
            takes, gives = math.prod(output.shape[:output_dim]), math.prod(input.shape[:input_dim])
            done = plain.plain_all_to_all_cut(output, input, takes, gives, async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("all_to_all", done, output)
        outputs = checks.parts_first(output, output_dim, self._size)
        inputs = checks.parts_first(input, input_dim, self._size)
        return self.all_to_all_single(outputs, inputs, async_op=async_op)

    def barrier(
        self, async_op: bool = False, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Return when all ranks have called; `timeout` is a limit below the group's own."""
        plain = self._plain
        if plain is not None and timeout is None:
            done = plain.plain_barrier(async_op)
            if done is True:
                self.seq += 1
                return None
            if done:
                return self._plain_work("barrier", done)
        limit = None if timeout is None else checks.duration(timeout, "barrier")
        work = self._issue(Call(op="barrier"), async_op or limit is not None)
        if work is not None and limit is not None and not async_op:
            work.wait(limit)
            return None
        return work

    def announce_groups(self, members: int, timeout: timedelta) -> None:
        """Check that all ranks make the same groups, if the backend compares calls.

        Args:
            members: A code of the members (`call.members_code`).
            timeout: How long to wait for the other ranks; it may be longer than operations wait.

        Raises:
            CommError: As any collective.
        """
        if not any(getattr(b, "compares_calls", False) for b in self._backends.values()):
            return
        before, creation = self.timeout, self.creation_timeout
        if timeout > before:
            self.set_timeout(timeout)
        try:
            started(self._issue(Call(op="new_group", nbytes=members), True)).wait(timeout)
        finally:
            if timeout > before:
                self.set_timeout(before)
                self.creation_timeout = creation

    # ---- memory ----------------------------------------------------------------------------------

    def allocate(self, op: str, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """Allocate as `Backend.allocate` does; in a group of one rank, an ordinary tensor."""
        backend = self._backend(op)
        if nbytes == 0 or (node_shared and self._size == 1):
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return backend.allocate(nbytes, node_shared)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks by the host whose memory they share; each alone if they share none."""
        known = getattr(self._first, "hosts", None)
        return known or tuple((rank,) for rank in range(self._size))

    @property
    def num_hosts(self) -> int:
        """The number of `hosts`, without a table of all ranks."""
        return len(getattr(self._first, "hosts", None) or ()) or self._size

    # ---- messages --------------------------------------------------------------------------------

    def send(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send `tensor` to group rank `dst`."""
        plain = self._plain
        if plain is not None and not async_op:
            done = plain.plain_send(tensor, dst, tag)
            if done is True:
                self.seq += 1
                return None
            if done:
                raise self._plain_error(done)
        op = "isend" if async_op else "send"
        return self._issue(Call(op=op, inputs=(tensor,), peer=dst, tag=tag), async_op)

    def recv(
        self, tensor: torch.Tensor, src: int | None, tag: int = 0, counts: bool = False
    ) -> int:
        """Receive into `tensor` from group rank `src`, or any rank; return the sender's rank."""
        plain = self._plain
        if plain is not None and src is not None:
            done = plain.plain_receive(tensor, src, tag, counts)
            if done is True:
                self.seq += 1
                return src
            if done:
                raise self._plain_error(done)
        call = Call(op="recv", outputs=(tensor,), peer=src, tag=tag)
        backend, call, finish = self._prepare(call)
        deferred = self._own_manager() is not None
        start = self._start_recorded if profiler._is_profiler_enabled else self._start
        request, ended = start(backend, call, deferred, finish)
        assert request is not None
        if deferred:
            Work(request, [tensor], finish=finish, settled=ended).wait()
        if counts:
            count_writes((tensor,))
        return request.source

    def irecv(
        self, tensor: torch.Tensor, src: int | None, tag: int = 0, counts: bool = False
    ) -> Work:
        """Start to receive into `tensor` from group rank `src`, or any rank."""
        call = Call(op="irecv", outputs=(tensor,), peer=src, tag=tag)
        return started(self._issue(call, True, counts))

    # ---- the names of torch's C++ groups, which start a `Work`; Dure does not use them ----------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Start `all_reduce`; `opts` is a reduction or has one as `reduceOp`, and no `timeout`."""
        return started(self.all_reduce(_one(tensors, "allreduce"), _reduction(opts), async_op=True))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Start `all_reduce_coalesced`."""
        return started(self.all_reduce_coalesced(tensors, _reduction(opts), async_op=True))

    def allgather(self, outputs: Any, tensors: Any, opts: object = None) -> Work:
        """Start `all_gather`."""
        lists = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        return started(self.all_gather(lists, _one(tensors, "allgather"), async_op=True))

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """Start `all_to_all`."""
        return started(self.all_to_all(outputs, inputs, async_op=True))

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this group's ranks; None on the others.

        Args:
            ranks: Ranks of this group.
            timeout: As in `new_group`; that of this group if None.
            opts: `pg_options` of the new group.
            group_name: Its description if there is no `group_desc`; groups are named by Dure.
            group_desc: Its description.

        Collective:
            The ranks in `ranks` call.
        """
        return type(self).splitter(self, [ranks], timeout, opts, group_desc or group_name)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name the ranks that do not call."""
        monitored_barrier(self, timeout, wait_all_ranks)


out_of_graphs(
    ProcessGroup.all_reduce,
    ProcessGroup.all_reduce_coalesced,
    ProcessGroup.reduce,
    ProcessGroup.reduce_scatter,
    ProcessGroup.reduce_scatter_single,
    ProcessGroup.broadcast,
    ProcessGroup.all_gather,
    ProcessGroup.all_gather_single,
    ProcessGroup.gather,
    ProcessGroup.scatter,
    ProcessGroup.all_to_all,
    ProcessGroup.all_to_all_single,
    ProcessGroup.barrier,
    ProcessGroup.send,
    ProcessGroup.recv,
    ProcessGroup.irecv,
)


def _reduction(opts: Any) -> object:
    """Return the reduction of torch's options.

    Raises:
        UsageError: They have a timeout.
    """
    limit = getattr(opts, "timeout", None)
    if limit is not None and limit >= timedelta(0):
        raise UsageError(
            "options of a group's operations cannot have a timeout",
            seen=f"timeout={limit}",
            fix="Leave `timeout` out and call `wait(timeout)` of the Work.",
        )
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _one(tensors: Sequence[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    """Return the tensor of a list of one, the form in which C++ groups take it."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError("expected a list of one tensor", op=op, seen=f"{len(tensors)} tensors")
    return tensors[0]
