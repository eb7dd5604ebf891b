"""The collectives of a process group that move data without changing it, and barrier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.comm import checks
from dure.comm.group.core import GroupCore
from dure.comm.work import Work
from dure.errors import UsageError

__all__ = ["Moving"]


class Moving(GroupCore):
    """Operations that copy the ranks' tensors to each other."""

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy `tensor` of group rank `src` to all."""
        backend = self._backend("broadcast", tensor)
        if src == self._rank:
            memory, finish = checks.readable(tensor), None
        else:
            memory, finish = checks.writable(tensor, load=False, op="broadcast")
        return self._issue(
            "broadcast",
            lambda a: backend.broadcast(memory, src, a),
            [tensor],
            finish=finish,
            async_op=async_op,
            data=memory,
            peer=src,
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
            "all_gather",
            lambda a: backend.all_gather(memories, source, a),
            list(output_list),
            finish=finish,
            async_op=async_op,
            data=source,
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
            name,
            lambda a: backend.all_gather_single(memory, source, a),
            [output],
            finish=finish,
            async_op=async_op,
            data=source,
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
            "gather",
            lambda a: backend.gather(memories, source, dst, a),
            list(gather_list or ()),
            finish=finish,
            async_op=async_op,
            data=source,
            peer=dst,
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
            "scatter",
            lambda a: backend.scatter(memory, sources, src, a),
            [tensor],
            finish=finish,
            async_op=async_op,
            data=memory,
            peer=src,
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
            name,
            lambda a: backend.all_to_all(memories, sources, a),
            list(output_list),
            finish=finish,
            async_op=async_op,
            data=sources[0],
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
            call = lambda a: backend.all_to_all_single(memory, source, a)  # noqa: E731
        else:
            if takes[self._rank] != gives[self._rank]:
                raise self._wrong_size(
                    name,
                    f"this rank sends itself {gives[self._rank]} elements and expects "
                    f"{takes[self._rank]}",
                )
            outs = list(memory.view(-1).split(takes))
            ins = list(source.view(-1).split(gives))
            call = lambda a: backend.all_to_all(outs, ins, a)  # noqa: E731
        return self._issue(name, call, [output], finish=finish, async_op=async_op, data=source)

    def barrier(
        self, async_op: bool = False, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Return when all ranks have called; `timeout` is a limit below the group's own."""
        backend = self._backend("barrier")
        if timeout is None:
            return self._issue("barrier", backend.barrier, [], async_op=async_op)
        work = self._issue("barrier", backend.barrier, [], async_op=True)
        assert work is not None
        if async_op:
            return work
        work.wait(timeout)
        return None

    def shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a zeroed tensor that the group's ranks can reach without copies.

        Collective: all ranks call with the same shape and dtype, in the same order. Where the
        backend has no shared memory, the tensor is an ordinary one.

        Shapes:
            result: `shape`, contiguous, on the CPU; private to this rank as far as values go.
        """
        backend = self._backend("shared_empty")
        numel = math.prod(shape)
        memory = backend.shared_empty(numel * dtype.itemsize) if numel else None
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
        memory = backend.host_shared_empty(numel * dtype.itemsize)
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
