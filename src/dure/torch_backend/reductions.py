"""The reductions, under the names and in the forms of torch's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from dure.torch_backend.calls import mode_of, only, reduction_of, slots
from dure.torch_backend.identity import TorchGroupBase
from dure.torch_backend.profiling import profiled
from dure.torch_private import c10d

__all__ = ["ReductionOperations"]

Tensors = Sequence[torch.Tensor]


class ReductionOperations(TorchGroupBase):
    """Operations that combine the ranks' tensors. `opts` are torch's options, or a reduction."""

    @profiled("all_reduce")
    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> c10d.Work:
        """Reduce the only tensor of `tensors`, in place, on all ranks."""
        mode = mode_of(opts, timeout)
        tensor = only(tensors, "all_reduce")
        work = self.ours.all_reduce(tensor, reduction_of(opts if op is None else op), mode[0])
        return self._wrap(work, mode)

    @profiled("all_reduce")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> c10d.Work:
        """Reduce each of `tensors`, in place, on all ranks."""
        mode = mode_of(opts)
        work = self.ours.all_reduce_coalesced(tensors, reduction_of(opts), mode[0])
        return self._wrap(work, mode)

    @profiled("reduce")
    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """Reduce the only tensor of `tensors` into that of the root."""
        if isinstance(opts, int):
            opts, root = None, opts
        mode = mode_of(opts, timeout)
        root = getattr(opts, "rootRank", root)
        reduction = reduction_of(opts if op is None else op)
        work = self.ours.reduce(only(tensors, "reduce"), root, reduction, mode[0])
        return self._wrap(work, mode)

    @profiled("reduce_scatter", inputs=1)
    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> c10d.Work:
        """Reduce tensor i of the list in `inputs` into the output of rank i."""
        mode = mode_of(opts, timeout)
        name = "reduce_scatter"
        work = self.ours.reduce_scatter(
            only(outputs, name),
            slots(inputs, name),
            reduction_of(opts if op is None else op),
            mode[0],
        )
        return self._wrap(work, mode)

    @profiled("reduce_scatter_tensor", inputs=1)
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> c10d.Work:
        """Reduce part i of `input` into the `output` of rank i."""
        mode = mode_of(opts)
        work = self.ours.reduce_scatter_single(output, input, reduction_of(opts), mode[0])
        return self._wrap(work, mode)

    _reduce_scatter_base = reduce_scatter_single

    @profiled("reduce_scatter_tensor_coalesced", inputs=1)
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> c10d.Work:
        """Run `reduce_scatter_single` for each pair."""
        mode, op = mode_of(opts), reduction_of(opts)
        works = [
            self.ours.reduce_scatter_single(o, i, op, async_op=True)
            for o, i in zip(outputs, inputs, strict=True)
        ]
        return self._joined(works, list(outputs), mode)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
