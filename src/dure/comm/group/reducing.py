"""The reductions of a process group: all_reduce, reduce, reduce_scatter and their forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm import checks
from dure.comm.group.moving import Moving
from dure.comm.ops import ReduceOp, as_reduce_op, check_reducible
from dure.comm.sparse import sparse_all_reduce
from dure.comm.work import Work, combine
from dure.errors import UsageError

__all__ = ["Reducing"]


class Reducing(Moving):
    """Operations that combine the ranks' tensors."""

    def _premultiply(
        self, tensor: torch.Tensor, op: ReduceOp, name: str
    ) -> tuple[torch.Tensor, ReduceOp]:
        """Turn a premultiplied sum into a sum of scaled copies."""
        check_reducible(tensor.dtype, op, name)
        if op.name != "PREMUL_SUM":
            return tensor, op
        if not isinstance(op.factor, (int, float, torch.Tensor)):
            raise UsageError(
                "PREMUL_SUM has no factor", op=name, fix="Use dure.ReduceOp.premul_sum(factor)."
            )
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
        scaled, reduction = self._premultiply(memory, reduction, "all_reduce")
        if scaled is not memory:
            memory, finish = scaled, checks.copy_back(tensor, scaled)
        return self._issue(
            "all_reduce",
            lambda a: backend.all_reduce(memory, reduction, a),
            [tensor],
            finish=finish,
            async_op=async_op,
            data=memory,
            detail=reduction.name,
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
        scaled, reduction = self._premultiply(memory, reduction, "reduce")
        if scaled is not memory:
            memory = scaled
            finish = checks.copy_back(tensor, scaled) if dst == self._rank else None
        return self._issue(
            "reduce",
            lambda a: backend.reduce(memory, dst, reduction, a),
            [tensor],
            finish=finish,
            async_op=async_op,
            data=memory,
            peer=dst,
            detail=reduction.name,
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
        scaled = [self._premultiply(t, as_reduce_op(op), "reduce_scatter") for t in input_list]
        inputs, reduction = [checks.readable(t) for t, _ in scaled], scaled[0][1]
        memory, finish = checks.writable(output, load=False, op="reduce_scatter")
        return self._issue(
            "reduce_scatter",
            lambda a: backend.reduce_scatter(memory, inputs, reduction, a),
            [output],
            finish=finish,
            async_op=async_op,
            data=memory,
            detail=reduction.name,
        )

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce part i [k] of `input` [n*k] of all ranks into rank i's `output` [k]."""
        name = "reduce_scatter_single"
        backend = self._backend(name, output, input)
        checks.check_same_dtype([input], output.dtype, name)
        if input.numel() != output.numel() * self._size:
            raise self._wrong_size(
                name,
                f"input has {input.numel()} elements, output {output.numel()}, for {self._size} "
                f"ranks; wanted input = {self._size} x output",
            )
        scaled, reduction = self._premultiply(input, as_reduce_op(op), name)
        source = checks.readable(scaled)
        memory, finish = checks.writable(output, load=False, op=name)
        return self._issue(
            name,
            lambda a: backend.reduce_scatter_single(memory, source, reduction, a),
            [output],
            finish=finish,
            async_op=async_op,
            data=source,
            detail=reduction.name,
        )
